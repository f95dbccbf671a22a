"""Costs of passes over many rows on a device, in plain passes, and how much is drafted for them.

A row is one position of one branch of one image: with guidance two for every token of every image.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise

import torch
from pydantic import Field, ValidationError

from lantern_accel.decoding.engine import Engine
from lantern_accel.device.backend import Backend
from lantern_accel.device.context import inferring
from lantern_accel.families.base import Model
from lantern_accel.files import cache_dir, read_record, write_record
from lantern_accel.generation import auto_constants as auto
from lantern_accel.generation.calibrate import calibrate
from lantern_accel.records import Record, digest
from lantern_accel.strategy.choices import key_of
from lantern_accel.strategy.length_policy import GAIN
from lantern_accel.strategy.lengths import in_batch, odds_between, shift_odds, usual_tokens_per_step
from lantern_accel.strategy.sources import DraftConfig
from lantern_accel.strategy.trees import cut_tree
from lantern_accel.strategy.values import AUTO_LENGTHS, Strategy, Window, with_tokens_per_step


class RowCosts(Record):
    """Costs of a pass by its rows, relative to that with the fewest; ``timed``: they were measured."""

    costs: dict[int, float] = Field(min_length=1)
    timed: bool = True

    @classmethod
    def free(cls, rows: int) -> RowCosts:
        """Return unmeasured costs: this many rows cost as much as one, and more in proportion."""
        return cls(costs={1: 1.0, rows: 1.0, 2 * rows: 2.0}, timed=False)

    @classmethod
    def of_times(cls, times: Mapping[int, float]) -> RowCosts:
        """Return the costs of times by rows; no pass is taken to cost more than one of more rows."""
        least = {n: min(ms for more, ms in times.items() if more >= n) for n in sorted(times)}
        return cls(costs={n: ms / min(least.values()) for n, ms in least.items()})

    def of(self, rows: int, plain: int) -> float:
        """Return what a pass over ``rows`` costs in passes over ``plain`` rows, 1 at least."""
        return max(1.0, self._of(rows) / self._of(plain))

    def _of(self, rows: int) -> float:
        """Return a cost: between the measured ones on lines, behind them on the last line."""
        known = sorted(self.costs.items())
        if len(known) == 1 or rows <= known[0][0]:
            return known[0][1]
        pairs = list(pairwise(known))
        (a, low), (b, high) = next((pair for pair in pairs if rows <= pair[1][0]), pairs[-1])
        return low + (high - low) * (rows - a) / (b - a)


def window_tokens(costs: RowCosts, plain: int, batch: int, longest: int) -> int:
    """Return a window's default length: the longest of those predicted about fastest.

    ``plain``: rows of a plain pass of a batch; ``longest``: the strategy's own length, the most.
    """
    lengths = [n for n in auto.TOKENS if auto.SHORTEST_WINDOW <= n < longest] + [longest]
    speeds = {
        n: in_batch(usual_tokens_per_step(n), batch) / costs.of(n * plain, plain) for n in lengths
    }
    return max(n for n in lengths if GAIN * speeds[n] > max(speeds.values()))


def auto_lengths(
    costs: RowCosts, plain: int, batch: int, tokens: int, tokens_per_step: Mapping[int, float]
) -> tuple[int, ...]:
    """Return the lengths that auto's windows may have, 1 being plain decoding.

    The usual ones, and longer ones where costs were measured and these are predicted nearly as fast on an
    easy prompt: a step costs no less than its pass. ``tokens``: of an image; ``tokens_per_step``:
    tokens per step by length that are known.
    """
    every, most = complete_tokens_per_step(tokens_per_step), 0.0
    lengths: list[int] = []
    for length in (n for n in auto.TOKENS if n <= tokens):
        brings = in_batch(shift_odds(every[length], length, auto.EASY), batch)
        speed = brings / costs.of(length * plain, plain)
        most = max(most, speed)
        if length > AUTO_LENGTHS[-1] and (speed < auto.HOPELESS * most or not costs.timed):
            break
        lengths.append(length)
    return tuple(lengths)


def complete_tokens_per_step(tokens_per_step: Mapping[int, float]) -> dict[int, float]:
    """Return tokens per step of all lengths: an unknown one is as good as the next shorter."""
    found, shift = {**tokens_per_step, 1: 1.0}, 0.0
    for length in auto.TOKENS[1:]:
        usual = usual_tokens_per_step(length)
        if length in found:
            shift = odds_between(usual, found[length], length)
        else:
            found[length] = shift_odds(usual, length, shift)
    return found


def tree_tokens(nodes: int) -> float:
    """Return the tokens per step of a tree of the likeliest drafts, worth 1/2, 1/4, 1/8, ..."""
    found, left, share, many, more = 1.0, nodes - 1, 0.5, 1, 1
    while left > 0:
        found += share * min(left, many)
        left, share, many, more = left - many, share / 2, more, many + more
    return found


def tree_of(costs: RowCosts, branches: int, tree: DraftConfig) -> DraftConfig:
    """Return a drafter's tree that nobody chose, with no more nodes than are worth their rows.

    It stays as it is where costs were not measured.
    """
    if not costs.timed:
        return tree
    sizes = [n for n in auto.TREE_SIZES if n < tree.size[0]] + [tree.size[0]]
    speeds = {n: tree_tokens(n) / costs.of(n * branches, branches) for n in sizes}
    return cut_tree(tree, max(n for n in sizes if speeds[n] >= auto.NEARLY * max(speeds.values())))


# --- measuring ------------------------------------------------------------------------------------


def row_costs(model: Model, backend: Backend, dtype: torch.dtype) -> RowCosts:
    """Return a model's costs on a device from the cache; measure and keep them where it has none.

    A device that says how many rows are free (:class:`.Preferences`) is not measured.
    """
    if backend.preferences.free_rows is not None:
        return RowCosts.free(backend.preferences.free_rows)
    key = key_of("rows", model, backend, dtype, Strategy())
    path = cache_dir() / "rows" / f"{digest(key)[:24]}.json"
    with suppress(KeyError, TypeError, ValidationError):  # a file of another kind, or none
        return RowCosts.model_validate((read_record(path) or {})["measured"])
    found = measure(backend, model)
    write_record(path, {"key": key, "measured": found.model_dump(mode="json")})
    return found


@inferring
def measure(backend: Backend, model: Model) -> RowCosts:
    """Time steps of windows of 1, 2, 4, ... tokens, the least of several rounds.

    A round ends where longer ones could not be faster on an easy prompt.
    """
    target = model.family.target_for_shape(model, model.family.usual_shape(model))[0]
    sampling = model.manifest.defaults.sampling
    windows = Window.over([n for n in auto.TOKENS if n < model.manifest.target.num_tokens])
    easy = {n: shift_odds(usual_tokens_per_step(n), n, auto.EASY) for n in auto.TOKENS}
    lengths = with_tokens_per_step(windows.draft_lengths, easy)
    strategy = Strategy(drafts=windows).with_drafts(draft_lengths=lengths)
    engine = Engine(target, None, backend, strategy, sampling)
    engine.state.prefix_mask.fill_(True)
    times = calibrate(engine, backend.stopwatch, auto.ROW_ROUNDS, auto.ROW_MS)
    return RowCosts.of_times({n * sampling.branches: min(ms) for n, ms in times.items()})
