"""Settings of torch that hold for a whole process, pinned while a GPU is open.

cuDNN's attention is switched off: on some cards torch prefers it, and it refuses masks and widths that
the other kernels take, or makes a plan for every shape. float32 means float32: convolutions of the image
decoder would be computed in TF32 otherwise, which torch allows cuDNN by default. Where the inputs of a
product are shared among programs, the parts are added in float32: torch allows shorter sums by default.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

#: The GPUs that are open, and what gives back the settings from before the first of them.
_open: set[Pinned] = set()
_back = ExitStack()


class Pinned:
    """Pins the settings from construction to :meth:`release`, which gives back what was there before."""

    def __init__(self) -> None:
        if not _open:
            _pin()
        _open.add(self)

    def release(self) -> None:
        """Give back the settings once no other GPU is open; calling it twice is harmless."""
        if self in _open:
            _open.discard(self)
            if not _open:
                _back.close()


def _pin() -> None:
    """Switch all off, and note what gives it back."""
    cuda: Any = torch.backends.cuda
    cudnn: Any = torch.backends.cudnn
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    sums = [(cuda.matmul, name) for name in names]
    tf32 = [(cudnn, "allow_tf32"), (cuda.matmul, "allow_tf32")]
    attention = cuda.cudnn_sdp_enabled()
    with _without_warnings():
        try:
            before = [(part, name, getattr(part, name)) for part, name in (*sums, *tf32)]
        except RuntimeError:  # TF32 was set by the names of torch 2.9, which then has no older ones
            newer = [(part, "fp32_precision") for part in (cudnn.conv, cudnn.rnn, cuda.matmul)]
            before = [(part, name, getattr(part, name)) for part, name in (*sums, *newer)]
        for part, name in (*sums, *tf32):
            setattr(part, name, False)
    cuda.enable_cudnn_sdp(False)
    _back.callback(_restore, before)
    _back.callback(cuda.enable_cudnn_sdp, attention)


def _restore(before: list[tuple[object, str, object]]) -> None:
    with _without_warnings():
        for part, name, value in before:
            setattr(part, name, value)


@contextmanager
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some releases call the older names deprecated
        yield
