"""Selects the nodes of each level of a drafted tree, as views where they are contiguous."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class Picks:
    """Columns of a tensor, by numbers that are known beforehand: a view where they are one after another.

    Also where they are one column, several times.
    """

    def __init__(self, numbers: list[int], device: torch.device, index: torch.dtype) -> None:
        self.first, self.count = (numbers or [0])[0], len(numbers)
        self.same = len(set(numbers)) == 1
        self.index: Tensor | None = None
        if not self.same and numbers != list(range(self.first, self.first + self.count)):
            self.index = torch.tensor(numbers, dtype=index, device=device)

    def of(self, values: Tensor) -> Tensor:
        """Return the columns of ``values [B, n, ...]``."""
        if self.index is not None:
            return values.index_select(1, self.index)
        if self.same:
            shape = (len(values), self.count, *values.shape[2:])
            return values[:, self.first : self.first + 1].expand(shape)
        return values[:, self.first : self.first + self.count]


@dataclass(frozen=True)
class Level:
    """Nodes of one depth that are run, in scratch slots of their own.

    ``codes`` of the level before it, and the nodes there whose ``features`` go with them; ``seen``: the
    device's form of the mask ``[M, 1, n, L - base]`` of what is behind the image; ``address`` of their
    slots. All but the last are None where they follow from the drafts.
    """

    codes: Picks | None
    features: Picks | None
    seen: Tensor | None
    address: Tensor
