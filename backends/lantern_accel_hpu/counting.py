"""The k-th largest of many values by counting: no order among them is needed.

``topk`` puts in order what it returns, which for k = 1,000 or 2,000 of 16,384 is a sort. Comparing all
values with a few bars, and counting those that reach each, is a handful of passes over them.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: From this many values on they are counted; fewer come from ``topk``.
COUNTED = 64
#: Bars compared at once; rounds in which they are even steps between logarithms, so that a few values far
#: off do not matter, and rounds of even steps, by which the range shrinks by 4**12, to a 16-millionth.
BARS, FAR, NEAR = 3, 4, 12
#: Different values within that last piece which are told apart, the largest first.
TOLD_APART = 4


def kth_largest(x: Tensor, k: int) -> Tensor:
    """Return the k-th largest of each row of float32 ``x [..., V]``, ``[..., 1]``; -inf is a value.

    Exact where at most :data:`TOLD_APART` different values lie between the k-th and a 16-millionth of the
    range of those near it; else the result is that much too low at most. No host read.
    """
    nothing = torch.full_like(x[..., :1], float("-inf"))
    high = x.amax(dim=-1, keepdim=True)
    low = torch.where(x > nothing, x, high).amin(dim=-1, keepdim=True)
    top, least = high, low
    shares = torch.arange(1, BARS + 1, dtype=torch.int32, device=x.device).float() / (BARS + 1)
    for number in range(FAR + NEAR):
        if number < FAR:
            first, last = _squeezed(low), _squeezed(high)
            bars = first + (last - first) * shares
            bars = torch.minimum(torch.maximum(bars.sign() * bars.abs().expm1(), low), high)
        else:
            bars = low + (high - low) * shares
        reached = _count(x.unsqueeze(-2), bars.unsqueeze(-1)).squeeze(-1) >= k
        low, high = (
            torch.where(reached, bars, low).amax(dim=-1, keepdim=True),
            torch.where(reached, high, bars).amin(dim=-1, keepdim=True),
        )
    # Fewer than k values reach `high`, k reach `low`: the k-th is the highest between that k reach.
    found, at = low, high
    done = torch.zeros_like(low) > 0
    for _ in range(TOLD_APART):
        at = torch.where(x < at, x, nothing).amax(dim=-1, keepdim=True)
        enough = _count(x, at) >= k
        found = torch.where(enough & ~done, at, found)
        done = done | enough
    # The largest itself, where k of them are equal; and rows of fewer than k values keep all.
    found = torch.where(_count(x, top) >= k, top, found)
    return torch.where(_count(x, least) >= k, found, nothing)


def _squeezed(x: Tensor) -> Tensor:
    return x.sign() * x.abs().log1p()


def _count(x: Tensor, bar: Tensor) -> Tensor:
    """Count the values of each row that reach a bar, float32 ``[..., 1]``; exact below 2**24."""
    return (x >= bar).float().sum(dim=-1, keepdim=True)
