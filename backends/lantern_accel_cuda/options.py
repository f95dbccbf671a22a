"""Options of this backend, ``--option name=value``, and what each choice means."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lantern_accel.device.spec import check_options
from lantern_accel.errors import DeviceRequestError, LanternWarning, did_you_mean

CHOICES: dict[str, tuple[str, ...]] = {
    "preset": ("fast", "safe", "exact"),
    "graph": ("step", "phases", "off"),
}
#: Of the Triton kernels (:data:`.agreement.KERNELS`), those that are checked in one dtype at a time, when
#: they are to serve in it.
BY_DTYPE = frozenset({"attend", "rms_norm", "swiglu", "rotate_write", "rounded", "tiles", "few"})
#: Of these, the one that is checked by rule and residual.
BY_RULE = frozenset({"accept"})
RESIDUALS: tuple[Literal["aggregate", "optimal"], ...] = ("aggregate", "optimal")
#: Of these, the ones that a plain step of any model asks for: they are checked together.
EVERY_STEP = (
    "few", "filter", "attend", "race", "advance", "rotate_write", "enter", "guide", "rms_norm",
    "swiglu", "draw",
)  # fmt: skip
#: Of these, the ones whose products are those of tensor cores.
TENSOR_CORES = frozenset({"attend", "rounded", "tiles", "few"})
MEANINGS = {
    "preset": (
        "fast: this backend's Triton kernels, each checked on the card first; safe: torch's own; "
        "exact: as fast, with one order of sums for all draft lengths"
    ),
    "graph": "what one CUDA graph holds: the whole step, one of its phases (for profiling), nothing",
}


@dataclass(frozen=True)
class Options:
    """Checked choices; the first of each is the default."""

    preset: str = "fast"
    graph: str = "step"
    asked: bool = False
    """Whether the user asked for captured steps: one that cannot be is an error then."""

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Options:
        """Check options by name and value; raises DeviceRequestError for what there is not."""
        listing = {
            name: f"{meaning} ({', '.join(CHOICES[name])})" for name, meaning in MEANINGS.items()
        }
        check_options("cuda", given, listing)
        for name, value in given.items():
            if value not in CHOICES[name]:
                near = did_you_mean(str(value), CHOICES[name])
                raise DeviceRequestError(f"backend 'cuda' got {name}={value!r}{near}")
        options = cls(**given, asked=given.get("graph", "off") != "off")
        preset, spec = given.get("preset", "safe"), importlib.util.find_spec("triton")
        if preset != "safe" and spec is None:
            raise DeviceRequestError(
                f"backend 'cuda' got preset={preset}, but the package triton is not installed; torch's "
                "CUDA builds for Linux have it: install one of those, or give preset=safe"
            )
        return options

    @property
    def fused(self) -> bool:
        """Whether Triton kernels are wanted and can be had."""
        return self.preset != "safe" and has_triton()


def has_triton() -> bool:
    """Return whether Triton can be imported; says so where it is installed and cannot be."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        import triton  # noqa: F401 (some installations cannot load it)
    except Exception as error:
        warnings.warn(
            f"Triton cannot be imported ({error}), and torch's operators serve in place of its kernels; "
            "install the release that torch names, or give --option preset=safe",
            LanternWarning,
            stacklevel=2,
        )
        return False
    return True


def check_name(kernel: str, dtype: Any, rule: str = "exact, aggregate") -> str:
    """Return the name of a kernel's check; ``dtype``: a torch dtype that it is to serve in.

    ``rule``: kind of rule and residual, of a walk down a tree.
    """
    if kernel in BY_DTYPE:
        return f"{kernel} in {str(dtype).removeprefix('torch.')}"
    return f"{kernel} by {rule}" if kernel in BY_RULE else kernel
