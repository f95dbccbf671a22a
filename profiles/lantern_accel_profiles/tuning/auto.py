"""Finds what ``auto`` decodes with: tokens per step of drafts, cost of steps, and a final of the best.

Tokens per step are counted once, and steps of every length timed in turns for each batch. The best
window and the best copy then run against plain decoding and, where relaxation is asked for, the
drafter's tree.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from typing import Literal

from pydantic import Field

from lantern_accel.errors import DoesNotFitError
from lantern_accel.generation.decision import Estimate
from lantern_accel.generation.engines import copies_of
from lantern_accel.strategy.choices import Choice
from lantern_accel.strategy.length_policy import AcceptancePolicy
from lantern_accel.strategy.lengths import tokens_at_one_rate
from lantern_accel.strategy.sources import DraftLength
from lantern_accel.strategy.values import AUTO, SelfDrafts, Strategy
from lantern_accel_profiles.measure.record import Cell
from lantern_accel_profiles.measure.samples import about, batch_prompts, new_cell
from lantern_accel_profiles.tuning.search import PLAIN, Evidence, Search

#: Images decoded together while tokens per step are counted, and rounds in which all lengths are timed.
COUNTED, TIMED = 8, 12
#: Batches that are chosen for unless the user names others.
BATCHES = (1, 2, 4, 8, 16, 32)
#: A window replaces plain decoding where it is at least this much faster in the final.
PAYS = 1.02
#: Tokens that were gained and steps that they took.
Counted = tuple[int, int]
#: Milliseconds of steps, by batch and length.
Times = dict[int, dict[int, list[float]]]


class AutoEvidence(Evidence):
    """Everything that was measured so far; kept until the choices are made, so that a run goes on.

    ``worth``: of windows, by length; ``copy_counts``: tokens gained and steps of a copy's most drafts.
    """

    kind: Literal["lantern_accel.choosing"] = "lantern_accel.choosing"
    worth: dict[int, Counted] = Field(default_factory=dict)
    times: Times = Field(default_factory=dict)
    copy_counts: dict[str, Counted] = Field(default_factory=dict)
    copy_times: dict[str, Times] = Field(default_factory=dict)
    finals: dict[int, dict[str, Cell]] = Field(default_factory=dict)

    def tokens_per_step(self) -> dict[int, float]:
        """Return what a step of each length of windows adds."""
        return {length: _rate(one) for length, one in self.worth.items()}


class AutoTuner(Search[AutoEvidence]):
    """Chooses what auto, exact or relaxed, decodes with, for each batch.

    Raises RequestError where the budget is too short for a final.
    """

    kind = AutoEvidence

    @cached_property
    def windows(self) -> Strategy:
        """Exact windows of the lengths that may be faster for one image, of which nothing is known."""
        found = self.pipeline.measurements.windows(self.strategy, 1, self.sampling)
        bare = tuple(DraftLength(length=one.length) for one in found.lengths)
        return found.with_drafts(draft_lengths=bare).model_copy(update={"name": "windows"})

    def settings(self) -> dict[str, object]:
        return {"lengths": [one.length for one in self.windows.lengths]}

    def dump(self, choices: Sequence[Choice]) -> dict[str, object]:
        return self.evidence.model_dump(mode="json") | super().dump(choices)

    def _count(self, strategy: Strategy, length: int) -> Counted:
        """Decode each prompt once with drafts of one length; return the counts."""
        batch = min(COUNTED, len(self.prompts))
        shape = self.pipeline.model.family.usual_shape(self.pipeline.model)
        engine = self.pipeline.engine(batch, strategy, self.sampling, shape).engine
        gained = steps = 0
        engine.chosen = AcceptancePolicy((DraftLength(length=length),))
        try:
            spent = 0.0
            for seed in range(max(1, len(self.prompts) // batch)):
                self.check_left(spent, "counting more drafts")
                began = time.perf_counter()
                prompts = batch_prompts(self.prompts, batch, seed)
                done, _ = self.pipeline.decode_only(prompts, strategy, self.sampling, seed)
                steps += int(done.steps.sum())
                gained += done.tokens.shape[0] * (done.tokens.shape[1] - 1)
                spent = time.perf_counter() - began
        finally:
            engine.chosen = None
        return gained, steps

    def prepare(self) -> None:
        """Count tokens per step of every length of windows, over each prompt once."""
        worth = self.evidence.worth
        lengths = [one.length for one in self.windows.lengths]
        todo = [length for length in lengths if length > 1 and length not in worth]
        for number, length in enumerate(todo, 1):
            began = time.perf_counter()
            found = worth[length] = self._count(self.windows, length)
            self.keep()
            needs = (time.perf_counter() - began) * (len(todo) - number)
            self.check_left(needs, "counting the other drafts")
            rate = f"{_rate(found):.2f} tokens per step, {about(needs)} left here"
            self.say(f"windows of {length}: {rate}")
        worth[1] = (1, 1)

    def _time(self, one: Strategy, brings: dict[int, float], batch: int, times: Times) -> Estimate:
        """Return a source that has these tokens per step, timed in turns where it is not.

        Lengths predicted too slow to be timed get no cost, and never run.
        """
        if batch not in times:
            prompts = batch_prompts(self.prompts, batch, 0)
            times[batch] = self.pipeline.step_times(prompts, one, self.sampling, TIMED)
            self.keep()
        return Estimate.of(one, times[batch], brings)

    def _best_copy(self, windows: Estimate, batch: int) -> Strategy | None:
        """Return the copy's drafts predicted fastest for a batch; None where none are faster."""
        e, found = self.evidence, list[Estimate]()
        known = self.pipeline.measurements
        for likely in known.likely_copies(self.strategy, windows, batch, self.sampling):
            drafts, one = likely.drafts, likely.model_copy(update={"name": "self"})
            assert isinstance(drafts, SelfDrafts)
            own = f", windows of {drafts.window}" if drafts.window else ""
            name = f"self, {drafts.length} drafts in {drafts.weights}{own}"
            try:
                if name not in e.copy_counts:
                    self.say(f"{name}: the copy is made once, and its drafts are counted")
                    e.copy_counts[name] = self._count(one, drafts.length + 1)
                    self.keep()
                    self.say(f"{name}: {_rate(e.copy_counts[name]):.2f} tokens per step")
                counted, every = _rate(e.copy_counts[name]), (p.length for p in one.lengths)
                brings = tokens_at_one_rate(counted, drafts.length + 1, every)
                times = e.copy_times.setdefault(name, {})
                found.append(self._time(one, brings, batch, times))
            except DoesNotFitError as error:
                self.say(f"{name} is left out: {error}")
        best = max(found, key=lambda one: one.predict_speedup(batch), default=None)
        return None if best is None or best.predict_speedup(batch) <= 1 else best.strategy

    def candidates(self, batch: int) -> dict[str, Strategy]:
        """Return who runs in the final of a batch, plain decoding first."""
        e = self.evidence
        # What was counted here counts alone.
        windows = self._time(self.windows, e.tokens_per_step(), batch, e.times)
        found = {PLAIN: self.pipeline.strategy(PLAIN), AUTO: prune(windows.strategy)}
        if (drafts := self._best_copy(windows, batch)) is not None:
            found["self"] = drafts
        if self.strategy.acceptance.relaxed and self.pipeline.model.drafter is not None:
            rows, budget = (batch, self.sampling), self.strategy.tv_budget
            named = self.pipeline.strategy("lantern++", tuned_for=rows, tv_budget=budget)
            found[named.name] = named
        return found

    def final(self, batch: int, repeats: int) -> dict[str, Cell]:
        """Decode with every candidate of a batch in turns; return their cells by name."""
        if batch not in self.evidence.finals:
            self.evidence.finals[batch] = {
                name: new_cell(one, batch, self.sampling.temperature)
                for name, one in self.candidates(batch).items()
            }
        cells = self.evidence.finals[batch]
        tokens = self.pipeline.model.manifest.target.num_tokens
        plain = min(self.evidence.times[batch].get(1, [0.0]))
        need = 2 * (repeats + 1) * plain * 1e-3 * tokens
        self.check_left(need, f"the final of batch {batch}")
        self.race(cells, repeats)
        return cells

    def choose(self, batch: int, repeats: int) -> Choice:
        """Measure one batch and keep what auto is to decode it with; a large one is decoded once."""
        cells = self.final(batch, repeats if batch < 8 else 1)
        plain = cells[PLAIN].tokens_per_second
        best = max(cells, key=lambda name: cells[name].tokens_per_second)
        if cells[best].tokens_per_second < PAYS * plain:
            best = PLAIN
        strategy = cells[best].strategy
        if best in (AUTO, "self"):
            strategy = strategy.model_copy(update={"name": AUTO})
        choice = self.make_choice(batch, strategy, best, cells)
        words = ", ".join(f"{n} {c.tokens_per_second / plain:.2f}x" for n, c in cells.items())
        self.say(f"batch {batch}: {best} ({words})")
        return choice

    def run(self, batches: Sequence[int] = BATCHES, repeats: int = 3) -> list[Choice]:
        """Choose for each batch, then let go of the copies that no choice drafts with."""
        choices = super().run(batches, repeats)
        held = frozenset[str]().union(*(copies_of(choice.strategy) for choice in choices))
        self.pipeline.engines.keep_copies(held)
        return choices


def _rate(counted: Counted) -> float:
    """Return tokens per step."""
    gained, steps = counted
    return max(1.0, gained / steps) if steps else 1.0


def prune(strategy: Strategy) -> Strategy:
    """Return windows with only the lengths that could ever be faster, the shortest always.

    A length goes where a step costs more than the most that its drafts can add, or was not timed.
    """
    timed = [one for one in strategy.lengths if one.cost is not None]
    kept = tuple(one for one in timed if one.length == 1 or (one.cost or 1.0) < one.length)
    if len(kept) == 1:  # plain decoding alone: a window has two tokens at least, and is never used
        kept = tuple(timed[:2])
    return strategy.with_drafts(length=kept[-1].length, draft_lengths=kept)
