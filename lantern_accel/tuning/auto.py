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
from math import ceil
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from lantern_accel.decoding.adaptive import AdaptiveEngine
from lantern_accel.decoding.engine import Decoded
from lantern_accel.decoding.length_policy import (
    Block,
    LengthPolicy,
    costs_of,
    usual_tokens_per_step,
)
from lantern_accel.device.backend import check_clock, inferring
from lantern_accel.errors import DoesNotFitError, RequestError
from lantern_accel.generation.auto import Timed, prune_lengths
from lantern_accel.generation.pipeline import Pipeline, Prompt
from lantern_accel.measure.record import Cell
from lantern_accel.measure.rounds import about
from lantern_accel.measure.samples import batch_prompts, new_cell
from lantern_accel.strategy.choices import Choice
from lantern_accel.strategy.values import (
    AUTO,
    AUTO_CHAINS,
    AUTO_LENGTHS,
    Sampling,
    SelfDrafts,
    Strategy,
    adaptive_chain,
    adaptive_window,
    with_tokens_per_step,
)
from lantern_accel.tuning.search import PLAIN, Search, chosen, tuning_prompts

#: Images decoded together while tokens per step are counted, and rounds in which all lengths are timed.
COUNTED, TIMED = 8, 12
#: Batches that are chosen for unless the user names others.
BATCHES = (1, 2, 4, 8, 16, 32)
#: A tree of some eight drafts brings at most about so many tokens per step: where its nodes alone cost
#: more than that many plain steps, it does not run in the final.
TREE_WORTH, TREE_NODES = 3.0, 8
#: Copies of the target's own weights that may draft: their weights, and the tokens of their own window.
COPIES = (("int8", 0), ("int8", 4), ("int6", 4), ("int4", 0))
#: A window replaces plain decoding where it is at least this much faster in the final.
PAYS = 1.02


class Counted(BaseModel):
    """Tokens that were gained and steps that they took."""

    model_config = ConfigDict(extra="forbid")

    gained: int = 0
    steps: int = 0

    @property
    def tokens_per_step(self) -> float:
        return max(1.0, self.gained / self.steps) if self.steps else 1.0


class AutoEvidence(BaseModel):
    """Everything that was measured so far; kept until the choices are made, so that a run goes on."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["lantern_accel.choosing"] = "lantern_accel.choosing"
    schema_version: Literal[1] = 1
    settings: dict[str, Any]
    worth: dict[int, Counted] = {}
    times: dict[int, dict[int, list[float]]] = {}
    chain_tokens_per_step: dict[int, Counted] = {}
    chain_times: dict[int, dict[int, list[float]]] = {}
    copy_counts: dict[str, dict[int, list[int]]] = {}
    copy_times: dict[str, dict[int, dict[int, list[float]]]] = {}
    finals: dict[int, dict[str, Cell]] = {}

    def tokens_per_step(self, chains: bool = False) -> dict[int, float]:
        """Return what a step of each length brings, of windows or of chains."""
        worth = self.chain_tokens_per_step if chains else self.worth
        return {length: one.tokens_per_step for length, one in worth.items()}


class Steady:
    """A rule that keeps one length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def begin(self) -> int:
        return self.length

    def observe(self, block: Block) -> int:
        return self.length


