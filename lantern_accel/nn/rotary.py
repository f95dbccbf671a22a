"""Rotary tables of positions with one axis or several, and the order of rows that they expect.

Every device turns adjacent pairs of a head. Checkpoints that turn pairs ``(i, i + r/2)`` have their rows
reordered once, when they are read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rotary_table(
    positions: Tensor,
    head_dim: int,
    base: float,
    device: torch.device,
    *,
    rotated: int = 0,
    sections: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Return ``cos, sin``, float32 ``[n, d/2]``, of positions ``[n]`` or, on several axes, ``[axes, n]``.

    Pair j turns by its axis's position times ``base ** (-2j/rotated)``. ``rotated``: how many of a head's
    numbers turn, the first ones (0: all); the other pairs stay as they are. ``sections``: how many pairs
    in a row each axis has; section i is of axis ``i mod axes``. Computed on the host, so that every
    device has the same bits.
    """
    rotated = rotated or head_dim
    with torch.device("cpu"):
        freqs = 1.0 / base ** (torch.arange(0, rotated, 2).float() / rotated)
        at = positions.cpu().float()
        if at.dim() == 1:
            angles = torch.outer(at, freqs)
        else:
            axis = [i % len(at) for i, pairs in enumerate(sections) for _ in range(pairs)]
            if len(axis) != len(freqs):
                raise ValueError(f"sections {list(sections)} are not {len(freqs)} pairs")
            angles = at.t()[:, axis] * freqs
        still = torch.zeros(len(angles), (head_dim - rotated) // 2)
        angles = torch.cat((angles, still), dim=1)
    return angles.cos().to(device), angles.sin().to(device)


def to_adjacent_pairs(rows: Tensor, head_dim: int, rotated: int = 0) -> Tensor:
    """Reorder rows ``[heads * d, ...]`` from pairs ``(i, i + r/2)`` to adjacent ones, head by head.

    Row ``i`` of the first half and row ``i`` of the second become rows ``2i`` and ``2i + 1``; rows of a
    head behind the first ``rotated`` (0: all) stay where they are.
    """
    rotated = rotated or head_dim
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    halves = heads[:, :rotated].reshape(len(heads), 2, rotated // 2, *rows.shape[1:])
    halves = halves.transpose(1, 2).flatten(1, 2)
    return torch.cat((halves, heads[:, rotated:]), dim=1).reshape(rows.shape)


def to_half_split(rows: Tensor, head_dim: int, rotated: int = 0) -> Tensor:
    """Undo :func:`to_adjacent_pairs`."""
    rotated = rotated or head_dim
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    pairs = heads[:, :rotated].reshape(len(heads), rotated // 2, 2, *rows.shape[1:])
    pairs = pairs.transpose(1, 2).flatten(1, 2)
    return torch.cat((pairs, heads[:, rotated:]), dim=1).reshape(rows.shape)
