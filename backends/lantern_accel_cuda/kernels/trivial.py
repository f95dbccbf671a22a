"""A trivial Triton kernel: where it cannot run, none can."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import _disable_current_modes

from lantern_accel.testing.result import Failed


@triton.jit
def _add_one(x, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(x + at, tl.load(x + at) + 1.0)


def run(device: torch.device) -> None:
    """Launch the kernel and wait for the GPU; raises what Triton lacks here, or how the GPU was lost."""
    with _disable_current_modes(), torch.inference_mode():
        x = torch.zeros(16, device=device)
        with torch.cuda.device_of(x):
            _add_one[(1,)](x, COUNT=16, num_warps=1)
        if float(x.sum()) != 16.0:
            raise Failed("a kernel that adds 1 to 16 zeros makes something else")
