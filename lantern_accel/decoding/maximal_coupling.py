"""SJD's test of a window's drafts, by uniforms, and what replaces the first that fails.

A draft ``x[i]`` from ``q[i]`` is kept where ``u q(x) < p(x)``; else the token is sampled from
``norm(max(0, p - q))``, so that it is distributed as p[i]. The later ones were judged by drafts, and
are sampled again from their own p[i]. Source: SJD (arXiv 2410.01699).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lantern_accel.decoding.rows import REFERENCE


@dataclass(frozen=True)
class Coupled:
    """One step's outcome for ``B`` images and the ``L`` positions behind the last known token.

    ``tokens`` integer ``[B, L]``: the new ones, the bonus last; ``count`` integer ``[B]`` or ``[1]``: how
    many of them are known now, 1 to L.
    """

    tokens: Tensor
    count: Tensor


def leading(accepted: Tensor, dtype: torch.dtype) -> Tensor:
    """Count the drafts before the first that is not kept, ``[B]`` from bool ``[B, T]``."""
    order = torch.arange(accepted.shape[1], dtype=dtype, device=accepted.device)
    return order.masked_fill(accepted, accepted.shape[1]).amin(dim=1)


def couple(
    x: Tensor,
    p: Tensor,
    q: Tensor,
    tests: Tensor,
    draws: Tensor,
    draw: Callable[[Tensor, Tensor], Tensor] = REFERENCE.sample,
) -> Coupled:
    """Test the drafts, replace the first that fails, draw those behind it again.

    ``x`` integer ``[B, L - 1]``; ``p`` float32 ``[B, L, V]``, of which the last is the bonus's; ``q``
    float32 ``[B, L - 1, V]``; ``tests`` uniforms ``[B, L - 1]``, ``draws`` others ``[B, L]``.
    ``draw``: a device's draws.
    """
    own, bonus = p[:, :-1], p[:, -1:]
    code = x.unsqueeze(-1)
    px, qx = own.gather(-1, code).squeeze(-1), q.gather(-1, code).squeeze(-1)
    order = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
    count = leading(tests * qx < px, x.dtype)
    left = (own - q).clamp(min=0.0)
    # Where p is q to the last bit nothing is left; then the draw is p's.
    left = torch.where(left.sum(-1, keepdim=True) > 0, left, own)
    left = torch.where((order > count.unsqueeze(1)).unsqueeze(-1), own, left)
    drawn = draw(torch.cat((left, bonus), dim=1), draws)
    kept = order < count.unsqueeze(1)
    tokens = torch.cat((torch.where(kept, x, drawn[:, :-1]), drawn[:, -1:]), dim=1)
    return Coupled(tokens, count + 1)
