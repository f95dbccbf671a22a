"""Lists the releases of other libraries that this one was tested with; others are refused by name."""

from __future__ import annotations

import importlib.metadata
import re

from lantern_accel.errors import ModelError

#: From the first release to before the second, without those that follow.
TESTED: dict[str, tuple[str, ...]] = {
    # 0.40 and 0.41 give GLM-Image other timesteps than it is asked for (diffusers' pull request 14011).
    "diffusers": ("0.37", "0.43", "0.40", "0.41"),
    "transformers": ("5.8", "5.25"),
    "ray": ("2.60", "2.61"),
    "sglang": ("0.5.23", "0.5.24"),
    "vllm-omni": ("0.30", "0.31"),
}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def find_release(library: str) -> str | None:
    """Return the installed release of a library; None where there is none. Imports nothing."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def problem(library: str) -> str | None:
    """Return why a library cannot be used here, and a way out; None for a tested release."""
    first, end, *wrong = TESTED[library]
    found, without = find_release(library), "".join(f"!={one}.*," for one in wrong)
    if found is None:
        return (
            f'{library} is not installed; run `pip install "lantern-accel[{library}]"` for one of '
            f"{first} to before {end}"
        )
    inside = _numbers(first) <= _numbers(found) < _numbers(end)
    if inside and not found.startswith(tuple(f"{one}." for one in wrong)):
        return None
    return (
        f"{library} {found} is installed, but only releases from {first} to before {end} were tested; "
        f'run `pip install "{library}>={first},{without}<{end}"`'
    )


def require(library: str) -> None:
    """Raise :class:`ModelError` where a library is absent, or of a release outside the tested range."""
    said = problem(library)
    if said is not None:
        raise ModelError(said)
