"""The k-th largest of many values by counting, to the bit: no order among them is needed.

``topk`` puts in order what it returns, which for k = 1,000 or 2,000 of 16,384 is a sort. Here values are
compared with bars, and those that reach each are counted. float32 numbers lie in cells between powers of
two, and a cell has 2**23 of them at even distances: so a search among cells, then among numbers of one,
some binary digits at a time, ends at the number itself, whatever the values are and however many are
equal. All bars are sums and table entries that float32 has exactly; no bit of a value is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: From this many values on they are counted; fewer come from ``topk``.
COUNTED = 64
#: Binary digits that are found at once: of a cell's number, then within the cell. Each round is a chain
#: of small launches, and compares all values with each bar: few rows take few rounds, many rows few bars.
FEW_ROWS = ((4, 5), (6, 6, 6, 5))
MANY_ROWS = ((4, 5), (5, 5, 5, 4, 4))
#: Values from which on rows are many.
MANY = 1 << 18


@dataclass(frozen=True)
class Search:
    """Bars of one search, float32: ``cells`` by round, ``[n]`` or ``[cells before, n]``; then ``within``.

    ``within [512, 1 + n + ...]``: where a cell begins, and the bars of each round above what is known.
    """

    cells: tuple[Tensor, ...]
    within: Tensor
    widths: tuple[int, ...]


@dataclass(frozen=True)
class Bars:
    """The bars that :func:`kth_largest` compares with, of few rows and of many; made once."""

    few: Search
    many: Search


def bars(device: torch.device) -> Bars:
    """Return the bars on a device."""
    powers = torch.ldexp(torch.ones(254, dtype=torch.float64), torch.arange(-126, 128))
    largest = torch.tensor([torch.finfo(torch.float32).max], dtype=torch.float64)
    nothing, end = torch.zeros(1, dtype=torch.float64), torch.full((1,), float("inf")).double()
    # Where cells begin, rising: -inf, the largest magnitudes, ..., 0, ..., the powers of two, inf.
    starts = torch.cat((-end, -largest, -powers.flip(0), nothing, powers, end))
    lengths = torch.cat(
        (nothing, powers[-1:], powers.flip(0)[1:], powers[:1], powers[:1], powers, nothing)
    )

    def search(digits: tuple[tuple[int, ...], tuple[int, ...]]) -> Search:
        left, known, cells = len(starts), 1, []
        for count in digits[0]:
            left >>= count
            cells.append(starts[left * torch.arange(known << count)].view(known, -1)[:, 1:])
            known <<= count
        parts, depth = [starts.unsqueeze(1)], 0
        for count in digits[1]:
            depth += count
            shares = torch.arange(1, 1 << count).double() * 2.0**-depth
            parts.append(lengths.unsqueeze(1) * shares)
        cells[0] = cells[0].squeeze(0)
        return Search(
            tuple(one.float().to(device) for one in cells),
            torch.cat(parts, dim=1).float().to(device),
            tuple(one.shape[1] for one in parts),
        )

    return Bars(search(FEW_ROWS), search(MANY_ROWS))


def kth_largest(x: Tensor, k: int, made: Bars | None = None) -> Tensor:
    """Return the k-th largest of each row of float32 ``x [..., V]``, ``[..., 1]``; -inf is a value.

    Exact. ``made``: the device's :func:`bars`. No host read.
    """
    made = made or bars(x.device)
    search = made.few if x.numel() <= MANY else made.many
    rows, every = x.shape[:-1], x.unsqueeze(-2)

    def is_reached(bar: Tensor) -> Tensor:
        """Return which bars ``[..., n]`` k values or more reach; counts are exact below 2**24."""
        return (every >= bar.unsqueeze(-1)).sum(dim=-1, dtype=torch.float32) >= k

    cell: Tensor | None = None
    for table in search.cells:
        bar = table if cell is None else table.index_select(0, cell.flatten()).view(*rows, -1)
        # Of rising bars the first are reached.
        found = is_reached(bar).sum(dim=-1, dtype=torch.int32)
        cell = found if cell is None else found.add(cell, alpha=table.shape[-1] + 1)
    assert cell is not None
    known = search.within.index_select(0, cell.flatten()).view(*rows, -1)
    low, *steps = torch.split_with_sizes(known, list(search.widths), dim=-1)
    for step in steps:
        bar = low + step
        low = torch.where(is_reached(bar), bar, low).amax(dim=-1, keepdim=True)
    return low
