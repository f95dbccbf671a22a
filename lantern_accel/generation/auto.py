"""Chooses what a batch is decoded with: by what tuning kept for this device, or by timing a few steps.

The first requests of a kind time steps on their own prompts, and count accepted drafts.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Any

from lantern_accel.decoding.engine import Engine
from lantern_accel.device.host_load import BUSY, HostLoad
from lantern_accel.device.waiting import waiting
from lantern_accel.families.manifest import Manifest
from lantern_accel.generation.calibrate import calibrate, count
from lantern_accel.generation.copies import (
    DRAFTS,
    USUAL_RATES,
    likely_copies,
    own_windows,
    product_times,
)
from lantern_accel.generation.engines import CapturedEngine, Engines, copies_of
from lantern_accel.generation.estimate import (
    ENOUGH,
    KNOWN_STEPS,
    REQUESTS,
    USUAL_STEPS,
    Comparison,
    Estimate,
)
from lantern_accel.generation.result import GenerationStats
from lantern_accel.generation.row_costs import (
    TOKENS,
    RowCosts,
    auto_lengths,
    known_worth,
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
from lantern_accel.strategy.lengths import in_batch
from lantern_accel.strategy.rules import Exact
from lantern_accel.strategy.sources import DraftLength
from lantern_accel.strategy.values import (
    AUTO,
    AUTO_LENGTHS,
    AUTO_SELF,
    NoTree,
    Sampling,
    SelfDrafts,
    Strategy,
    adaptive_window,
    self_drafted,
)

_LOG = logging.getLogger("lantern_accel.generation")
#: Weights from which on reading them decides a step, so that a quantized copy may be a fast drafter.
LEAST_WEIGHTS = 1 << 23
#: Steps over which drafts that settle at once are counted: those of a draft head or drafter, and of a
#: copy.
DRAFTER_STEPS, COPY_STEPS = 48, 12
#: Rounds of steps that later requests time, and milliseconds at least: less than the first.
ROUNDS_AGAIN, AGAIN_MS = 1, 250.0
#: Batch sizes that may be advised, the predicted gain that one needs, and the share of the best speed.
BATCHES, CLEARLY, BATCH_NEARLY = (2, 4, 8, 16, 32), 1.3, 0.8
#: Temperatures within this distance have about the same acceptance rate.
SAME_TEMPERATURE = 0.05

#: From a strategy, its engine and what starts a request on it; None: one does not fit the memory.
Begun = Callable[[Strategy], "tuple[CapturedEngine, Callable[[], None]] | None"]


class Auto:
    """Chooses for one loaded model on one device."""

    def __init__(self, engines: Engines) -> None:
        self.engines = engines
        self.model, self.backend = engines.model, engines.backend
        self._known: dict[str, Choice | None] = {}
        #: Seconds of timing so far, and the share of the host's cores that others used in the last one.
        self.seconds = 0.0
        self.others: float | str = "nothing was timed yet"

    @cached_property
    def costs(self) -> RowCosts:
        """What rows of a pass cost here."""
        return row_costs(self.model, self.backend, self.engines.dtype)

    @cached_property
    def manifest(self) -> Manifest:
        """The model's manifest, with default trees not larger than this device's costs favour."""
        manifest: Manifest = self.model.manifest
        if self.model.drafter is None:
            return manifest
        defaults, branches = manifest.defaults, manifest.defaults.sampling.branches
        trees = {
            name: tree_of(self.costs, branches, getattr(defaults, name))
            for name in ("static_tree", "dynamic_tree")
        }
        return manifest.model_copy(update={"defaults": defaults.model_copy(update=trees)})

    @property
    def guesses(self) -> bool:
        """Whether a draft head drafts in auto's windows."""
        return getattr(self.model.target, "draft_head", None) is not None

    # --- what is kept --------------------------------------------------------------------------

    def key(self, strategy: Strategy, batch: int, sampling: Sampling) -> dict[str, Any]:
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
            lengths=[list(TOKENS), [*DRAFTS, *USUAL_RATES]],
            requests=REQUESTS,
            draft_head=self.guesses,
        )

    def tree_key(self, strategy: Strategy, temperature: float) -> dict[str, Any]:
        """Return everything that a tuned tree depends on."""
        of = self.model, self.backend, self.engines.dtype, strategy
        return key_of("tree", *of, greedy=temperature == 0, residual=strategy.residual)

    def choice(self, strategy: Strategy, batch: int, sampling: Sampling) -> Choice | None:
        """Return what is kept for this batch and these settings; None: nothing yet."""
        key = self.key(strategy, batch, sampling)
        name = repr(key)
        if self._known.get(name) is None:
            self._known[name] = read_choice(key)
        return self._known[name]

    def keep(self, choice: Choice) -> None:
        """Use a choice from now on, and write it to the cache where there is one."""
        self._known[repr(choice.key)] = choice
        with suppress(OSError):  # a cache that cannot be written: this process alone knows it
            write_choice(choice)

    def tuned(self, strategy: Strategy, batch: int, sampling: Sampling) -> Strategy:
        """Return a strategy by name over the tree or the window that is best here, as far as is known.

        That is the tree which ``lantern-accel tune`` kept for this device, or a window as long as costs
        of rows favour (:func:`.window_tokens`). A tree that is not the default one stays. Warns where a
        tree was found under another version.
        """
        drafts = strategy.drafts
        if drafts.device_sets == "length" and strategy.name != AUTO:
            most, plain = drafts.size[0], batch * sampling.branches
            length = window_tokens(self.costs, plain, batch, most)
            return strategy if length == most else strategy.override(window=length)
        if drafts != self.manifest.defaults.static_tree:
            return strategy
        key = self.tree_key(strategy, sampling.temperature)
        found = read_choice(key)
        if found is None:
            warn_of_stale(key)
        return strategy if found is None else strategy.override(tree=found.strategy.drafts)

    def resolve(self, strategy: Strategy, batch: int, sampling: Sampling) -> Strategy:
        """Return what auto stands for at this batch, as far as is known; other strategies as they are."""
        if strategy.name != AUTO:
            return strategy
        found = self.choice(strategy, batch, sampling)
        if found is None or (found.strategy.needs_drafter and self.model.drafter is None):
            return self.windows(strategy, batch, sampling).strategy
        return found.strategy if self.engines.capacity.holds(found.strategy) else _plainly(strategy)

    def faster_batch(self, of: GenerationStats) -> int | None:
        """Return a batch size that likely had been faster, by the costs of rows; None: none is.

        Work per image is left out, so that only a clear gain counts, by the smallest such batch.
        """
        used, sampling, now = of.strategy, of.sampling, of.batch_size
        if self.backend.simulated or now >= of.images:
            return None
        worth = {one.length: one.tokens_per_step or 1.0 for one in used.lengths}
        worth = worth or {used.drafts.size[0]: of.step_compression}

        def speed(batch: int) -> float:
            rows = batch * sampling.branches
            costs = {n: self.costs.of(n * rows, sampling.branches) for n in worth}
            return max(batch * in_batch(worth[n], batch) / costs[n] for n in worth)

        more = [n for n in BATCHES if now < n <= of.images]
        fits = self.engines.capacity.fits
        speeds = {n: speed(n) for n in more if fits(n, used, sampling)}
        least = max(CLEARLY * speed(now), BATCH_NEARLY * max(speeds.values(), default=0.0))
        return next((n for n, one in speeds.items() if one >= least), None)

    # --- candidates ----------------------------------------------------------------------------

    def windows(self, asked: Strategy, batch: int, sampling: Sampling) -> Estimate:
        """Return windows of the lengths that may be faster here, with what is known of them."""
        known = known_tokens_per_step(self.model.weights_hash, sampling.temperature, relaxed=False)
        brings: dict[int, float] = {}
        weight = USUAL_STEPS
        if known is not None:
            brings = known.by_head if self.guesses else known.tokens_per_step
            if abs(known.temperature - sampling.temperature) < SAME_TEMPERATURE:
                weight = KNOWN_STEPS
        exact = asked.model_copy(update={"acceptance": Exact(), "tv_budget": None})
        made = exact.with_drafts(adaptive_window(AUTO_LENGTHS, "head" if self.guesses else "above"))
        if self.backend.simulated:  # its times are not a device's: steps are taken to cost alike
            even = (one.model_copy(update={"cost": 1.0}) for one in made.lengths)
            made = made.with_drafts(draft_lengths=tuple(even))
        one = Estimate(strategy=made, known=brings, weight=weight)
        costs = RowCosts.free(1) if self.backend.simulated else self.costs
        return self._of_lengths(one, costs, batch, sampling)

    def _of_lengths(
        self, windows: Estimate, costs: RowCosts, batch: int, sampling: Sampling
    ) -> Estimate:
        """Return windows of the lengths that may be faster by these costs and counts, and that fit."""
        tokens = self.model.manifest.target.num_tokens
        brings = known_worth(windows.known)
        lengths = auto_lengths(costs, batch * sampling.branches, batch, tokens, brings)
        have = {one.length: one for one in windows.strategy.lengths}
        while True:
            drafts = adaptive_window(lengths)
            made = tuple(
                have.get(one.length, one).model_copy(update={"tokens_per_step": brings[one.length]})
                for one in drafts.draft_lengths
            )
            strategy = windows.strategy.with_drafts(length=drafts.length, draft_lengths=made)
            shorter = drafts.length <= AUTO_LENGTHS[-1]
            if shorter or self.engines.capacity.fits(batch, strategy, sampling):
                known = {n: brings[n] for n in lengths}
                return windows.model_copy(update={"strategy": strategy, "known": known})
            lengths = lengths[:-1]

    def lengthened(self, windows: Estimate, batch: int, sampling: Sampling) -> Estimate:
        """Return windows that were timed with longer ones, where these may be faster by these times.

        A step is taken to cost as the timed ones do, and more on their line. Not on a device that
        compiles for minutes: they stay as they are.
        """
        if len(windows.times) < 2 or self.backend.preferences.capture_patience < math.inf:
            return windows
        rows = batch * sampling.branches
        costs = RowCosts.of_times({rows * n: ms for n, ms in windows.times.items()})
        brings = {one.length: one.tokens_per_step or 1.0 for one in windows.strategy.lengths}
        counted = windows.model_copy(update={"known": brings})
        found = self._of_lengths(counted, costs, batch, sampling)
        if found.strategy.lengths[-1].length <= windows.strategy.lengths[-1].length:
            return windows
        return found.model_copy(update={"known": known_worth(windows.known)})

    def tree(self, asked: Strategy) -> Strategy | None:
        """Return the drafter's default tree where relaxation is asked for; None where none may serve."""
        if self.model.drafter is None or not asked.acceptance.relaxed:
            return None
        tree = self.manifest.defaults.static_tree
        depth = tree.size[1]
        if depth + 1 > self.model.manifest.target.num_tokens:
            return None
        lengths = sorted({1, -(-depth // 2) + 1, depth + 1})
        return asked.with_drafts(tree, draft_lengths=tuple(DraftLength(length=n) for n in lengths))

    def copies(self, asked: Strategy) -> Strategy | None:
        """Return drafts by a copy of the target that may serve in a window's place; None where none may.

        Only where the device reads a copy in less time, and weights decide what a step takes; nothing is
        drafted where relaxation is asked for, or by the papers' coupling.
        """
        weights = sum(part.weight.numel() for part in projections(self.model.target))
        # In this order: a device that checks its kernels first checks none for a small model.
        pays = weights >= LEAST_WEIGHTS and self.backend.preferences.reads_fewer_bits
        if not pays or asked.acceptance.relaxed or self.model.rounding is not None:
            return None
        tokens = self.model.manifest.target.num_tokens
        tree = self_drafted([length for length in AUTO_SELF if length <= tokens])
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

        def holds(tree: SelfDrafts) -> bool:
            return self.engines.capacity.holds(usual.with_drafts(tree))

        tokens = self.model.manifest.target.num_tokens
        found = likely_copies(times, rows, timed, tokens, holds, windows.times.get(1))
        return [usual.with_drafts(one.tree) for one in found if one.speedup >= ENOUGH]

    # --- choosing ------------------------------------------------------------------------------

    def comparison(self, asked: Strategy, batch: int, sampling: Sampling) -> Comparison | None:
        """Return what auto compares for a batch; None: nothing yet, or its choice is final."""
        kept = self.choice(asked, batch, sampling)
        if kept is None or kept.source == "tune":
            return None
        found = Comparison.model_validate(kept.evidence)
        return found if found.open else None

    def choose(self, asked: Strategy, batch: int, sampling: Sampling, begun: Begun) -> Strategy:
        """Return what auto decodes a request with, whose prompt steps are timed on where they must be.

        ``begun`` starts the request on the engine of a source.
        """
        kept, found = self.choice(asked, batch, sampling), self.comparison(asked, batch, sampling)
        if not self.backend.simulated and (kept is None or found is not None):
            held, load, began = self.engines.capacity.copies, HostLoad(), time.monotonic()
            if found is None:
                with waiting("measuring which drafts are faster here, once", _LOG):
                    found = self._compared(asked, batch, sampling, begun)
            else:
                found = self._compared_again(found, batch, begun)
            self.others, self.seconds = load.share(), self.seconds + time.monotonic() - began
            if found is not None:
                self.settle(found, asked, batch, sampling)
                if kept is not None:
                    held -= copies_of(kept.strategy)
                held |= copies_of(self.resolve(asked, batch, sampling))
                self.engines.keep_copies(held)
        return self.resolve(asked, batch, sampling)

    def _compared(
        self, asked: Strategy, batch: int, sampling: Sampling, begun: Begun
    ) -> Comparison | None:
        """Time what may draft; None: the device has not captured all steps of windows yet."""
        windows = self._timed(self.windows(asked, batch, sampling), begun)
        if windows is None:
            return None
        windows = windows.weighed(windows.times[1])
        longer = self.lengthened(windows, batch, sampling)
        if longer is not windows:
            windows = self._timed(longer, begun) or windows
            windows = windows.weighed(windows.times[1])
        sources, tree = [windows], self.tree(asked)
        others = self.likely_copies(asked, windows, batch, sampling)
        for one in others if tree is None else [tree]:
            timed = self._timed(Estimate(strategy=one), begun)
            sources += [] if timed is None else [timed]
        return Comparison(sources=tuple(sources))

    def _compared_again(self, found: Comparison, batch: int, begun: Begun) -> Comparison:
        """Time once more what may yet prove best, by the copies that are there."""
        held = self.engines.capacity.copies
        sources = []
        for one in found.sources:
            again = found.near(one, batch) and copies_of(one.strategy) <= held
            timed = self._timed(one, begun, again=True) if again else None
            sources.append(timed or one)
        update = {"sources": tuple(sources), "requests": found.requests + 1}
        return found.model_copy(update=update)

    def _timed(self, one: Estimate, begun: Begun, again: bool = False) -> Estimate | None:
        """Time the steps of a source, and count its drafts for a few where they settle at once.

        None: it does not fit the memory, or the device has not captured all of its steps yet.
        """
        found = begun(one.strategy)
        if found is None:
            return None
        engine, begin = found[0].engine, found[1]
        if engine.usable is not None:
            return None
        begin()
        watch = self.backend.stopwatch
        least = (ROUNDS_AGAIN, AGAIN_MS) if again else ()
        one = one.with_times(calibrate(engine, watch, *least))
        if one.known and not engine.geometry.guesses:
            return one
        lengths = [p for p in one.weighed(one.times[1]).strategy.lengths if p.cost is not None]
        length = lengths[-1].length
        if one.known:  # the one that is most likely taken
            best = max(lengths, key=lambda p: (p.tokens_per_step or 1.0) / (p.cost or 1.0))
            length = best.length
        if length > 1:
            begin()
            most = COPY_STEPS if copies_of(one.strategy) else DRAFTER_STEPS
            steps = max(1, min(most, (engine.geometry.tokens - 1) // length))
            one = one.with_counts({length: count(engine, length, steps)})
        return one

    def describe(self, asked: Strategy, batch: int, sampling: Sampling, used: str) -> str:
        """Return ``used``, what auto decoded with, and what made its timing doubtful, if that is so."""
        if isinstance(self.others, str) or self.others < BUSY:
            return used
        cores = os.cpu_count() or 1
        again = self.comparison(asked, batch, sampling) is not None
        return (
            f"{used}; chosen on a busy machine, where other programs used {self.others * cores:.1f} of "
            f"{cores} cores" + ("; the next images measure again" if again else "")
        )

    def settle(self, found: Comparison, asked: Strategy, batch: int, sampling: Sampling) -> None:
        """Keep what is predicted to be fastest of what was timed, or plain decoding, and why."""
        found = found.weighed()
        best = found.best(batch)
        speedup, strategy = best.promise(batch), best.strategy
        if speedup < ENOUGH:
            speedup, strategy = 1.0, _plainly(asked)
        self.keep(
            Choice(
                key=self.key(asked, batch, sampling),
                strategy=strategy,
                speedup=speedup,
                source="while generating",
                evidence=found.model_dump(mode="json"),
            )
        )

    def learn(self, engine: Engine, asked: Strategy, batch: int, sampling: Sampling) -> None:
        """Count the accepted drafts of a batch, in the first requests of a kind, and choose again."""
        found = None if asked.name != AUTO else self.comparison(asked, batch, sampling)
        if found is not None and engine.counted:
            made = found.counted(engine.strategy, engine.counted)
            self.settle(made, asked, batch, sampling)


def _plainly(strategy: Strategy) -> Strategy:
    """Return plain decoding in a strategy's name: nothing is drafted, so that nothing is relaxed."""
    update = {"drafts": NoTree(), "acceptance": Exact(), "tv_budget": None}
    return strategy.model_copy(update=update)
