"""Measures the candidates of ``auto``: times their steps, counts accepted drafts, and keeps both.

The first request of a kind times steps on its own prompts. Nothing else builds engines to time them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property

from lantern_accel.decoding.engine import Engine
from lantern_accel.device.host_load import BUSY, HostLoad
from lantern_accel.device.waiting import waiting
from lantern_accel.errors import DoesNotFitError
from lantern_accel.families.base import Rows
from lantern_accel.families.manifest import Manifest
from lantern_accel.generation import auto_constants as auto
from lantern_accel.generation.calibrate import calibrate, count
from lantern_accel.generation.copies import likely_copies, own_windows, product_times
from lantern_accel.generation.decision import Estimate, Timings, choose_source
from lantern_accel.generation.engines import Engines, copies_of, explain_errors
from lantern_accel.generation.row_costs import (
    RowCosts,
    auto_lengths,
    complete_tokens_per_step,
    row_costs,
    tree_of,
    window_tokens,
)
from lantern_accel.nn.transformer import projections
from lantern_accel.strategy.choices import (
    Choice,
    key_of,
    known_tokens_per_step,
    read_choice,
    warn_of_stale,
    write_choice,
)
from lantern_accel.strategy.lengths import tokens_at_one_rate
from lantern_accel.strategy.rules import Exact
from lantern_accel.strategy.sources import DraftLength
from lantern_accel.strategy.values import (
    AUTO,
    AUTO_CHAIN,
    AUTO_LENGTHS,
    AUTO_SELF,
    ChainTree,
    Sampling,
    SelfDrafts,
    Strategy,
    Window,
)

_LOG = logging.getLogger("lantern_accel.generation")
#: From a strategy, its engine with a request started on it; None: it does not fit the memory.
Start = Callable[[Strategy], Engine | None]


class Measurements:
    """Measurements of drafts for one loaded model on one device, in memory and in the cache."""

    def __init__(self, engines: Engines) -> None:
        self.engines = engines
        self.model, self.backend = engines.model, engines.backend
        self._known: dict[str, Choice] = {}
        #: Seconds of timing so far, and what makes the last one doubtful, to be said of its choice.
        self.seconds, self.doubt = 0.0, ""

    @cached_property
    def costs(self) -> RowCosts:
        """The costs of rows of a pass here."""
        return row_costs(self.model, self.backend, self.engines.dtype)

    @cached_property
    def manifest(self) -> Manifest:
        """The model's manifest, with default trees not larger than this device's costs favour."""
        manifest: Manifest = self.model.manifest
        if self.model.drafter is None:
            return manifest
        defaults, branches = manifest.defaults, manifest.defaults.sampling.branches
        trees = {
            "static_tree": tree_of(self.costs, branches, defaults.static_tree),
            "dynamic_tree": tree_of(self.costs, branches, defaults.dynamic_tree),
        }
        return manifest.model_copy(update={"defaults": defaults.model_copy(update=trees)})

    @property
    def guesses(self) -> bool:
        """Whether a draft head drafts in auto's windows."""
        return getattr(self.model.target, "draft_head", None) is not None

    # --- what is kept --------------------------------------------------------------------------

    def key(self, strategy: Strategy, batch: int, sampling: Sampling) -> dict[str, object]:
        """Return everything that a choice for auto depends on."""
        return key_of(
            "auto",
            self.model,
            self.backend,
            self.engines.dtype,
            strategy,
            strategy=strategy.name,
            batch=batch,
            temperature=round(sampling.temperature, 1),
            filters=[sampling.branches, sampling.top_k, sampling.top_p < 1, sampling.order],
            budget=strategy.tv_budget,
            invariant=strategy.invariant,
            lengths=[list(auto.TOKENS), [*auto.COPY_DRAFTS, *auto.USUAL_RATES]],
            draft_head=self.guesses,
        )

    def tree_key(self, strategy: Strategy, temperature: float) -> dict[str, object]:
        """Return everything that a tuned tree depends on."""
        model, backend, dtype = self.model, self.backend, self.engines.dtype
        greedy = temperature == 0
        return key_of(
            "tree", model, backend, dtype, strategy, greedy=greedy, residual=strategy.residual
        )

    def choice(self, strategy: Strategy, batch: int, sampling: Sampling) -> Choice | None:
        """Return what is kept for this batch and these settings; None: nothing yet."""
        key = self.key(strategy, batch, sampling)
        if repr(key) not in self._known and (found := read_choice(key)) is not None:
            self._known[repr(key)] = found
        return self._known.get(repr(key))

    def keep(self, choice: Choice) -> None:
        """Use a choice from now on, and write it to the cache where there is one."""
        self._known[repr(choice.key)] = choice
        write_choice(choice)

    def tune_strategy(self, strategy: Strategy, batch: int, sampling: Sampling) -> Strategy:
        """Return a strategy by name over the tree or the window that is best here, as far as is known.

        That is the tree which ``lantern-accel tune`` kept for this device, or a window as long as costs
        of rows favour (:func:`.window_tokens`). A tree that is not the default one stays. Warns where a
        tree was found under another version.
        """
        drafts = strategy.drafts
        if drafts.device_sets == "length" and strategy.name != AUTO:
            usual, plain = drafts.size[0], batch * sampling.branches
            most = min(usual, int(self.model.manifest.target.num_tokens))
            length = window_tokens(self.costs, plain, batch, most)
            return strategy if length == usual else strategy.override(window=length)
        if drafts != self.manifest.defaults.static_tree:
            return strategy
        key = self.tree_key(strategy, sampling.temperature)
        if (found := read_choice(key)) is not None:
            return strategy.override(drafts=found.strategy.drafts)
        warn_of_stale(key)
        return strategy

    def recall(self, asked: Strategy, batch: int, sampling: Sampling) -> Timings:
        """Return what is kept of the candidates at this batch; windows by priors where nothing is."""
        found = self.choice(asked, batch, sampling)
        if found is None or (found.strategy.needs_drafter and self.model.drafter is None):
            return Timings(taken=self.windows(asked, batch, sampling))
        timed = found.evidence.get("timed")
        return Timings.model_validate({"timed": timed} if timed else {"taken": found.strategy})

    def resolve(self, strategy: Strategy, batch: int, sampling: Sampling) -> Strategy:
        """Return what auto stands for at this batch, as far as is known; other strategies as they are."""
        if strategy.name != AUTO:
            return strategy
        known = self.recall(strategy, batch, sampling)
        return choose_source(strategy, known, batch, self.engines.capacity)[0]

    # --- candidates ----------------------------------------------------------------------------

    def windows(
        self, asked: Strategy, batch: int, sampling: Sampling, costs: RowCosts | None = None
    ) -> Strategy:
        """Return windows of the lengths that may be faster here and fit, with tokens per step.

        ``costs``: of rows, as steps were timed; None: what is known of the device.
        """
        known = known_tokens_per_step(self.model.weights_hash, sampling.temperature)
        seen = {} if known is None else known.by_head if self.guesses else known.tokens_per_step
        cost = None
        if self.backend.simulated:  # its times are not a device's: steps are taken to cost alike
            costs, cost = RowCosts.free(1), 1.0
        brings, tokens = complete_tokens_per_step(seen), self.model.manifest.target.num_tokens
        rows = batch * sampling.branches
        lengths = auto_lengths(costs or self.costs, rows, batch, tokens, brings)
        if self.backend.preferences.compiles:
            lengths = (1, window_tokens(self.costs, rows, batch, lengths[-1]))[: len(lengths)]
        exact = exactly(asked)
        while True:
            made = tuple(
                DraftLength(length=n, cost=cost, tokens_per_step=brings[n]) for n in lengths
            )
            window = Window.over(lengths, fresh="head" if self.guesses else "above")
            strategy = exact.with_drafts(window, draft_lengths=made)
            shorter = lengths[-1] <= AUTO_LENGTHS[-1]
            if shorter or self.engines.capacity.fits(batch, strategy, sampling):
                return strategy
            lengths = lengths[:-1]

    def chain(self, asked: Strategy) -> Strategy | None:
        """Return chains of the drafter where relaxation is asked for; None where none may serve."""
        if self.model.drafter is None or not asked.acceptance.relaxed:
            return None
        tokens = self.model.manifest.target.num_tokens
        lengths = [length for length in AUTO_CHAIN if length <= tokens]
        if self.backend.preferences.compiles:
            lengths[1:-1] = []
        return asked.with_drafts(ChainTree.over(lengths)) if lengths[1:] else None

    def copies(self, asked: Strategy) -> Strategy | None:
        """Return drafts by a copy of the target that may serve in a window's place; None where none may.

        Only where the device reads a copy in less time, and weights decide what a step takes; nothing is
        drafted where relaxation is asked for, or by the papers' coupling.
        """
        weights = sum(part.weight.numel() for part in projections(self.model.target))
        # In this order: a device that checks its kernels first checks none for a small model.
        pays = weights >= auto.LEAST_WEIGHTS and self.backend.preferences.reads_fewer_bits
        if not pays or asked.acceptance.relaxed or self.model.rounding is not None:
            return None
        tokens = self.model.manifest.target.num_tokens
        # In int8, the largest that is tried: where it fits, the others do.
        tree = SelfDrafts.over([length for length in AUTO_SELF if length <= tokens])
        made = asked.model_copy(update={"drafts": tree})
        return made if self.engines.capacity.holds(made) else None

    def likely_copies(
        self, asked: Strategy, windows: Estimate, batch: int, sampling: Sampling
    ) -> list[Strategy]:
        """Return the drafts that are worth trying, all by one copy; none where none may help.

        Predicted from the time of matmuls with a part of the weights cost, before a copy is made.
        ``windows``: the target's, timed, which say what a check of this many drafts costs.
        """
        usual = self.copies(asked)
        if usual is None:
            return []
        rows = batch * sampling.branches
        timed = [one for one in windows.strategy.lengths if one.cost is not None]
        counts = [rows * n for n in own_windows(timed)]
        dtype, watch = self.engines.dtype, self.backend.stopwatch
        times = product_times(self.model.target, self.backend, dtype, counts, watch)
        tokens = self.model.manifest.target.num_tokens
        found = likely_copies(times, rows, timed, tokens, windows.times.get(1))
        return [usual.with_drafts(one.tree) for one in found if one.speedup >= auto.ENOUGH]

    # --- measuring -----------------------------------------------------------------------------

    def ask(
        self,
        asked: Strategy,
        batch: int,
        sampling: Sampling,
        shape: Hashable,
        rows: Callable[[int], Rows],
    ) -> Timings:
        """Return what is known of auto's candidates; time them on a request's prompts where it must be.

        ``rows``: what the request's first images start from, by their number; ``shape``: of its images.
        """
        stored = self.choice(asked, batch, sampling)
        if self.backend.simulated or (stored is not None and not stored.again):
            return self.recall(asked, batch, sampling)

        def start(source: Strategy) -> Engine | None:
            try:
                ready = self.engines.get(batch, source, sampling, shape)
            except DoesNotFitError:  # not together with the first
                return None
            ready.begin(rows(batch), 0, range(batch))
            return ready.engine

        held, load, began = self.engines.capacity.copies, HostLoad(), time.monotonic()
        text = "measuring which drafts are faster here, once"
        with explain_errors(self.backend), waiting(text, _LOG):
            if stored is None:
                found = self._compare(asked, batch, sampling, start)
            else:
                known = self.recall(asked, batch, sampling).timed
                found = self._compare_again(known, batch, start)
        others, self.seconds = load.share(), self.seconds + time.monotonic() - began
        again, self.doubt = 0, ""
        if not isinstance(others, str) and others >= BUSY:
            again = (auto.REQUESTS if stored is None else stored.again) - 1
            later = "; the next images measure again" if again else ""
            self.doubt = f"; chosen on a busy machine{later}"
        if found:
            self.settle(found, asked, batch, sampling, again)
            if stored is not None:
                held -= copies_of(stored.strategy)
            held |= copies_of(self.resolve(asked, batch, sampling))
            self.engines.keep_copies(held)
        return self.recall(asked, batch, sampling)

    def _compare(
        self, asked: Strategy, batch: int, sampling: Sampling, start: Start
    ) -> list[Estimate]:
        """Time what may draft, longer windows where those may be faster; []: it does not fit."""
        windows = self._time(self.windows(asked, batch, sampling), start)
        if windows is None:
            return []
        if len(windows.times) > 1 and not self.backend.preferences.compiles:
            rows = batch * sampling.branches
            costs = RowCosts.of_times({rows * n: ms for n, ms in windows.times.items()})
            longer = self.windows(asked, batch, sampling, costs)
            if longer.drafts.size > windows.strategy.drafts.size:
                windows = self._time(longer, start) or windows
        chain = self.chain(asked)
        others = [chain] if chain else self.likely_copies(asked, windows, batch, sampling)
        timed = (self._time(one, start) for one in others)
        return [windows, *(one for one in timed if one is not None)]

    def _compare_again(self, found: Sequence[Estimate], batch: int, start: Start) -> list[Estimate]:
        """Time once more what may yet prove best, by the copies that are there."""
        least = auto.NEAR * max(auto.ENOUGH, *(one.predict_speedup(batch) for one in found))
        held = self.engines.capacity.copies
        return [
            (self._time(one.strategy, start, one) or one)
            if one.predict_speedup(batch) >= least and copies_of(one.strategy) <= held
            else one
            for one in found
        ]

    def _time(
        self, strategy: Strategy, start: Start, before: Estimate | None = None
    ) -> Estimate | None:
        """Time the steps of a source, and count its drafts for a few where nothing is known of them.

        ``before``: what was timed so far. None: it does not fit the memory.
        """
        engine = start(strategy)
        if engine is None:
            return None
        again = (auto.LATER_ROUNDS, auto.LATER_MS) if before else ()
        times = calibrate(engine, self.backend.stopwatch, *again)
        for length, ms in before.times.items() if before else ():
            times.setdefault(length, []).append(ms)
        length, tokens, exact = max(times), dict[int, float](), before and before.exact
        if length > 1 and strategy.lengths[-1].tokens_per_step is None:
            every = [one.length for one in strategy.lengths]
            counted = self._count(strategy, start, length)
            tokens = tokens_at_one_rate(counted or 1.0, length, every)
            if strategy.acceptance.relaxed and not self.backend.preferences.compiles:
                exact = self._count(exactly(strategy), start, length)
        return Estimate.of(strategy, times, tokens).model_copy(update={"exact": exact})

    def _count(self, strategy: Strategy, start: Start, length: int) -> float | None:
        """Count the tokens per step of a few steps of one length; None: it does not fit the memory."""
        if (engine := start(strategy)) is None:
            return None
        most = auto.COPY_STEPS if copies_of(strategy) else auto.DRAFTER_STEPS
        gained, spent = count(
            engine, length, max(1, min(most, (engine.geometry.tokens - 1) // length))
        )
        return gained / spent

    def settle(
        self, found: Sequence[Estimate], asked: Strategy, batch: int, sampling: Sampling, again: int
    ) -> None:
        """Keep what is predicted to be fastest of what was timed, or plain decoding, and why.

        ``again``: how many later requests time it again.
        """
        plain = min(one.times[1] for one in found)
        timings = Timings(timed=tuple(one.with_costs(plain) for one in found))
        strategy, best = choose_source(asked, timings, batch)
        self.keep(
            Choice(
                key=self.key(asked, batch, sampling),
                strategy=strategy,
                speedup=1.0 if best is None else best.predict_speedup(batch),
                source="while generating",
                evidence=timings.model_dump(mode="json", include={"timed"}),
                again=again,
            )
        )


def exactly(strategy: Strategy) -> Strategy:
    """Return the same drafts under the exact rule."""
    return strategy.model_copy(update={"acceptance": Exact(), "tv_budget": None})
