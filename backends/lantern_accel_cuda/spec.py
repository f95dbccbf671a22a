"""CUDA before it is opened."""

from __future__ import annotations

import importlib.util
import runpy
import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_accel.device.compiled import keep_torch
from lantern_accel.device.spec import BackendSpec, Probe

if TYPE_CHECKING:
    from lantern_accel.device.backend import Backend


class Spec(BackendSpec):
    """NVIDIA's GPUs. AMD's, which torch also calls ``cuda``, are recognised and were never tried."""

    name = "cuda"
    summary = "NVIDIA GPUs"
    api_version = 1
    scheduled_as = "GPU"
    also_known_as = ("nvidia", "geforce", "rtx", "rocm", "hip")
    priority = 20
    aliases = ("gpu",)
    variants = ({}, {"preset": "safe"})

    @property
    def seconds_to_probe(self) -> float:  # type: ignore[override]  # here it depends on the cards
        """Thirty, and more for each card: without persistence mode a driver starts one by one."""
        return 30.0 + 4.0 * _cards_of_driver()

    def configure(self, options: Mapping[str, Any]) -> BackendSpec:
        """Refuse an option that there is not before torch is imported."""
        from lantern_accel_cuda.options import Options

        Options.read(options)
        return self

    def prepare(self, environ: MutableMapping[str, str]) -> None:
        """Let what is compiled be kept, and Triton contract products and sums without a warning."""
        keep_torch(environ)
        environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

    def processes(self, index: int) -> Sequence[Mapping[str, str]] | None:
        """One where the GPU is in the compute mode that clusters set for it, else any number."""
        from lantern_accel_cuda.meters import Card

        return [{}] if Card(index).exclusive() else None

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
            why = "; ".join(str(one.message).split(". ")[0] for one in said)
            way = next(way for part, way in WAYS_OUT.items() if part in why.lower())
            return Probe.missing(why or "torch finds no GPU", way.format(**build))
        try:
            found = [_describe(index) for index in range(torch.cuda.device_count())]
            wanting = [_lacking(index) for index in range(len(found))]
        except RuntimeError as error:
            told = " ".join(str(error).split(". ")[0].split())
            return Probe.broken(
                f"the driver lists a GPU, and CUDA does not start on it ({told})",
                "check with nvidia-smi that it works and that no other process holds it alone",
            )
        if all(wanting):
            return Probe.broken(wanting[0], "install a torch build that names it")
        pairs = zip(found, wanting, strict=True)
        return Probe.of_devices(
            *(f"{one}, no kernels in this torch" if no else one for one, no in pairs)
        )

    def open(self, index: int, options: Mapping[str, Any]) -> Backend:
        """Open GPU ``index`` and use it once; see :mod:`lantern_accel_cuda.options` for the options.

        Raises BackendError for a GPU that is busy, has no memory left, or that torch has no kernels for.
        """
        import torch

        from lantern_accel.errors import BackendError
        from lantern_accel_cuda import faults
        from lantern_accel_cuda.backend import DeviceBackend
        from lantern_accel_cuda.options import Options

        chosen = Options.read(options)
        device = torch.device("cuda", index)
        try:
            if lacking := _lacking(index):
                raise BackendError(f"{lacking}; install a torch build that names it")
            backend = DeviceBackend(index, chosen)
        except RuntimeError as error:
            raise faults.not_opened(error, device) from error
        try:
            backend.acquire()
        except Exception as error:
            backend.close()
            if isinstance(error, RuntimeError):
                raise faults.not_opened(error, device) from error
            raise
        return backend


#: What helps against the reasons that torch gives for seeing no GPU, by a part of their text.
WAYS_OUT = {
    "too old": "update the NVIDIA driver, or install a torch built for an older CUDA (this one is "
    "built for {cuda})",
    "no nvidia driver": "install the NVIDIA driver; nvidia-smi must list the GPU",
    "unknown error": "the driver answers, but CUDA does not start: reload the kernel module nvidia_uvm "
    "or reboot, and check that the container was given the GPU",
    "": "check that nvidia-smi lists a GPU and that CUDA_VISIBLE_DEVICES does not hide it",
}


def _cards_of_driver(root: Path = Path("/proc/driver/nvidia/gpus")) -> int:
    """Return the cards that NVIDIA's driver lists on Linux, without starting one; 0 where it does not."""
    try:
        return sum(1 for _ in root.iterdir())
    except OSError:
        return 0


def _describe(index: int) -> str:
    import torch

    facts = torch.cuda.get_device_properties(index)
    return f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB"


def _lacking(index: int) -> str:
    """Say that this build of torch has no kernels for a GPU; "" where it has some."""
    import torch

    if torch.version.hip is not None:
        return ""
    major, minor = torch.cuda.get_device_capability(index)
    have = torch.cuda.get_arch_list()
    numbers = [(kind, int(n)) for kind, _, n in (one.partition("_") for one in have) if n.isdigit()]
    # Machine code runs on later cards of the same generation, PTX on all later ones.
    fits = any(
        number <= 10 * major + minor and (kind == "compute" or number // 10 == major)
        for kind, number in numbers
    )
    if fits or not numbers:
        return ""
    name = torch.cuda.get_device_properties(index).name
    return (
        f"this torch build ({torch.__version__}) has kernels for {', '.join(have)}, but the GPU "
        f"cuda:{index} ({name}) is sm_{major}{minor}"
    )


def _torch_build() -> dict[str, Any]:
    """Read torch's version file without importing torch, which takes most of a second."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))