class AutoTuner(Search[AutoEvidence]):
    """Measures for one pipeline and one temperature; a run that was interrupted goes on."""

    def __init__(
        self,
        pipeline: Pipeline,
        asked: Strategy,
        sampling: Sampling,
        prompts: Sequence[Prompt] | None,
        batches: Sequence[int],
        budget: float | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.asked, self.sampling, self.batches = asked, sampling, list(batches)
        self.budget, self.began = budget, time.perf_counter()
        tokens = pipeline.model.manifest.target.num_tokens
        self.lengths = [one for one in AUTO_LENGTHS if one <= tokens]
        self.chain_lengths: list[int] = []
        if pipeline.model.drafter is not None:
            self.chain_lengths = [one for one in AUTO_CHAINS if one <= tokens]
        #: Drafts by a copy of the target, where some may pay, by how the copy drafts.
        self.copies: dict[str, Strategy] = {}
        if (usual := pipeline.auto.copies(asked)) is not None:
            for weights, window in COPIES:
                most: Any = usual.tree
                passes = ceil(most.length / usual_tokens_per_step(window)) if window else 0
                own = {"weights": weights, "window": window, "passes": passes}
                tree = most.model_copy(update=own)
                name = f"self, {weights}" + (f", windows of {window}" if window else "")
                self.copies[name] = usual.model_copy(update={"tree": tree})
        key = pipeline.auto.key(asked, 0, sampling)
        given = tuning_prompts(pipeline, prompts)
        lengths = [self.lengths, self.chain_lengths]
        fresh = AutoEvidence(settings={"key": key, "prompts": given, "lengths": lengths})
        super().__init__(pipeline, key, fresh, given, say)

    @property
    def windows(self) -> Strategy:
        """Every length on one state, without costs, under another name than auto's."""
        return self.asked.model_copy(
            update={"name": "windows", "tree": adaptive_window(self.lengths)}
        )

    @property
    def chains(self) -> Strategy:
        """The drafter's chains of every length on one state, likewise."""
        update = {"name": "chains", "tree": adaptive_chain(self.chain_lengths)}
        return self.asked.model_copy(update=update)

    def _decode(self, batch: int, strategy: Strategy, rule: LengthPolicy, seed: int) -> Decoded:
        prompts = batch_prompts(self.prompts, batch, seed)
        shape = self.pipeline.model.family.usual_shape(self.pipeline.model)
        engine = self.pipeline.engine(batch, strategy, self.sampling, shape).engine
        assert isinstance(engine, AdaptiveEngine)
        engine.chosen = rule
        try:
            done, _ = self.pipeline.decode_only(prompts, strategy, self.sampling, seed)
        finally:
            engine.chosen = None
        return done

    def count(self) -> None:
        """Count tokens per step of every length, over each prompt once."""
        batch = min(COUNTED, len(self.prompts))
        rounds = max(1, len(self.prompts) // batch)
        e = self.evidence
        both = [(self.windows, self.lengths, e.worth, "windows of {}")]
        if self.chain_lengths:
            both.append(
                (self.chains, self.chain_lengths, e.chain_tokens_per_step, "chains of {} tokens")
            )
        todo = [
            (strategy, length, worth, name.format(length))
            for strategy, lengths, worth, name in both
            for length in lengths
            if length > 1 and length not in worth
        ]
        for number, (strategy, length, worth, name) in enumerate(todo, 1):
            began = time.perf_counter()
            found = Counted()
            for seed in range(rounds):
                done = self._decode(batch, strategy, Steady(length), seed)
                found.steps += int(done.steps.sum())
                found.gained += done.tokens.shape[0] * (done.tokens.shape[1] - 1)
            worth[length] = found
            self.keep()
            needs = (time.perf_counter() - began) * (len(todo) - number)
            left = about(needs)
            self._check_left(needs, "counting the other drafts")
            self.say(f"{name}: {found.tokens_per_step:.2f} tokens per step, {left} left here")
        for _, _, worth, _ in both:
            worth[1] = Counted(gained=1, steps=1)
        self._count_copies(batch, rounds)

    def _count_copies(self, batch: int, rounds: int) -> None:
        """Count the tokens per step of drafts by copies, of the most drafts; those that do not fit go."""
        for name, strategy in list(self.copies.items()):
            counts = self.evidence.copy_counts.get(name)
            if counts is None:
                tree: Any = strategy.tree
                self.say(f"{name}: the copy is made once, and its drafts are counted")
                counts = {tree.length + 1: [0, 0]}
                try:
                    for seed in range(rounds):
                        done = self._decode(batch, strategy, Steady(tree.length + 1), seed)
                        counts[tree.length + 1][0] += done.tokens.shape[0] * (
                            done.tokens.shape[1] - 1
                        )
                        counts[tree.length + 1][1] += int(done.steps.sum())
                except DoesNotFitError as error:
                    self.say(f"{name} is left out: {error}")
                    del self.copies[name]
                    continue
                self.evidence.copy_counts[name] = counts
                self.keep()
                gained, steps = counts[tree.length + 1]
                self.say(f"{name}: {gained / steps:.2f} tokens per step of {tree.length} drafts")

    def time(self, batch: int) -> dict[int, list[float]]:
        """Time steps of every length at a batch, in turns; lengths that cannot pay are left out."""
        return self._timed(batch, self.windows, self.evidence.times)

    def _timed(
        self, batch: int, strategy: Strategy, known: dict[int, dict[int, list[float]]]
    ) -> dict[int, list[float]]:
        if batch not in known:
            prompts = batch_prompts(self.prompts, batch, 0)
            known[batch] = self.pipeline.step_times(prompts, strategy, self.sampling, TIMED)
            self.keep()
        return known[batch]

    def candidates(self, batch: int) -> dict[str, Strategy]:
        """Return who runs in the final of a batch, plain decoding first."""
        times = self.time(batch)
        draft_lengths = with_tokens_per_step(
            costs_of(adaptive_window(self.lengths).draft_lengths, times),
            self.evidence.tokens_per_step(),
        )
        window = self.windows.model_copy(update={"tree": prune_lengths(self.asked, draft_lengths)})
        found = {PLAIN: self.pipeline.strategy(PLAIN), AUTO: window}
        if self.chain_lengths:
            times = self._timed(batch, self.chains, self.evidence.chain_times)
            chain = adaptive_chain(self.chain_lengths)
            worth = self.evidence.tokens_per_step(chains=True)
            known = {
                p.length: p
                for p in with_tokens_per_step(costs_of(chain.draft_lengths, times), worth)
            }
            # Those that promised too little to be timed have no cost, and never run.
            every = tuple(known.get(one.length, one) for one in chain.draft_lengths)
            chain = chain.model_copy(update={"draft_lengths": every})
            found["chains"] = self.chains.model_copy(update={"tree": chain})
        if (drafts := self._best_copy(batch)) is not None:
            found["self"] = drafts
        near = min(draft_lengths, key=lambda p: abs(p.length - TREE_NODES))
        if self.pipeline.model.drafter is not None and (near.cost or 1.0) < TREE_WORTH:
            name = "lantern++" if self.asked.acceptance.relaxed else "eagle"
            tree = self.pipeline.strategy(name, tv_budget=self.asked.tv_budget)
            found[name] = self.pipeline.tuned(tree, self.sampling.temperature)
        return found

    def _best_copy(self, batch: int) -> Strategy | None:
        """Return the drafts by a copy that promise a batch most; None where none promise anything."""
        found: list[Timed] = []
        for name, strategy in self.copies.items():
            times = self._timed(batch, strategy, self.evidence.copy_times.setdefault(name, {}))
            tree: Any = strategy.tree
            known = {one.length: one for one in costs_of(tree.draft_lengths, times)}
            every = tuple(known.get(one.length, one) for one in tree.draft_lengths)
            timed = strategy.model_copy(
                update={"tree": tree.model_copy(update={"draft_lengths": every})}
            )
            counts = self.evidence.copy_counts[name]
            found.append(Timed(strategy=timed, counts=counts).weighed())
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
        self._check_budget(batch, repeats)
        self.race(cells, repeats)
        return cells

    def _check_budget(self, batch: int, repeats: int) -> None:
        if self.budget is None:
            return
        tokens = self.pipeline.model.manifest.target.num_tokens
        plain = min(self.evidence.times[batch].get(1, [0.0]))
        need = 2 * (repeats + 1) * plain * 1e-3 * tokens
        self._check_left(need, f"the final of batch {batch}")

    def _check_left(self, need: float, what: str) -> None:
        """Raise RequestError where ``what``, which takes ``need`` seconds, is more than is left."""
        spent = time.perf_counter() - self.began
        if self.budget is not None and spent + need > self.budget:
            raise RequestError(
                f"a limit of {self.budget:.0f} s is too short: {spent:.0f} s are used, and {what} takes "
                f"{need:.0f} s; give a larger --max-seconds (what was measured is kept) or fewer batches"
            )

    def choose(self, batch: int, repeats: int) -> Choice:
        """Measure one batch and keep what auto is to decode it with."""
        cells = self.final(batch, repeats)
        plain = cells[PLAIN].tokens_per_second
        best = max(cells, key=lambda name: cells[name].tokens_per_second)
        if cells[best].tokens_per_second < PAYS * plain:
            best = PLAIN
        strategy = cells[best].strategy
        if best in (AUTO, "chains", "self"):
            strategy = strategy.model_copy(update={"name": AUTO})
        key = self.pipeline.auto.key(self.asked, batch, self.sampling)
        choice = chosen(key, strategy, best, cells)
        self.pipeline.auto.keep(choice)
        words = ", ".join(f"{n} {c.tokens_per_second / plain:.2f}x" for n, c in cells.items())
        self.say(f"batch {batch}: {best} ({words})")
        return choice


@inferring
def tune_auto(
    pipeline: Pipeline,
    asked: Strategy,
    *,
    temperature: float | None = None,
    batches: Sequence[int] = BATCHES,
    prompts: Sequence[Prompt] | None = None,
    repeats: int = 3,
    budget: float | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[list[Choice], AutoEvidence]:
    """Choose what auto decodes with, for each batch, and keep it in the cache.

    ``asked``: auto, exact or relaxed; ``prompts`` default to the half of the built-in ones that nothing
    is reported on; ``budget``: seconds at most. Returns the choices and their evidence. Raises
    RequestError where the budget is too short for a final.
    """
    check_clock(pipeline.backend)
    sampling = pipeline.sampling(temperature=temperature)
    tuner = AutoTuner(pipeline, asked, sampling, prompts, batches, budget, say)
    if tuner.evidence.worth:
        say("going on with what was measured before")
    tuner.count()
    choices = []
    for number, batch in enumerate(tuner.batches, 1):
        began = time.perf_counter()
        choices.append(tuner.choose(batch, repeats if batch < 8 else 1))
        spent = time.perf_counter() - began
        if number < len(tuner.batches):  # a batch takes about as long as its images do
            ahead = sum(tuner.batches[number:]) / batch
            say(f"{about(spent * min(ahead, 8 * (len(tuner.batches) - number)))} left at most")
    tuner.finish()
    used = (choice.strategy.tree for choice in choices)
    held = frozenset(tree.weights for tree in used if isinstance(tree, SelfDrafts))
    pipeline.engines.keep_copies(held)
    return choices, tuner.evidence
