"""Explains errors of the GPU, and names the way out, in one sentence each."""

from __future__ import annotations

import errno
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lantern_accel.errors import BackendError, DeviceLostError, DeviceMemoryError

#: What a kernel does to the GPU.
BY_KERNEL = (
    "unspecified launch failure",
    "illegal memory access",
    "illegal instruction",
    "illegal address",
    "misaligned address",
    "device-side assert",
    "hardware stack error",
    "launch timed out",
)
#: After these the CUDA context is gone: every later call in this process fails too.
LOST = (
    *BY_KERNEL,
    "uncorrectable ecc",
    "gpu is lost",
    "fallen off the bus",
    "no cuda-capable device",
    "invalid device ordinal",
    "device unavailable",
    "busy or unavailable",
    "driver shutting down",
    "unknown error",
    "nvlink",
)
#: Errors of Triton's that say that a kernel cannot be compiled for this GPU, by class or text.
NOT_COMPILED = frozenset({"CompilationError", "PTXASError", "OutOfResources"})
NOT_LOWERED = ("passmanager::run failed", "internal triton ptx codegen error")
#: What CUDA says of work that a stream cannot record.
NOT_CAPTURABLE = ("is capturing", "during capture", "capture was invalidated", "stream capture")


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it was raised from or while handling, the innermost last."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or at.__context__


def is_lost(error: BaseException, words: tuple[str, ...] = LOST) -> bool:
    """Return whether the GPU, or this process's use of it, is gone; ``words`` say how."""
    texts = [str(one).lower() for one in chain(error) if isinstance(one, RuntimeError)]
    return any(
        ("cuda" in text or "hip" in text or "nvml" in text) and any(word in text for word in words)
        for text in texts
    )


def by_kernel(error: BaseException) -> bool:
    """Return whether a kernel's check failed by what the kernel is, on this GPU and with this Triton.

    True for a result that differs, a kernel that Triton cannot compile, and one that broke the GPU.
    """
    from lantern_accel.testing.result import Failed

    if isinstance(error, Failed) or is_lost(error, BY_KERNEL):
        return True
    names = {cls.__name__ for one in chain(error) for cls in type(one).__mro__}
    lowered = any(word in str(one).lower() for one in chain(error) for word in NOT_LOWERED)
    return lacking(error) is None and (bool(names & NOT_COMPILED) or lowered)


def lacking(error: BaseException) -> str | None:
    """Say what Triton does not find on this machine and what to install; None: it is not that."""
    errors = list(chain(error))
    texts = [str(one).lower() for one in errors]
    if any(isinstance(one, subprocess.SubprocessError) for one in errors):
        if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
            return "Python.h is not installed; apt-get install python3-dev"
        return f"the C compiler failed ({texts[0][:120]}); apt-get install gcc python3-dev"
    if any("c compiler" in text for text in texts):
        return "there is no C compiler; apt-get install gcc"
    if any("libcuda" in text or "/sbin/ldconfig" in text for text in texts):
        return (
            "the driver's libcuda.so.1 is not found; apt-get install libnvidia-compute-VERSION, or start "
            "the container with --gpus all, and run ldconfig"
        )
    for one, text in zip(errors, texts, strict=True):
        code = one.errno if isinstance(one, OSError) else None
        if code in (errno.ENOSPC, errno.EDQUOT) or "no space left" in text:
            return f"the disk is full ({text}); free some, or name folders in TRITON_CACHE_DIR and TMPDIR"
        if isinstance(one, OSError | ImportError):
            return f"{text}; name folders for programs in TRITON_CACHE_DIR and TMPDIR"
    return None


def out_of_memory(error: BaseException) -> torch.OutOfMemoryError | None:
    """Return the allocator's complaint in an error's chain, if there is one."""
    return next((one for one in chain(error) if isinstance(one, torch.OutOfMemoryError)), None)


def not_capturable(error: BaseException) -> bool:
    """Return whether a step did something that a CUDA graph cannot hold."""
    texts = [str(one).lower() for one in chain(error) if isinstance(one, RuntimeError)]
    return any(word in text for text in texts for word in NOT_CAPTURABLE)


def explain(error: BaseException, device: torch.device, doing: str) -> BackendError | None:
    """Turn an error from the GPU into one that says what to do; None for any other error.

    ``doing`` continues "while", such as ``"replaying the step"``.
    """
    if isinstance(error, BackendError):
        return None
    if is_lost(error):
        return DeviceLostError(
            f"the GPU {device} stopped working while {doing} ({_first_line(error)}); the batch in "
            "progress is lost, what was returned or written before is kept; start a new process, "
            "and if it happens again look at nvidia-smi and at the kernel's log (dmesg, Xid)"
        )
    if out_of_memory(error) is not None:
        return _full(error, device, doing)
    return None


def _full(error: BaseException, device: torch.device, doing: str) -> DeviceMemoryError:
    """Return the error of a full GPU: torch's says how much was asked for, and how much is free."""
    asked = ". ".join(str(out_of_memory(error)).split(". ")[:3])
    return DeviceMemoryError(
        f"the GPU {device} ran out of memory while {doing} ({asked}); choose a smaller batch, the dtype "
        "bfloat16 or float16, or another GPU with --device cuda:N, or end other programs that use this "
        "one (nvidia-smi lists them)"
    )


def not_opened(error: BaseException, device: torch.device) -> BackendError:
    """Say why a GPU cannot be opened: busy, without memory, or what CUDA says."""
    if isinstance(error, BackendError):
        return error
    if out_of_memory(error) is not None:
        return _full(error, device, "being opened")
    return BackendError(
        f"the GPU {device} cannot be used: {_first_line(error)}; check with nvidia-smi that it works "
        "and that no other process holds it alone, or name another with --device cuda:N"
    )


@contextmanager
def explain_errors(device: torch.device, doing: str) -> Iterator[None]:
    """Explain errors of the GPU that leave the block; others pass."""
    try:
        yield
    except Exception as error:
        if (known := explain(error, device, doing)) is not None:
            raise known from error
        raise


def illegal_operator(step: Callable[[], None], device: torch.device) -> str:
    """Run a step eagerly under watch; name what a graph cannot hold, "" where nothing is found."""
    from lantern_accel.testing.trace import OpRecorder

    watch = OpRecorder(device)
    try:
        with watch:
            step()
    except RuntimeError:
        return ""
    wrong = [one for one in watch.violations if one.rule in ("host_read", "dynamic_shape")]
    wrong += [one for one in watch.violations if one.rule == "other_device"]
    return str(wrong[0]) if wrong else ""


def _first_line(error: BaseException) -> str:
    lines = [str(one).strip().splitlines() for one in chain(error)]
    cuda = [line[0] for line in lines if line and "error" in line[0].lower()]
    return cuda[-1] if cuda else str(error).splitlines()[0]
