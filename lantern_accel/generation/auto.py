"""Chooses what a batch is decoded with: by what tuning kept for this device, or by timing a few steps.

A choice that `lantern-accel tune` left is used as it is. Without one the first request of its kind times
a few steps of every window length on its own prompt, before it draws. What promises most is timed again
between the first images, whose drafts are counted; then the choice is kept. Exact drafts change no image:
a seed gives the same one whatever was chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any, Literal

import torch

from lantern_accel.decoding.adaptive import AdaptiveEngine
from lantern_accel.decoding.length_policy import (
    SURE,
    in_batch,
    usual_tokens_per_step,
    with_costs,
)
from lantern_accel.device.backend import Backend
from lantern_accel.families.base import Model
from lantern_accel.generation.comparison import ENOUGH, TIMED_AFTER, Comparison
from lantern_accel.generation.copies import (
    DRAFTS,
    USUAL_RATES,
    ProductTimes,
    likely_copies,
    own_windows,
    product_times,
)
from lantern_accel.generation.row_costs import (
    TOKENS,
    RowCosts,
    auto_lengths,
    known_worth,
    row_costs,
    tree_of,
    window_tokens,
)
from lantern_accel.generation.timed import DRAFTER_STEPS, PRIOR_STEPS, Timed
from lantern_accel.nn.transformer import projections
from lantern_accel.strategy.choices import (
    Choice,
    key_of,
    known_tokens_per_step,
    read_choice,
    warn_of_stale,
    write_choice,
)
from lantern_accel.strategy.rules import Exact
from lantern_accel.strategy.sources import AdaptiveSource, DraftLength
from lantern_accel.strategy.values import (
    AUTO,
    AUTO_CHAINS,
    AUTO_LENGTHS,
    AUTO_SELF,
    ChainTree,
    NoTree,
    Sampling,
    SelfDrafts,
    StaticTree,
    Strategy,
    Window,
    adaptive_chain,
    adaptive_window,
    self_drafted,
    with_tokens_per_step,
)

#: Weights from which on reading them decides a step, so that a copy in fewer bits may pay as a drafter.
LEAST_WEIGHTS = 1 << 23
#: Steps after which the acceptance of a copy's drafts is a first figure.
COUNTED_STEPS = 12
#: Rounds of steps that are timed between images, and milliseconds at least: less than before the first.
ROUNDS_AGAIN, AGAIN_MS = 1, 250.0
#: A deeper tree is not cut at every depth: each is one more step for a device to capture.
MOST_DEPTHS = 4
#: Temperatures that are no further apart have drafts of one worth; of others less is known.
SAME_TEMPERATURE = 0.05


class Auto:
    """Chooses for one loaded model on one device."""

    def __init__(self, model: Model, backend: Backend, dtype: torch.dtype) -> None:
        self.model, self.backend, self.dtype = model, backend, dtype
        #: Whether the device has the memory for what a strategy drafts with.
        self.holds: Callable[[Strategy], bool] = lambda strategy: True
        #: Whether it has the memory for the buffers of a strategy at a batch.
        self.fits: Callable[[Strategy, int, Sampling], bool] = lambda *given: True
        self._known: dict[str, Choice | None] = {}

    @cached_property
    def costs(self) -> RowCosts:
        """What rows of a pass cost here."""
        return row_costs(self.model, self.backend, self.dtype)

    @cached_property
    def manifest(self) -> Any:
        """The model's manifest, with default trees that are no larger than this device's costs favour."""
        manifest = self.model.manifest
        if self.model.drafter is None:
            return manifest
        defaults, branches = manifest.defaults, manifest.defaults.sampling.branches
        trees = {
            name: tree_of(self.costs, branches, getattr(defaults, name))
            for name in ("static_tree", "dynamic_tree")
        }
        return manifest.model_copy(update={"defaults": defaults.model_copy(update=trees)})

    def key(self, strategy: Strategy, batch: int, sampling: Sampling) -> dict[str, Any]:
        """Return everything that a choice for auto, or a tuned window, depends on."""
        return key_of(
            "auto" if strategy.name == AUTO else "window",
            self.model,
            self.backend,
            self.dtype,
            strategy,
            strategy=strategy.name,
            batch=batch,
            temperature=round(sampling.temperature, 1),
            filters=[sampling.branches, sampling.top_k, sampling.top_p < 1, sampling.order],
            budget=strategy.tv_budget,
            invariant=strategy.invariant,
            lengths=[list(TOKENS), list(AUTO_CHAINS), [*DRAFTS, *USUAL_RATES]],
            timed_after=list(TIMED_AFTER),
            draft_head=self.guesses,
            tree=self.manifest.defaults.static_tree.name if self.model.drafter else None,
        )

    @property
    def guesses(self) -> bool:
        """Whether a draft head drafts in auto's windows."""
        return getattr(self.model.target, "draft_head", None) is not None

    def tree_key(self, strategy: Strategy, temperature: float) -> dict[str, Any]:
        """Return everything that a tuned tree depends on."""
        return key_of(
            "tree",
            self.model,
            self.backend,
            self.dtype,
            strategy,
            greedy=temperature == 0,
            residual=strategy.residual,
        )

    def tuned(self, strategy: Strategy, temperature: float) -> Strategy:
        """Return the strategy over the tree that ``lantern-accel tune`` found for this device, if any.

        Only the default tree is replaced: a tree that was asked for stays. Warns where a tree
        was found under another version.
        """
        if strategy.drafts != self.manifest.defaults.static_tree:
            return strategy
        key = self.tree_key(strategy, temperature)
        found = read_choice(key)
        if found is None:
            warn_of_stale(key)
        return strategy if found is None else strategy.override(tree=found.strategy.drafts)

    def window(self, strategy: Strategy, batch: int, sampling: Sampling) -> Strategy:
        """Return a strategy with the window that was tuned for a batch, or else a usual one."""
        found = read_choice(self.key(strategy, batch, sampling))
        if found is not None:
            return strategy.override(tree=found.strategy.drafts)
        tree = strategy.drafts
        if not isinstance(tree, Window) or tree.draft_lengths:
            return strategy
        length = window_tokens(self.costs, batch * sampling.branches, batch, tree.length)
        return strategy if length == tree.length else strategy.override(window=length)

    def resolve(self, strategy: Strategy, batch: int, sampling: Sampling) -> Strategy:
        """Return what auto stands for at this batch; any other strategy as it is."""
        if strategy.name != AUTO:
            return strategy
        found = self.choice(strategy, batch, sampling)
        if found is not None and not (found.strategy.needs_drafter and self.model.drafter is None):
            if self.holds(found.strategy):
                return found.strategy
            return _plainly(found.strategy)
        assert isinstance(strategy.drafts, Window)
        # Windows are exact, also where a drafter's drafts may be relaxed.
        window, head = strategy.drafts, self.guesses
        worth = known_tokens_per_step(self.model.weights_hash, sampling.temperature, relaxed=False)
        known = {} if worth is None else worth.by_head if head else worth.tokens_per_step
        exact = strategy.model_copy(update={"acceptance": Exact(), "tv_budget": None})
        update: dict[str, Any] = {"fresh": "head" if head else window.fresh}
        if self.backend.simulated:  # its times are no device's: steps are taken to cost alike
            even = (one.model_copy(update={"cost": 1.0}) for one in window.draft_lengths)
            update["draft_lengths"] = with_tokens_per_step(tuple(even), known)
            return exact.model_copy(update={"drafts": window.model_copy(update=update)})
        asked = exact.model_copy(update={"drafts": window.model_copy(update=update)})
        return self._windows(asked, self.costs, batch, sampling, known)

    def _windows(
        self,
        strategy: Strategy,
        costs: RowCosts,
        batch: int,
        sampling: Sampling,
        known: Mapping[int, float],
    ) -> Strategy:
        """Return a strategy with windows of the lengths that may pay by these costs, where they fit.

        ``known``: tokens per step by length; none: as usual.
        """
        window: Any = strategy.drafts
        tokens = self.model.manifest.target.num_tokens
        lengths = auto_lengths(costs, batch * sampling.branches, batch, tokens, known)
        worth = known_worth(known) if known else {}
        while True:
            made = adaptive_window(lengths).draft_lengths
            update = {"length": lengths[-1], "draft_lengths": with_tokens_per_step(made, worth)}
            found = strategy.model_copy(update={"drafts": window.model_copy(update=update)})
            if lengths[-1] <= AUTO_LENGTHS[-1] or self.fits(found, batch, sampling):
                return found
            lengths = lengths[:-1]

    def lengthened(self, one: Timed, batch: int, sampling: Sampling) -> Timed:
        """Return windows that were timed with longer ones, where these may pay by what was counted.

        A step is taken to cost as the timed ones do, and more on their line. Not on a device that
        compiles for minutes: it stays as it was.
        """
        tree: Any = one.strategy.drafts
        rows = batch * sampling.branches
        if (
            not isinstance(tree, Window)
            or len(one.times) < 2
            or self.backend.capture_patience < math.inf
        ):
            return one
        costs = RowCosts.of_times({rows * n: ms for n, ms in one.times.items()})
        known = {p.length: p.tokens_per_step for p in tree.draft_lengths if p.tokens_per_step}
        made: Any = self._windows(one.strategy, costs, batch, sampling, known).drafts
        more = tuple(p for p in made.draft_lengths if p.length > tree.length)
        if not more:
            return one
        prior = {p.length: p.tokens_per_step for p in more} if one.prior else {}
        lengths = {"length": more[-1].length, "draft_lengths": (*tree.draft_lengths, *more)}
        strategy = one.strategy.model_copy(update={"drafts": tree.model_copy(update=lengths)})
        return one.model_copy(update={"strategy": strategy, "prior": {**one.prior, **prior}})

    def choice(self, strategy: Strategy, batch: int, sampling: Sampling) -> Choice | None:
        """Return what is kept for this batch and these settings; None: nothing yet."""
        key = self.key(strategy, batch, sampling)
        name = repr(key)
        if self._known.get(name) is None:
            self._known[name] = read_choice(key)
        return self._known[name]

    def chains(self, asked: Strategy, sampling: Sampling) -> Strategy | None:
        """Return the drafter's chains that may serve in a window's place; None where there are none.

        Only where it is known what they are worth: counting that takes more than a few steps.
        """
        relaxed, drafter = asked.acceptance.relaxed, self.model.drafter
        worth = known_tokens_per_step(self.model.weights_hash, sampling.temperature, relaxed)
        if drafter is None or worth is None or not worth.chains:
            return None
        tree = adaptive_chain(AUTO_CHAINS)
        tree = tree.model_copy(
            update={"draft_lengths": with_tokens_per_step(tree.draft_lengths, worth.chains)}
        )
        # Under a name of its own: auto stands for what is chosen.
        return asked.model_copy(update={"drafts": tree, "name": "chains"})

    def trees(self, asked: Strategy) -> Strategy | None:
        """Return the drafter's default tree, cut to several depths; None where there is no drafter.

        What it brings is counted: its shape is the device's.
        """
        if self.model.drafter is None:
            return None
        tree: StaticTree = self.manifest.defaults.static_tree
        depth = max(len(path) for path in tree.paths)
        if depth + 1 > self.model.manifest.target.num_tokens:
            return None
        every = range(1, depth + 2) if depth <= MOST_DEPTHS else (1, -(-depth // 2) + 1, depth + 1)
        lengths = tuple(DraftLength(length=length) for length in every)
        tree = tree.model_copy(update={"draft_lengths": lengths})
        return asked.model_copy(update={"drafts": tree, "name": "tree"})

    def copies(self, asked: Strategy) -> Strategy | None:
        """Return drafts by a copy of the target that may serve in a window's place; None where none may.

        Only where the device reads a copy in less time, and weights decide what a step takes; nothing is
        drafted where relaxation is asked for, or by the papers' coupling.
        """
        weights = sum(part.weight.numel() for part in projections(self.model.target))
        # In this order: a device that checks its kernels first checks none for a small model.
        pays = weights >= LEAST_WEIGHTS and self.backend.reads_fewer_bits
        if not pays or asked.acceptance.relaxed or self.model.rounding is not None:
            return None
        tokens = self.model.manifest.target.num_tokens
        tree = self_drafted([length for length in AUTO_SELF if length <= tokens])
        made = asked.model_copy(update={"drafts": tree, "name": "self"})
        return made if self.holds(made) else None

    def likely_copies(
        self, asked: Strategy, windows: Timed, batch: int, sampling: Sampling
    ) -> list[Strategy]:
        """Return the drafts that are worth trying, all by one copy; none where none promises enough.

        Predicted from what products with a part of the weights cost, before a copy is made. ``windows``:
        the target's, timed, which say what a check of so many drafts costs.
        """
        usual = self.copies(asked)
        if usual is None:
            return []
        rows = batch * sampling.branches
        tokens = self.model.manifest.target.num_tokens
        counts = [rows * n for n in own_windows(windows.draft_lengths)]
        times: ProductTimes = product_times(
            self.model.target, self.backend, self.dtype, counts, self.backend.stopwatch
        )

        def holds(tree: SelfDrafts) -> bool:
            return self.holds(usual.model_copy(update={"drafts": tree}))

        found = likely_copies(times, rows, windows.draft_lengths, tokens, holds, windows.plain)
        good = [one.tree for one in found if one.speedup >= ENOUGH]
        return [usual.model_copy(update={"drafts": tree}) for tree in good]

    def unsettled(self, engine: object, asked: Strategy, batch: int, sampling: Sampling) -> bool:
        """Return whether the steps of an engine are to be timed before auto can use it."""
        if asked.name != AUTO or not isinstance(engine, AdaptiveEngine) or self.backend.simulated:
            return False
        return self.choice(asked, batch, sampling) is None

    def timed(self, engine: AdaptiveEngine, begin: Callable[[], None]) -> Timed:
        """Time an engine's steps on a request, which must be started again.

        ``begin`` starts it. Drafts are counted, too, for a few steps, unless they take many to settle.
        """
        begin()
        times = engine.calibrate(self.backend.stopwatch)
        tree: Any = engine.strategy.drafts
        # All lengths stay, so that the engine that was made serves on; those without a cost never run.
        every = with_costs(tree.draft_lengths, times)
        draft_lengths = [one for one in every if one.cost is not None]
        counts: dict[int, list[int]] = {}
        prior: dict[int, float] = {}
        by_head, length = engine.geometry.guesses, max(one.length for one in draft_lengths)
        if by_head:  # which settles at once; at the length that is most likely taken
            usual = {p.length: p.tokens_per_step or engine.usual(p.length) for p in draft_lengths}
            length = max(draft_lengths, key=lambda p: usual[p.length] / (p.cost or 1.0)).length
        if length > 1 and (by_head or not isinstance(engine.strategy.drafts, Window)):
            begin()
            drafted = by_head or engine.strategy.needs_drafter
            most = DRAFTER_STEPS if drafted else COUNTED_STEPS
            steps = max(1, min(most, (engine.geometry.tokens - 1) // length))
            counts[length] = [*engine.count(length, steps)]
        if isinstance(tree, Window | ChainTree):
            usually = {one.length: usual_tokens_per_step(one.length) for one in every}
            every = with_tokens_per_step(every, usually)
            prior = {one.length: one.tokens_per_step for one in every if one.tokens_per_step}
        update = {"drafts": tree.model_copy(update={"draft_lengths": every}), "name": AUTO}
        made = engine.strategy.model_copy(update=update)
        sure = self._sureness(made, engine.sampling)
        one = Timed(strategy=made, counts=counts, prior=prior, sure=sure)
        return one.timed_again(times).weighed()

    def _sureness(self, strategy: Strategy, sampling: Sampling) -> float:
        """Return the steps for which what is known of drafts counts, once some are counted here."""
        relaxed, at = strategy.acceptance.relaxed, sampling.temperature
        worth = known_tokens_per_step(self.model.weights_hash, at, relaxed)
        same = worth is not None and abs(worth.temperature - at) < SAME_TEMPERATURE
        return PRIOR_STEPS if same else DRAFTER_STEPS

    def settle(self, found: Comparison, asked: Strategy, batch: int, sampling: Sampling) -> None:
        """Keep what promises most of what was :meth:`timed`, or plain decoding, and why."""
        found = found.level()
        best, evidence = found.best(batch), found.model_dump(mode="json")
        speedup, strategy = best.speed(batch), best.strategy
        if not found.pays(batch):
            speedup, strategy = 1.0, _plainly(asked)
            if found.ends or not found.near(batch):
                evidence = {}
        key = self.key(asked, batch, sampling)
        source: Literal["while drawing"] = "while drawing"
        self.keep(
            Choice(key=key, strategy=strategy, speedup=speedup, source=source, evidence=evidence)
        )

    def comparison(self, asked: Strategy, batch: int, sampling: Sampling) -> Comparison | None:
        """Return what auto compares for a batch; None: nothing yet, or its choice is final."""
        found = None if asked.name != AUTO else self.choice(asked, batch, sampling)
        if found is None or found.source != "while drawing" or not found.evidence:
            return None
        return Comparison.model_validate(found.evidence)

    def due(self, asked: Strategy, batch: int, sampling: Sampling) -> Comparison | None:
        """Return what is compared for a batch where steps are to be timed again; None: they are not."""
        found = None if self.backend.simulated else self.comparison(asked, batch, sampling)
        return found if found is not None and found.due else None

    def learn(self, engine: object, asked: Strategy, batch: int, sampling: Sampling) -> None:
        """Count the drafts of the last request in, for the first images of a kind, and choose again."""
        found = self.comparison(asked, batch, sampling)
        if found is None:
            return
        if isinstance(engine, AdaptiveEngine):
            news = found.count(engine.strategy, engine.counted, batch)
        else:  # plain decoding: the images count alone
            news = found.count(None, {}, batch)
        if news:
            self.settle(found, asked, batch, sampling)

    def keep(self, choice: Choice) -> None:
        """Use a choice from now on, and write it to the cache where there is one."""
        self._known[repr(choice.key)] = choice
        with suppress(OSError):  # a cache that cannot be written: this process alone knows it
            write_choice(choice)


def prune_lengths(strategy: Strategy, draft_lengths: tuple[DraftLength, ...]) -> Window:
    """Return a strategy's window with only the lengths that could ever pay, the shortest always.

    A length goes where a step costs more than the most that its drafts can bring.
    """
    assert isinstance(strategy.drafts, Window)
    kept = tuple(p for p in draft_lengths if p.length == 1 or (p.cost or 1.0) < p.length)
    if len(kept) == 1:  # plain decoding alone: a window has two tokens at least, and is never used
        kept = draft_lengths[:2]
    return strategy.drafts.model_copy(update={"length": kept[-1].length, "draft_lengths": kept})


def _plainly(strategy: Strategy) -> Strategy:
    """Return plain decoding in a strategy's name: nothing is drafted, so that nothing is relaxed."""
    update = {"drafts": NoTree(), "acceptance": Exact(), "tv_budget": None}
    return strategy.model_copy(update=update)


def describe_auto(strategy: Strategy, images: int = 1) -> str:
    """Write what auto stands for in a few words, with the predicted speed-up where costs are known.

    ``images``: in a batch.
    """
    rule = "relaxed" if strategy.acceptance.relaxed else "exact"
    tree = strategy.drafts
    plain = f"plain decoding ({rule}): no draft pays here at this batch"
    if isinstance(tree, NoTree):
        return plain
    if not isinstance(tree, AdaptiveSource) or not tree.draft_lengths:
        return f"{strategy.name} ({rule})"
    timed = [one for one in tree.draft_lengths if one.cost is not None]
    longest = (timed or list(tree.draft_lengths))[-1].length
    what, own = f"windows of up to {longest} tokens", 0
    if isinstance(tree, Window) and tree.fresh == "head":
        what += " by its draft head"
    if isinstance(tree, ChainTree):
        what, own = f"chains of up to {longest - 1} drafts", 1
    elif isinstance(tree, StaticTree):
        what, own = f"trees of {len(tree.paths)} drafts, up to {longest - 1} deep", 1
    elif isinstance(tree, SelfDrafts):
        what, own = f"up to {longest - 1} drafts of the model's own weights in {tree.weights}", 1
    if not timed:
        return f"{what} ({rule})"
    promises = {p: in_batch(p.tokens_per_step or 1.0, images) / (p.cost or 1.0) for p in timed}
    best = max(timed, key=lambda one: promises[one])
    speed = promises[best]
    if best.length == 1 or speed < SURE:
        return plain
    return f"{what}, mostly {best.length - own} ({rule}); predicted {speed:.1f}x, not measured"
