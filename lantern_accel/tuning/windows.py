"""Finds the window for a device: the length with the most tokens per second here.

What a draft is worth at a slot depends on all slots before it and on how often it was improved, so that
lengths are measured rather than computed: each is tried once, and the best few then run in turns.
"""

from __future__ import annotations

import time
from typing import Any, Literal

from pydantic import Field

from lantern_accel.decoding.calibrate import HOPELESS
from lantern_accel.errors import DoesNotFitError, RequestError, StrategyError
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.measure.record import Cell
from lantern_accel.measure.samples import about, new_cell
from lantern_accel.strategy.choices import Choice
from lantern_accel.strategy.values import Strategy, Window
from lantern_accel.tuning.search import PLAIN, Evidence, Search

LENGTHS = (3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
FINALISTS = 3


class WindowEvidence(Evidence):
    """What was measured so far, by batch and window; kept until the choices are made."""

    kind: Literal["lantern_accel.windows"] = "lantern_accel.windows"
    cells: dict[int, dict[str, Cell]] = Field(default_factory=dict)


def windows(strategy: Strategy, tokens: int) -> list[Window]:
    """Return the windows to try, the shortest first."""
    assert isinstance(strategy.drafts, Window)
    lengths = [length for length in LENGTHS if length <= tokens] or [min(tokens, 2)]
    return [strategy.drafts.model_copy(update={"length": length}) for length in lengths]


def words(window: Window) -> str:
    """Write what is tried of a window: its length."""
    return f"window:{window.length}"


class WindowTuner(Search[WindowEvidence]):
    """Finds the window of a strategy with the most tokens per second for each batch.

    Raises :class:`StrategyError` for a strategy without a window, and RequestError where no window fits.
    """

    kind = WindowEvidence

    def __init__(self, pipeline: Pipeline, strategy: Strategy, **given: Any) -> None:
        if not isinstance(strategy.drafts, Window) or strategy.drafts.draft_lengths:
            raise StrategyError(f"the strategy {strategy.name!r} has no window to tune")
        super().__init__(pipeline, strategy, **given)

    def search(self, batch: int) -> dict[str, Cell]:
        """Try every window of a batch once, plain decoding first; return their cells."""
        cells = self.evidence.cells.setdefault(batch, {})
        self._try(batch, cells, PLAIN, self.pipeline.strategy(PLAIN))
        best = cells[PLAIN].tokens_per_second
        for window in windows(self.strategy, self.pipeline.model.manifest.target.num_tokens):
            name = words(window)
            if not self._try(batch, cells, name, self.strategy.override(tree=window)):
                break
            speed = cells[name].tokens_per_second
            if speed < HOPELESS * best:  # longer ones cost more still
                break
            best = max(best, speed)
        return cells

    def _try(self, batch: int, cells: dict[str, Cell], name: str, strategy: Strategy) -> bool:
        """Measure a cell once unless it was; return False where its buffers do not fit."""
        if name not in cells:
            cell = new_cell(strategy, batch, self.temperature)
            try:
                self.warm(cell)
                self.sample(cell)
            except DoesNotFitError as error:
                self.say(f"batch {batch}, {name} is left out: {error}")
                return False
            cells[name] = cell
            self.keep()
            self.say(
                f"batch {batch}, {name}: {cell.step_compression:.2f} tokens per step, "
                f"{cell.tokens_per_second:.0f} tokens/s"
            )
        return True

    def choose(self, batch: int, repeats: int) -> Choice:
        """Race the best windows of a batch with plain decoding; keep and return the fastest."""
        began = time.perf_counter()
        cells = self.search(batch)
        tried = sorted((n for n in cells if n != PLAIN), key=lambda n: -cells[n].tokens_per_second)
        if not tried:
            raise RequestError(
                f"not one window fits at a batch of {batch}; tune a smaller batch, or draw with vanilla"
            )
        racing = {name: cells[name] for name in (PLAIN, *tried[:FINALISTS])}
        left = about((repeats - 1) * len(racing) * (time.perf_counter() - began) / len(cells))
        self.say(f"batch {batch}: the final takes {left}")
        self.race(racing, repeats)
        winner = max(tried[:FINALISTS], key=lambda name: cells[name].tokens_per_second)
        choice = self.chosen(batch, cells[winner].strategy, winner, cells)
        self.say(f"batch {batch}: {winner}, {choice.speedup:.2f}x plain decoding")
        return choice
