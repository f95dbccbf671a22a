"""Chooses what a batch is decoded with: by what tuning kept for this device, or by timing a few steps.

The first request of a kind times steps on its own prompts, and counts drafts that are accepted.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
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
from lantern_accel.generation.engines import Engines, copies_of
from lantern_accel.generation.estimate import ENOUGH, Estimate
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
from lantern_accel.strategy.lengths import in_batch, tokens_at_one_rate
from lantern_accel.strategy.rules import Exact
from lantern_accel.strategy.sources import DraftLength
from lantern_accel.strategy.values import (
    AUTO,
    AUTO_CHAIN,
    AUTO_LENGTHS,
    AUTO_SELF,
    ChainTree,
    NoTree,
    Sampling,
    SelfDrafts,
    Strategy,
    Window,
)

_LOG = logging.getLogger("lantern_accel.generation")
#: Weights from which on reading them decides a step, so that a quantized copy may be a fast drafter.
LEAST_WEIGHTS = 1 << 23
#: Steps over which drafts that settle at once are counted: those of a draft head or drafter, and of a
#: copy.
DRAFTER_STEPS, COPY_STEPS = 48, 12
#: Requests that time the candidates of their kind at most: one, or more while other programs use the
#: machine.
REQUESTS = 4
#: Rounds and milliseconds at least that a later one takes, and the share of the best predicted speed that
#: a source needs for it.
AGAIN, NEAR = (1, 250.0), 0.7
#: Batch sizes that may be advised, the predicted gain that one needs, and the share of the best speed.
BATCHES, CLEARLY, BATCH_NEARLY = (2, 4, 8, 16, 32), 1.3, 0.8
#: From a strategy, its engine with a request started on it; None: it does not fit the memory.
Begun = Callable[[Strategy], Engine | None]


class Auto:
    """Chooses for one loaded model on one device."""

    def __init__(self, engines: Engines) -> None:
        self.engines = engines
        self.model, self.backend = engines.model, engines.backend
        self._known: dict[str, Choice | None] = {}
        #: Seconds of timing so far, and what makes the last one doubtful, to be said of its choice.
        self.seconds, self.doubt = 0.0, ""

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
        write_choice(choice)

    def tuned(self, strategy: Strategy, batch: int, sampling: Sampling) -> Strategy:
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
            return self.windows(strategy, batch, sampling)
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
        brings, tokens = known_worth(seen), self.model.manifest.target.num_tokens
        rows = batch * sampling.branches
        lengths = auto_lengths(costs or self.costs, rows, batch, tokens, brings)
        if self.backend.preferences.compiles:
            lengths = (1, window_tokens(self.costs, rows, batch, lengths[-1]))[: len(lengths)]
        exact = asked.model_copy(update={"acceptance": Exact(), "tv_budget": None})
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
        return asked.with_drafts(ChainTree.over(lengths)) if len(lengths) > 1 else None

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
        return [usual.with_drafts(one.tree) for one in found if one.speedup >= ENOUGH]

    # --- choosing ------------------------------------------------------------------------------

    def choose(self, asked: Strategy, batch: int, sampling: Sampling, begun: Begun) -> Strategy:
        """Return what auto decodes a request with, whose prompt steps are timed on where they must be.

        ``begun`` starts the request on the engine of a source, each time that it is called.
        """
        kept = self.choice(asked, batch, sampling)
        if not self.backend.simulated and (kept is None or kept.again):
            held, load, began = self.engines.capacity.copies, HostLoad(), time.monotonic()
            with waiting("measuring which drafts are faster here, once", _LOG):
                if kept is None:
                    found = self._compared(asked, batch, sampling, begun)
                else:
                    found = self._compared_again(kept, batch, begun)
            others, self.seconds = load.share(), self.seconds + time.monotonic() - began
            again, self.doubt = 0, ""
            if not isinstance(others, str) and others >= BUSY:
                again, cores = (REQUESTS if kept is None else kept.again) - 1, os.cpu_count() or 1
                self.doubt = (
                    "; chosen on a busy machine, where other programs used "
                    f"{others * cores:.1f} of {cores} cores"
                    + ("; the next images measure again" if again else "")
                )
            if found:
                self.settle(found, asked, batch, sampling, again)
                if kept is not None:
                    held -= copies_of(kept.strategy)
                held |= copies_of(self.resolve(asked, batch, sampling))
                self.engines.keep_copies(held)
        return self.resolve(asked, batch, sampling)

    def _compared(
        self, asked: Strategy, batch: int, sampling: Sampling, begun: Begun
    ) -> list[Estimate]:
        """Time what may draft, longer windows where those may be faster; []: it does not fit."""
        windows = self._timed(self.windows(asked, batch, sampling), begun)
        if windows is None:
            return []
        if len(windows.times) > 1 and not self.backend.preferences.compiles:
            rows = batch * sampling.branches
            costs = RowCosts.of_times({rows * n: ms for n, ms in windows.times.items()})
            longer = self.windows(asked, batch, sampling, costs)
            if longer.drafts.size > windows.strategy.drafts.size:
                windows = self._timed(longer, begun) or windows
        chain = self.chain(asked)
        others = [chain] if chain else self.likely_copies(asked, windows, batch, sampling)
        timed = (self._timed(one, begun) for one in others)
        return [windows, *(one for one in timed if one is not None)]

    def _compared_again(self, kept: Choice, batch: int, begun: Begun) -> list[Estimate]:
        """Time once more what may yet prove best, by the copies that are there."""
        found = [Estimate.model_validate(one) for one in kept.evidence["timed"]]
        least = NEAR * max(ENOUGH, *(one.promise(batch) for one in found))
        held = self.engines.capacity.copies
        return [
            (self._timed(one.strategy, begun, one.times) or one)
            if one.promise(batch) >= least and copies_of(one.strategy) <= held
            else one
            for one in found
        ]

    def _timed(
        self, strategy: Strategy, begun: Begun, before: Mapping[int, float] | None = None
    ) -> Estimate | None:
        """Time the steps of a source, and count its drafts for a few where nothing is known of them.

        ``before``: the least times so far, in milliseconds by length. None: it does not fit the memory.
        """
        engine = begun(strategy)
        if engine is None:
            return None
        times = calibrate(engine, self.backend.stopwatch, *(AGAIN if before else ()))
        for length, ms in (before or {}).items():
            times.setdefault(length, []).append(ms)
        length, tokens = max(times), dict[int, float]()
        if length > 1 and strategy.lengths[-1].tokens_per_step is None:
            begun(strategy)
            most = COPY_STEPS if copies_of(strategy) else DRAFTER_STEPS
            steps = max(1, min(most, (engine.geometry.tokens - 1) // length))
            gained, spent = count(engine, length, steps)
            every = (one.length for one in strategy.lengths)
            tokens = tokens_at_one_rate(gained / spent, length, every)
        return Estimate.of(strategy, times, tokens)

    def settle(
        self, found: Sequence[Estimate], asked: Strategy, batch: int, sampling: Sampling, again: int
    ) -> None:
        """Keep what is predicted to be fastest of what was timed, or plain decoding, and why.

        ``again``: how many later requests time it again.
        """
        plain = min(one.times[1] for one in found)
        weighed = [one.weighed(plain) for one in found]
        best = max(weighed, key=lambda one: one.promise(batch))
        speedup, strategy = best.promise(batch), best.strategy
        if speedup < ENOUGH:
            speedup, strategy = 1.0, _plainly(asked)
        self.keep(
            Choice(
                key=self.key(asked, batch, sampling),
                strategy=strategy,
                speedup=speedup,
                source="while generating",
                evidence={"timed": [one.model_dump(mode="json") for one in weighed]},
                again=again,
            )
        )


def _plainly(strategy: Strategy) -> Strategy:
    """Return plain decoding in a strategy's name: nothing is drafted, so that nothing is relaxed."""
    update = {"drafts": NoTree(), "acceptance": Exact(), "tv_budget": None}
    return strategy.model_copy(update=update)
