"""Finds what ``auto`` decodes with: worth of drafts, cost of steps, and a final of the best.

Tokens per step of every window length are counted once, since no clock has a part in them; those of
drafts by a copy of the target's own weights with the most drafts alone, since one rate of acceptance
says the rest. Steps of every length are timed in turns within one decoding, for each batch. The best
window and the best copy by these figures then run against plain decoding and, where the model has a
drafter, its chains and, where it could pay, a tree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, Literal

from pydantic import Field

from lantern_accel.decoding.adaptive import AdaptiveEngine
from lantern_accel.decoding.length_policy import FixedLength, usual_tokens_per_step, with_costs
from lantern_accel.errors import DoesNotFitError, RequestError
from lantern_accel.generation.auto import prune_lengths
from lantern_accel.generation.row_costs import auto_lengths
from lantern_accel.generation.timed import Timed
from lantern_accel.measure.record import Cell
from lantern_accel.measure.samples import about, batch_prompts, new_cell
from lantern_accel.records import Record
from lantern_accel.strategy.choices import Choice
from lantern_accel.strategy.rules import Exact
from lantern_accel.strategy.sources import DraftSource
from lantern_accel.strategy.values import (
    AUTO,
    AUTO_CHAINS,
    Fresh,
    SelfDrafts,
    Strategy,
    adaptive_chain,
    adaptive_window,
    with_tokens_per_step,
)
from lantern_accel.tuning.search import PLAIN, Evidence, Search

#: Images decoded together while tokens per step are counted, and rounds in which all lengths are timed.
COUNTED, TIMED = 8, 12
#: Batches that are chosen for unless the user names others.
BATCHES = (1, 2, 4, 8, 16, 32)
#: A tree of some eight drafts brings at most about so many tokens per step: where its nodes alone cost
#: more than that many plain steps, it does not run in the final.
TREE_WORTH, TREE_NODES = 3.0, 8
#: Copies of the target's own weights that may draft: their weights, and the tokens of their own window.
COPIES = (("int8", 0), ("int8", 8), ("int6", 4), ("int4", 0))
#: A window replaces plain decoding where it is at least this much faster in the final.
PAYS = 1.02


class Counted(Record):
    """Tokens that were gained and steps that they took."""

    gained: int = 0
    steps: int = 0

    @property
    def tokens_per_step(self) -> float:
        return max(1.0, self.gained / self.steps) if self.steps else 1.0


#: Milliseconds of steps, by batch and length.
Times = dict[int, dict[int, list[float]]]


class AutoEvidence(Evidence):
    """Everything that was measured so far; kept until the choices are made, so that a run goes on."""

    kind: Literal["lantern_accel.choosing"] = "lantern_accel.choosing"
    worth: dict[int, Counted] = Field(default_factory=dict)
    times: Times = Field(default_factory=dict)
    chain_tokens_per_step: dict[int, Counted] = Field(default_factory=dict)
    chain_times: Times = Field(default_factory=dict)
    copy_counts: dict[str, dict[int, list[int]]] = Field(default_factory=dict)
    copy_times: dict[str, Times] = Field(default_factory=dict)
    finals: dict[int, dict[str, Cell]] = Field(default_factory=dict)

    def tokens_per_step(self, chains: bool = False) -> dict[int, float]:
        """Return what a step of each length brings, of windows or of chains."""
        worth = self.chain_tokens_per_step if chains else self.worth
        return {length: one.tokens_per_step for length, one in worth.items()}


class AutoTuner(Search[AutoEvidence]):
    """Chooses what auto, exact or relaxed, decodes with, for each batch.

    Raises RequestError where the budget is too short for a final.
    """

    kind = AutoEvidence

    @cached_property
    def lengths(self) -> dict[str, list[int]]:
        """The lengths of windows, by what rows cost one image, and of the drafter's chains."""
        tokens = self.pipeline.model.manifest.target.num_tokens
        drafter, costs = self.pipeline.model.drafter is not None, self.pipeline.auto.costs
        return {
            "windows": [*auto_lengths(costs, self.sampling.branches, 1, tokens, {})],
            "chains": [one for one in AUTO_CHAINS if drafter and one <= tokens],
        }

    @cached_property
    def sources(self) -> dict[str, Strategy]:
        """Exact windows, and chains, with every length on one state, without costs."""
        fresh: Fresh = "head" if self.pipeline.auto.guesses else "above"
        made: dict[str, Callable[[Sequence[int]], DraftSource]] = {
            "windows": partial(adaptive_window, fresh=fresh),
            "chains": adaptive_chain,
        }
        exact = self.strategy.model_copy(update={"acceptance": Exact(), "tv_budget": None})
        rules = {"windows": exact, "chains": self.strategy}
        return {
            name: rules[name].model_copy(update={"name": name, "drafts": made[name](lengths)})
            for name, lengths in self.lengths.items()
            if lengths
        }

    @cached_property
    def copies(self) -> dict[str, Strategy]:
        """Drafts by a copy of the target, where some may pay, by how the copy drafts."""
        usual = self.pipeline.auto.copies(self.strategy)
        found: dict[str, Strategy] = {}
        for weights, window in COPIES if usual is not None else ():
            assert usual is not None
            most: Any = usual.drafts
            # Drafts of a last pass that would settle only a part of them are mostly right already.
            counted = self.evidence.worth.get(window)
            gain = counted.tokens_per_step if counted else usual_tokens_per_step(max(window, 1))
            passes = max(1, int(most.length / gain)) if window else 0
            own = {"weights": weights, "window": window, "passes": passes}
            name = f"self, {weights}" + (f", windows of {window}" if window else "")
            found[name] = usual.model_copy(update={"drafts": most.model_copy(update=own)})
        return found

    def settings(self) -> dict[str, Any]:
        return {"lengths": list(self.lengths.values())}

    def written(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return self.evidence.model_dump(mode="json") | super().written(choices)

    def _counted(self, strategy: Strategy, length: int) -> Counted:
        """Decode each prompt once with drafts of one length; return what they brought."""
        batch = min(COUNTED, len(self.prompts))
        shape = self.pipeline.model.family.usual_shape(self.pipeline.model)
        engine = self.pipeline.engine(batch, strategy, self.sampling, shape).engine
        assert isinstance(engine, AdaptiveEngine)
        found = Counted()
        engine.chosen = FixedLength(length)
        try:
            for seed in range(max(1, len(self.prompts) // batch)):
                prompts = batch_prompts(self.prompts, batch, seed)
                done, _ = self.pipeline.decode_only(prompts, strategy, self.sampling, seed)
                found.steps += int(done.steps.sum())
                found.gained += done.tokens.shape[0] * (done.tokens.shape[1] - 1)
        finally:
            engine.chosen = None
        return found

    def prepare(self) -> None:
        """Count tokens per step of every length, over each prompt once."""
        e = self.evidence
        counts = {"windows": e.worth, "chains": e.chain_tokens_per_step}
        todo = [
            (name, length)
            for name in self.sources
            for length in self.lengths[name]
            if length > 1 and length not in counts[name]
        ]
        for number, (name, length) in enumerate(todo, 1):
            began = time.perf_counter()
            found = counts[name][length] = self._counted(self.sources[name], length)
            self.keep()
            needs = (time.perf_counter() - began) * (len(todo) - number)
            self._check_left(needs, "counting the other drafts")
            rate = f"{found.tokens_per_step:.2f} tokens per step, {about(needs)} left here"
            self.say(f"{name} of {length}{' tokens' if name == 'chains' else ''}: {rate}")
        for name in self.sources:
            counts[name][1] = Counted(gained=1, steps=1)
        for name, strategy in list(self.copies.items()):
            if name not in e.copy_counts:
                self._count_copy(name, strategy)

    def _count_copy(self, name: str, strategy: Strategy) -> None:
        """Count the tokens per step of a copy's most drafts; one that does not fit is left out."""
        tree: Any = strategy.drafts
        self.say(f"{name}: the copy is made once, and its drafts are counted")
        try:
            found = self._counted(strategy, tree.length + 1)
        except DoesNotFitError as error:
            self.say(f"{name} is left out: {error}")
            del self.copies[name]
            return
        self.evidence.copy_counts[name] = {tree.length + 1: [found.gained, found.steps]}
        self.keep()
        rate = found.gained / found.steps
        self.say(f"{name}: {rate:.2f} tokens per step of {tree.length} drafts")

    def _with_costs(
        self,
        batch: int,
        strategy: Strategy,
        times: Times,
        worth: dict[int, float] | None = None,
    ) -> Strategy:
        """Return a source with the costs of its lengths at a batch, timed in turns where they are not.

        ``worth``: tokens per step by length. Lengths that promise too little to be timed get no cost, and
        never run.
        """
        if batch not in times:
            prompts = batch_prompts(self.prompts, batch, 0)
            times[batch] = self.pipeline.step_times(prompts, strategy, self.sampling, TIMED)
            self.keep()
        tree: Any = strategy.drafts
        every = with_tokens_per_step(with_costs(tree.draft_lengths, times[batch]), worth or {})
        return strategy.model_copy(
            update={"drafts": tree.model_copy(update={"draft_lengths": every})}
        )

    def candidates(self, batch: int) -> dict[str, Strategy]:
        """Return who runs in the final of a batch, plain decoding first."""
        e = self.evidence
        windows = self.sources["windows"]
        timed: Any = self._with_costs(batch, windows, e.times, e.tokens_per_step()).drafts
        lengths = tuple(one for one in timed.draft_lengths if one.cost is not None)
        window = windows.model_copy(update={"drafts": prune_lengths(windows, lengths)})
        found = {PLAIN: self.pipeline.strategy(PLAIN), AUTO: window}
        if chains := self.sources.get("chains"):
            worth = e.tokens_per_step(chains=True)
            found["chains"] = self._with_costs(batch, chains, e.chain_times, worth)
        if (drafts := self._best_copy(batch)) is not None:
            found["self"] = drafts
        near = min(lengths, key=lambda p: abs(p.length - TREE_NODES))
        if self.pipeline.model.drafter is not None and (near.cost or 1.0) < TREE_WORTH:
            name = "lantern++" if self.strategy.acceptance.relaxed else "eagle"
            tree = self.pipeline.strategy(name, tv_budget=self.strategy.tv_budget)
            found[name] = self.pipeline.auto.tuned(tree, self.sampling.temperature)
        return found

    def _best_copy(self, batch: int) -> Strategy | None:
        """Return the drafts by a copy that promise a batch most; None where none promise anything."""
        e = self.evidence
        found = [
            Timed(
                strategy=self._with_costs(batch, one, e.copy_times.setdefault(name, {})),
                counts=e.copy_counts[name],
            ).weighed()
            for name, one in self.copies.items()
        ]
        best = max(found, key=lambda one: one.promise(batch), default=None)
        return None if best is None or best.promise(batch) <= 1 else best.strategy

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
        self._check_left(need, f"the final of batch {batch}")
        self.race(cells, repeats)
        return cells

    def _check_left(self, need: float, what: str) -> None:
        """Raise RequestError where ``what``, which takes ``need`` seconds, is more than is left."""
        spent = time.perf_counter() - self.began
        if self.budget is not None and spent + need > self.budget:
            raise RequestError(
                f"a limit of {self.budget:.0f} s is too short: {spent:.0f} s are used, and {what} takes "
                f"{need:.0f} s; give a larger --max-seconds (what was measured is kept) or fewer batches"
            )

    def choose(self, batch: int, repeats: int) -> Choice:
        """Measure one batch and keep what auto is to decode it with; a large one is decoded once."""
        cells = self.final(batch, repeats if batch < 8 else 1)
        plain = cells[PLAIN].tokens_per_second
        best = max(cells, key=lambda name: cells[name].tokens_per_second)
        if cells[best].tokens_per_second < PAYS * plain:
            best = PLAIN
        strategy = cells[best].strategy
        if best in (AUTO, "chains", "self"):
            strategy = strategy.model_copy(update={"name": AUTO})
        choice = self.chosen(batch, strategy, best, cells)
        self.pipeline.auto.keep(choice)
        words = ", ".join(f"{n} {c.tokens_per_second / plain:.2f}x" for n, c in cells.items())
        self.say(f"batch {batch}: {best} ({words})")
        return choice

    def run(self, batches: Sequence[int] = BATCHES, repeats: int = 3) -> list[Choice]:
        """Choose for each batch, then let go of the copies that no choice drafts with."""
        choices = super().run(batches, repeats)
        used = (choice.strategy.drafts for choice in choices)
        held = frozenset(tree.weights for tree in used if isinstance(tree, SelfDrafts))
        self.pipeline.engines.keep_copies(held)
        return choices
