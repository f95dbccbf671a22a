"""Rotary tables of positions with one axis or several, networks that hold them, and the order of rows.

Every device turns adjacent pairs of a head. Checkpoints that turn pairs ``(i, i + r/2)`` have their rows
reordered once, when they are read.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lantern_accel.device.operations import TensorOps
from lantern_accel.nn.sizes import PrefixRotary
from lantern_accel.nn.transformer import Pass, dense_visible

NetworkT = TypeVar("NetworkT", bound="RotaryNetwork")


def rotary_table(
    positions: Tensor,
    head_dim: int,
    base: float,
    device: torch.device,
    *,
    rotated: int = 0,
    sections: Sequence[int] = (),
    frequencies: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``cos, sin``, float32 ``[n, d/2]``, of positions ``[n]`` or, on several axes, ``[axes, n]``.

    Pair j turns by its axis's position times ``base ** (-2j/rotated)``. ``rotated``: how many of a head's
    numbers turn, the first ones (0: all); the other pairs stay as they are. ``sections``: how many pairs
    in a row each axis has; section i is of axis ``i mod axes``. ``frequencies`` float32 ``[rotated/2]``
    take the place of those of ``base``. Computed on the host, so that every
    device has the same bits.
    """
    rotated = rotated or head_dim
    with torch.device("cpu"):
        freqs = frequencies
        if freqs is None:
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


def rotary_table_2d(
    prefix: int,
    grid: int,
    head_dim: int,
    base: float = 10000.0,
    prefix_rotary: PrefixRotary = "zero",
) -> tuple[Tensor, Tensor]:
    """Return LlamaGen's 2D rotary table as ``cos, sin``, float32 ``[prefix + grid*grid, d/2]``.

    With ``h = d/2`` there are ``h/2`` frequencies ``base ** (-2j/h)``; the first half of the angles
    takes the row, the second the column. Prefix rows are zero in both tables, as LlamaGen has them:
    not the identity, so that every score that involves a prefix position is 0. ``"identity"`` lets
    the image attend to the prompt by content.
    """
    half, cpu = head_dim // 2, torch.device("cpu")
    side = rotary_table(torch.arange(grid, device=cpu), half, base, cpu)
    cos, sin = (
        torch.cat((t.repeat_interleave(grid, dim=0), t.repeat(grid, 1)), dim=1) for t in side
    )
    first = torch.zeros(2, prefix, half, device=cpu)
    if prefix_rotary == "identity":
        first[0] = 1
    return torch.cat((first[0], cos)), torch.cat((first[1], sin))


class RotaryNetwork(nn.Module):
    """A network with rotary tables of one prompt length and image size.

    ``config`` has ``prefix_length``, ``num_tokens``, ``head_dim`` and ``rope_base``.
    """

    config: Any
    ops: TensorOps
    rope_cos: Tensor
    rope_sin: Tensor
    #: Of a module that holds its own, perhaps quantized; None: as the configuration says.
    frequencies: Tensor | None = None

    def __init__(self, config: Any, ops: TensorOps) -> None:
        super().__init__()
        self.config, self.ops = config, ops

    def rotary_rows(self, prefix: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return rotary rows of ``prefix`` prompt positions and ``count`` image tokens behind them.

        Here, as everywhere but in a family's own tables, they stand on one line.
        """
        places = torch.arange(prefix + count, device="cpu")
        c = self.config
        return rotary_table(places, c.head_dim, c.rope_base, device, frequencies=self.frequencies)

    def place_tables(self, device: torch.device) -> None:
        """Make what no checkpoint holds: the rotary tables, float32 whatever the weights' dtype."""
        c = self.config
        cos, sin = self.rotary_rows(c.prefix_length, c.num_tokens, device)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)

    def resize(self: NetworkT, **sizes: int) -> NetworkT:
        """Return this network for another prompt length or image size; weights are shared."""
        if self.config.model_dump(include=set(sizes)) == sizes:
            return self
        view = copy.copy(self)
        view._buffers = dict(self._buffers)
        view.config = self.config.model_copy(update=sizes)
        device = self.rope_cos.device
        RotaryNetwork.place_tables(view, device)
        return view

    def dense_pass(self, mask: Tensor | None, prefix: int, count: int, like: Tensor) -> Pass:
        """Return what a pass without a cache over prompt and image reads.

        ``mask``: bool ``[R, prefix]``, True where the prompt has a token; ``like``: what has the pass's
        dtype and device.
        """
        length = prefix + count
        seen = None
        if mask is not None:
            seen = self.ops.mask(dense_visible(mask, length), like.dtype)
        cos, sin = self.rotary_rows(prefix, count, like.device)
        return Pass(cos.view(1, length, 1, -1), sin.view(1, length, 1, -1), seen)


class GridNetwork(RotaryNetwork):
    """A network whose image tokens stand in the cells of a square grid, as LlamaGen's do.

    ``config`` has ``grid`` and ``prefix_rotary`` too.
    """

    def place_tables(self, device: torch.device) -> None:
        """Make the rotary tables on the host, so that every device has the same bits."""
        c = self.config
        made = rotary_table_2d(c.prefix_length, c.grid, c.head_dim, c.rope_base, c.prefix_rotary)
        for name, table in zip(("rope_cos", "rope_sin"), made, strict=True):
            self.register_buffer(name, table.to(device), persistent=False)

    def rotary_rows(self, prefix: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the first rows of the tables: its prompts have one length."""
        return self.rope_cos[: prefix + count], self.rope_sin[: prefix + count]


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
