"""Finds what a device can do by asking it: a small product or gather, compared with the CPU's."""

from __future__ import annotations

import torch

#: The best first. Weights are published in bfloat16, whose range float16 has not: it is never the first.
CANDIDATES = (torch.bfloat16, torch.float32, torch.float16)
#: Largest error of a product of 32 numbers of about 1.
TOLERANCE = {torch.bfloat16: 0.25, torch.float32: 1e-3, torch.float16: 0.05}


def dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """Return the dtypes in which a matmul on the device is right; float32 is taken as given."""
    able = tuple(dtype for dtype in CANDIDATES if _multiplies(device, dtype))
    return able if torch.float32 in able else (*able, torch.float32)


def _multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    a = torch.linspace(-1, 1, 32 * 16).reshape(16, 32)
    want = a.double() @ a.double().t()
    try:
        there = a.to(dtype).to(device)
        found = torch.nn.functional.linear(there, there).cpu().double()
    except Exception:  # each device refuses in its own way
        return False
    return bool((found - want).abs().max() <= TOLERANCE[dtype])


def index(device: torch.device) -> torch.dtype:
    """Return the integers that the device gathers by: int64 as torch's own, else int32."""
    for dtype in (torch.int64, torch.int32):
        at = torch.tensor([[2, 0], [1, 1]], dtype=dtype)
        try:
            values = torch.arange(6.0).reshape(2, 3).to(device)
            rows = values.gather(1, at.to(device)).cpu().tolist()
            picked = values.index_select(0, at[0, 1:].to(device)).cpu().tolist()
        except Exception:
            continue
        if (rows, picked) == ([[2.0, 0.0], [4.0, 4.0]], [[0.0, 1.0, 2.0]]):
            return dtype
    return torch.int64


def views_in_inference_mode(device: torch.device) -> bool:
    """Return whether the device makes views, in inference mode, of tensors made outside of it."""
    try:
        with torch.inference_mode(False), torch.no_grad():
            outside = torch.zeros(2, 3, device=device)
        with torch.inference_mode():
            outside.view(3, 2).add_(1)
    except RuntimeError:
        return False
    return True
