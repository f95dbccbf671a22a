"""Chooses tokens from logits: filters, draws, and the noise that decides a position's token."""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_accel.decoding.rows import REFERENCE
from lantern_accel.device.plan import Filter
from lantern_accel.device.sampling import SamplingOps
from lantern_accel.strategy.sampling import Sampling

#: Numbers of a table that are computed at once, so that what they need on the way stays small.
PIECE = 1 << 24


class Filters:
    """How logits become a distribution in a step.

    ``temperature`` and ``top_p``: float32 ``[1]`` on the device, or numbers. ``ops``: the device's
    operations; ``sums``: what its draws take of :class:`.Tables`, if anything. ``given``: what its filter
    takes, and ``tables`` what that looks up; of use where sampling is not ``greedy``.
    """

    def __init__(
        self,
        sampling: Sampling,
        temperature: Tensor | float,
        top_p: Tensor | float,
        ops: SamplingOps = REFERENCE,
        sums: Tensor | None = None,
    ) -> None:
        self.ops, self.greedy = ops, sampling.greedy
        never, table = None, None
        if isinstance(temperature, Tensor):
            never = torch.full_like(temperature, float("-inf"))
            table = ops.tables(0, temperature.device).filter
        self.given = Filter(
            temperature=temperature,
            top_k=sampling.top_k,
            top_p=top_p if sampling.top_p < 1 else None,
            p_first=sampling.order == "top_p_first",
            never=never,
        )
        self.tables: tuple[object, ...] = () if table is None else (table,)
        self._sums = () if sums is None else (sums,)

    def sample(self, weights: Tensor, uniform: Tensor) -> Tensor:
        """Sample codes of the shape of ``uniform``, as :meth:`.SamplingOps.sample` does."""
        return self.ops.sample(weights, uniform, *self._sums)

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
    if filters.greedy:
        return logits.softmax(dim=-1)
    return filters.ops.filter(logits, filters.given, *filters.tables)


class TokenChooser:
    """Chooses the tokens of positions, by noise from filtered logits or greedily the likeliest.

    ``keys`` int32 ``[B, 3]``, a buffer that every step reads: the seed's low and high word, and the
    image's number in its request (:mod:`lantern_accel.device.noise`). ``table`` float32 ``[B, N, V]``:
    the noise of all positions, which :meth:`prepare` makes once per image; None: every step makes that
    of its own. The bits are the same, so that the image is.
    """

    def __init__(
        self, keys: Tensor, filters: Filters, greedy: bool, table: Tensor | None = None
    ) -> None:
        self.keys, self.filters, self.greedy, self.table = keys, filters, greedy, table
        #: Where an image's rows begin in the table, ``[B, 1]``; None with one image.
        self._first: Tensor | None = None
        if table is not None and len(table) > 1:
            images = torch.arange(len(table), dtype=filters.ops.index, device=table.device)
            self._first = images.unsqueeze(1) * table.shape[1]

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
        if self._first is not None:
            at = at + self._first
        rows = self.table.flatten(0, 1).index_select(0, at.flatten())
        return weights / rows.view(*positions.shape, -1)

    def of(self, weights: Tensor, positions: Tensor) -> Tensor:
        """Return the codes ``[B, T]`` that win at ``positions``, of ``weights [B, T, V]`` of any sum."""
        ops = self.filters.ops
        if self.table is None:
            return ops.race(weights, self.keys, positions)
        return self.scores(weights, positions).argmax(dim=-1).to(ops.index)

    def rank(self, weights: Tensor, positions: Tensor, count: int) -> Tensor:
        """Return the first ``count`` codes of the race, the winner first: ``[B, T, count]``."""
        ops = self.filters.ops
        if self.table is None:
            return ops.race(weights, self.keys, positions, count)
        return self.scores(weights, positions).topk(count, dim=-1).indices.to(ops.index)
