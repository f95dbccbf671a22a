"""Points compilers to the cache folder before their first use, unless the user named another."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from pathlib import Path

from lantern_accel.files import persistent_dir

#: What was named here, so that another cache folder may be named later in the same process.
_ours: dict[str, str] = {}


def keep(
    environ: MutableMapping[str, str],
    variable: str,
    name: str,
    form: str = "{}",
    also: tuple[str, ...] = (),
    local: Callable[[Path], Path | None] | None = None,
) -> None:
    """Let a compiler keep its work in the folder ``compiled/name`` of the cache.

    ``variable`` gets the folder in ``form``. A variable that the user has set stays, and nothing is set
    where the user has set one of ``also`` (an older name). ``local`` may name another folder for the one
    that was found, or none, as a compiler needs that cannot keep files everywhere. Where no cache can be
    written nothing is set either. Never raises.
    """
    given = environ.get(variable)
    if given is not None and given != _ours.get(variable):
        return
    if any(environ.get(one) for one in also):
        return
    folder = persistent_dir(f"compiled/{name}")
    if folder is not None and local is not None:
        folder = local(folder)
    if folder is None or ("," in form and "," in str(folder)):
        if given is not None:  # ours, of a cache that is gone
            del environ[variable]
        _ours.pop(variable, None)
        return
    environ[variable] = _ours[variable] = form.format(folder.resolve())


def keep_torch(environ: MutableMapping[str, str]) -> None:
    """Let torch.compile keep its graphs, and Triton its kernels, in the cache."""
    keep(environ, "TORCHINDUCTOR_CACHE_DIR", "inductor")
    keep(environ, "TRITON_CACHE_DIR", "triton")
