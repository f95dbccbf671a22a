"""Predicts which copy of a model's own weights would draft best for it, before one is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lantern_accel.device.backend import Stopwatch
from lantern_accel.device.operations import TensorOps
from lantern_accel.generation import auto_constants as auto
from lantern_accel.generation.row_costs import RowCosts
from lantern_accel.nn.rounding import FULL, ROUNDINGS
from lantern_accel.nn.transformer import Projection, projections, rounded_copy
from lantern_accel.strategy.lengths import tokens_of, usual_tokens_per_step
from lantern_accel.strategy.sources import DraftLength
from lantern_accel.strategy.values import SelfDrafts

#: Milliseconds of matmuls with the target's weights, by what these are kept in and by rows.
ProductTimes = Mapping[str, Mapping[int, float]]


@dataclass(frozen=True)
class CopyCandidate:
    """A copy's drafts with the predicted ``speedup`` over plain decoding; nothing was timed."""

    tree: SelfDrafts
    speedup: float


def product_times(
    target: nn.Module,
    ops: TensorOps,
    dtype: torch.dtype,
    rows: Sequence[int],
    watch: Callable[[], Stopwatch],
) -> ProductTimes:
    """Time matmuls of ``rows`` activations with full weights and with codes, least of several."""
    every = sorted(projections(target), key=lambda one: -one.weight.numel())
    parts: list[Projection] = []
    for part in every:
        if sum(one.weight.numel() for one in parts) < auto.PRODUCT_WEIGHTS:
            parts.append(part)
    share = sum(one.weight.numel() for one in every) / sum(one.weight.numel() for one in parts)
    device, whole = parts[0].weight.device, nn.ModuleList(parts)
    made = {FULL: parts}
    for name, how in ROUNDINGS.items():
        made[name] = [*projections(rounded_copy(whole, ops, how, drafts=True))]
    times = {name: dict.fromkeys(rows, math.inf) for name in made}
    for count in rows:
        given = [torch.ones(count, one.in_features, dtype=dtype, device=device) for one in parts]
        for _ in range(auto.PRODUCT_ROUNDS + 1):  # the first finds nothing in the caches
            for name, weights in made.items():
                with watch() as spent:
                    for one, x in zip(weights, given, strict=True):
                        one(x, ops)
                times[name][count] = min(times[name][count], 1e3 * share * spent.seconds)
    return times


def own_windows(timed: Sequence[DraftLength]) -> list[int]:
    """Return the lengths of a copy's own window that may be worth trying, 1: it drafts token by token.

    ``timed``: of the target's windows: where their rows are dear, a copy's are too.
    """
    speeds = {
        one.length: (one.tokens_per_step or usual_tokens_per_step(one.length)) / (one.cost or 1.0)
        for one in timed
    }
    least = auto.HOPELESS * max(speeds.values(), default=1.0)
    return sorted({1} | {n for n in speeds if n <= auto.SHORT_COPY_WINDOW or speeds[n] >= least})


def likely_copies(
    times: ProductTimes,
    rows: int,
    timed: Sequence[DraftLength],
    tokens: int,
    step: float | None = None,
) -> list[CopyCandidate]:
    """Return the drafts by a copy that are predicted fastest, and the next best by the same copy.

    The second has another window of its own.

    ``times``: of :func:`product_times`, where one node of every image has ``rows`` rows; ``timed``: of
    the target's windows, and their tokens per step where known; ``tokens``: of an image; ``step``:
    milliseconds of a plain step, whose matmuls alone count where it is not known.
    """
    plain = step or times[FULL][rows]
    checks = RowCosts(costs={one.length: one.cost or 1.0 for one in timed} or {1: 1.0})

    def pass_cost(name: str, nodes: int) -> float:
        # What is not a matmul costs a copy as much as the target.
        own = times[name][rows * nodes]
        spared = (times[FULL][rows * nodes] - own) / plain
        return max(own / plain, checks.of(nodes, 1) - spared)

    # The copy's windows are guessed as the target's are.
    gains = {one.length: one.tokens_per_step for one in timed}
    found: list[CopyCandidate] = []
    for name, rate in auto.USUAL_RATES.items():
        for length in own_windows(timed):
            window = length if length > 1 else 0
            drafts = [n for n in auto.COPY_DRAFTS if max(window, 2) <= n + 1 <= tokens]
            gain = gains.get(length) or usual_tokens_per_step(length)
            cost = pass_cost(name, length)
            speeds: dict[tuple[int, int], float] = {}
            for n in drafts:
                needed = math.ceil(n / gain)
                for passes in range(math.ceil(needed / 2), needed + 1) if window else [n]:
                    made = tokens_of(rate, 1 + min(n, passes * gain))
                    made = 1 + (made - 1) * (auto.SETTLED if window else 1.0)
                    speeds[n, passes] = made / (passes * cost + checks.of(n + 1, 1))
            if not speeds:
                continue
            best, passes = max(speeds, key=lambda one: speeds[one])
            # One length more than the best, so that images that accept more may have it.
            longest = next((n for n in drafts if n > best), best)
            lengths = [1, *(n + 1 for n in drafts if n <= longest)]
            own = (2 * passes * longest + best) // (2 * best) if window else 0
            tree = SelfDrafts.over(lengths, weights=name, window=window, passes=own)
            found.append(CopyCandidate(tree, speeds[best, passes]))

    found.sort(key=lambda one: one.speedup, reverse=True)
    return [one for one in found if one.tree.weights == found[0].tree.weights][:2]
