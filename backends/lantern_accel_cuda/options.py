"""What a user can choose about this backend, ``--option name=value``, and what each choice means."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lantern_accel.device.spec import check_options
from lantern_accel.errors import BackendError, did_you_mean

CHOICES: dict[str, tuple[str, ...]] = {
    "graph": ("step", "phases", "off"),
    "compile": ("off", "default", "max-autotune-no-cudagraphs"),
    "attention": ("sdpa", "matmul", "triton"),
    "kernels": ("torch", "triton"),
}
MEANINGS = {
    "graph": "what one CUDA graph holds: the whole step, one of its phases (for profiling), nothing",
    "compile": "torch.compile's mode inside the captured step",
    "attention": "torch's attention kernel, batched matrix products, or this backend's Triton kernel",
    "kernels": "norms, rotation and cache writes by torch, or fused by this backend's Triton kernels",
}


@dataclass(frozen=True)
class Options:
    """Checked choices; the first of each is the default until another is measured to be faster."""

    graph: str = "step"
    compile: str = "off"
    attention: str = "sdpa"
    kernels: str = "torch"
    asked: bool = False
    """Whether the user asked for captured or compiled steps: one that cannot be is an error then."""

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Options:
        """Check options by name and value; raises BackendError for what there is not."""
        listing = {
            name: f"{meaning} ({', '.join(CHOICES[name])})" for name, meaning in MEANINGS.items()
        }
        check_options("cuda", given, listing)
        for name, value in given.items():
            if value not in CHOICES[name]:
                near = did_you_mean(str(value), CHOICES[name])
                raise BackendError(f"backend 'cuda' got {name}={value!r}{near}")
        wanted = [given.get("graph", "off"), given.get("compile", "off")]
        options = cls(**given, asked=any(one != "off" for one in wanted))
        wants = [one.name for one in fields(options) if getattr(options, one.name) == "triton"]
        if wants and importlib.util.find_spec("triton") is None:
            raise BackendError(
                f"backend 'cuda' got {wants[0]}=triton, but the package triton is not installed; "
                "torch's CUDA builds for Linux bring it: install one of those, or choose another "
                f"{wants[0]}"
            )
        return options
