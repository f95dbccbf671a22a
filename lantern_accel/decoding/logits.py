"""Chooses tokens from logits: filters, draws, and the noise that decides a position's token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lantern_accel.decoding.rows import REFERENCE
from lantern_accel.device.plan import Filter
from lantern_accel.device.sampling import SamplingOps
from lantern_accel.strategy.sampling import Sampling

#: Numbers of a table that are computed at once, so that what they need on the way stays small.
PIECE = 1 << 24


@dataclass(frozen=True)
class Filters:
    """How logits become a distribution in a step: what has a shape, and the values that are data.

    ``temperature`` and ``top_p``: float32 ``[1]`` on the device, or numbers. ``ops``: the device's
    operations; ``sums``: what its draws take of :class:`.Tables`, if anything.
    """

    sampling: Sampling
    temperature: Tensor | float
    top_p: Tensor | float
    ops: SamplingOps = field(default=REFERENCE)
    sums: Tensor | None = field(default=None, repr=False, compare=False)
    given: Filter = field(init=False, repr=False, compare=False)
    """What the device's operation takes; of use where sampling is not greedy."""
    tables: tuple[Any, ...] = field(init=False, repr=False, compare=False)
    """What the device's filter looks up (:class:`.Tables`), if anything."""

    def __post_init__(self) -> None:
        # Made here, not when it is first read: a compiler that traces a step cannot enter a lock.
        s, never = self.sampling, None
        if isinstance(self.temperature, Tensor):
            never = torch.full_like(self.temperature, float("-inf"))
        given = Filter(
            temperature=self.temperature,
            top_k=s.top_k,
            top_p=self.top_p if s.top_p < 1 else None,
            p_first=s.order == "top_p_first",
            never=never,
        )
        object.__setattr__(self, "given", given)
        made = None
        if isinstance(self.temperature, Tensor):
            made = self.ops.tables(0, self.temperature.device).filter
        object.__setattr__(self, "tables", () if made is None else (made,))

    def draw(self, weights: Tensor, uniform: Tensor) -> Tensor:
        """Sample codes of the shape of ``uniform``, as :meth:`.SamplingOps.draw` does."""
        sums = () if self.sums is None else (self.sums,)
        return self.ops.draw(weights, uniform, *sums)

    @classmethod
    def of(cls, sampling: Sampling) -> Filters:
        """Return the filters of settings as numbers."""
        return cls(sampling, sampling.temperature, sampling.top_p)


def distribution(logits: Tensor, filters: Filters | Sampling) -> Tensor:
    """Return float32 probabilities ``[..., V]`` after temperature and the two filters.

    Greedy decoding (temperature 0) leaves the logits as they are: its rule compares probabilities of
    the raw distribution.
    """
    if isinstance(filters, Sampling):
        filters = Filters.of(filters)
    if filters.sampling.greedy:
        return logits.softmax(dim=-1)
    return filters.ops.filter(logits, filters.given, *filters.tables)


@dataclass(frozen=True)
class TokenChooser:
    """Chooses the tokens of positions, by noise from filtered logits or greedily the likeliest.

    ``keys`` int32 ``[B, 3]``, a buffer that every step reads: the seed's low and high word, and the
    image's number in its request (:mod:`lantern_accel.device.noise`). ``table`` float32 ``[B, N, V]``:
    the noise of all positions, which :meth:`prepare` makes once per image; None: every step makes that
    of its own. The bits are the same, so that the image is.
    """

    keys: Tensor
    filters: Filters
    greedy: bool
    table: Tensor | None = None
    first: Tensor | None = field(init=False, repr=False, compare=False)
    """Where an image's rows begin in the table, ``[B, 1]``; None with one image."""

    def __post_init__(self) -> None:
        first, table = None, self.table
        if table is not None and len(table) > 1:
            images = torch.arange(len(table), dtype=self.filters.ops.index, device=table.device)
            first = images.unsqueeze(1) * table.shape[1]
        object.__setattr__(self, "first", first)

    def prepare(self) -> None:
        """Make the table of a request's keys; steps read it. No value is read by the host."""
        if self.table is None:
            return
        images, tokens, codes = self.table.shape
        ops, many = self.filters.ops, max(1, PIECE // (images * codes))
        places = torch.arange(tokens, dtype=torch.int32, device=self.table.device)
        parts = [
            ops.noise(self.keys, some.expand(images, -1), codes)
            for some in torch.split(places, many)
        ]
        self.table.copy_(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))

    def scores(self, weights: Tensor, positions: Tensor) -> Tensor:
        """Return ``weights [B, T, V]`` over the noise of ``positions [B, T]``."""
        if self.table is None:
            return self.filters.ops.perturb(weights, self.keys, positions)
        # What is past the image is sampled from any noise: nobody reads it.
        at = positions.clamp(max=self.table.shape[1] - 1)
        if self.first is not None:
            at = at + self.first
        rows = self.table.flatten(0, 1).index_select(0, at.flatten())
        return weights / rows.view(*positions.shape, -1)

    def of(self, weights: Tensor, positions: Tensor) -> Tensor:
        """Return the codes ``[B, T]`` that win at ``positions``, of ``weights [B, T, V]`` of any sum."""
        ops = self.filters.ops
        if self.table is None:
            return ops.race(weights, self.keys, positions)
        return self.scores(weights, positions).argmax(dim=-1).to(ops.index)

    def ranked(self, weights: Tensor, positions: Tensor, count: int) -> Tensor:
        """Return the first ``count`` codes of the race, the winner first: ``[B, T, count]``."""
        ops = self.filters.ops
        if self.table is None:
            return ops.race(weights, self.keys, positions, count)
        return self.scores(weights, positions).topk(count, dim=-1).indices.to(ops.index)
