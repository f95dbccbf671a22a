"""CUDA before it is opened."""

from __future__ import annotations

import importlib.util
import runpy
import warnings
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_accel.spec import BackendSpec, Probe

if TYPE_CHECKING:
    from lantern_accel.backend import Backend


class Spec(BackendSpec):
    """GPUs that torch drives as ``cuda``: NVIDIA's, and AMD's through ROCm."""

    name = "cuda"
    summary = "NVIDIA GPUs (and AMD's, with a ROCm build of torch)"
    api_version = 1
    priority = 20

    def prepare(self, environ: MutableMapping[str, str]) -> None:
        """Set nothing: CUDA needs no environment."""

    def probe(self) -> Probe:
        """Look at torch's build first, which is quick, and only then for a driver."""
        build = _torch_build()
        if build.get("cuda") is None and build.get("hip") is None:
            return Probe.missing(
                f"this torch build ({build.get('__version__', 'unknown')}) has no CUDA support",
                "install a CUDA build of torch from pytorch.org",
            )
        import torch

        # torch says why there is no GPU in a warning.
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            available = torch.cuda.is_available()
        if not available:
            why = [str(one.message).split(". ")[0] for one in said]
            return Probe.missing(
                "; ".join(why) or "torch finds no GPU",
                "check that nvidia-smi lists a GPU and that CUDA_VISIBLE_DEVICES does not hide it",
            )
        found = []
        for index in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(index)
            found.append(f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB")
        return Probe.found(*found)

    def open(self, index: int, options: Mapping[str, Any]) -> Backend:
        """Open GPU ``index``; there are no options."""
        from lantern_accel.backend import check_options
        from lantern_accel_cuda.backend import DeviceBackend

        check_options(self.name, options, {})
        return DeviceBackend(index)


def _torch_build() -> dict[str, Any]:
    """Read torch's version file without importing torch, which takes most of a second."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))
