"""Settings of torch that hold for a whole process, pinned while a GPU is open.

cuDNN's attention is switched off: on some cards torch prefers it, and it refuses masks and widths that
the other kernels take, or makes a plan for every shape. float32 means float32: convolutions of the image
decoder would be computed in TF32 otherwise, which torch allows cuDNN by default.
"""

from __future__ import annotations

from typing import Any

import torch

_depth: list[tuple[bool, bool, bool]] = []


class Pinned:
    """Pins the settings from construction to :meth:`release`, which gives back what was there before."""

    def __init__(self) -> None:
        self._held = True
        _depth.append(_now())
        _set((False, False, False))

    def release(self) -> None:
        """Give back the settings once no other GPU is open; calling it twice is harmless."""
        if not self._held:
            return
        self._held = False
        before = _depth[0]
        _depth.pop()
        if not _depth:
            _set(before)


def _now() -> tuple[bool, bool, bool]:
    backends: Any = torch.backends
    return (
        bool(backends.cuda.cudnn_sdp_enabled()),
        bool(backends.cudnn.allow_tf32),
        bool(backends.cuda.matmul.allow_tf32),
    )


def _set(values: tuple[bool, bool, bool]) -> None:
    backends: Any = torch.backends
    backends.cuda.enable_cudnn_sdp(values[0])
    backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32 = values[1:]
