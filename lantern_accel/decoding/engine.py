"""Decodes with trees of drafts: static buffers, and the step that reads like the papers.

``prefill -> [draft -> verify -> accept -> commit] -> tokens``. One engine serves one batch size, one
strategy and one set of sampling settings; calls with other prompts reuse all of its buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from lantern_accel.decoding.accept import Accepted, accept
from lantern_accel.decoding.base import Decoded, EngineBase
from lantern_accel.decoding.buckets import usual
from lantern_accel.decoding.commit import commit
from lantern_accel.decoding.fused import FusedSteps
from lantern_accel.decoding.geometry import cache_layouts, geometry_of
from lantern_accel.decoding.greedy import accept_greedy
from lantern_accel.decoding.invariant import accept_invariant
from lantern_accel.decoding.logits import distribution
from lantern_accel.decoding.pricing import path_prices
from lantern_accel.decoding.rows import Guidance
from lantern_accel.decoding.sources import none as none
from lantern_accel.decoding.sources.base import Drafts, Setting, drafts_of
from lantern_accel.decoding.sources.drafter import Drafting
from lantern_accel.decoding.state import State
from lantern_accel.decoding.target import Drafter, Target, place_of
from lantern_accel.decoding.trees import DraftTree
from lantern_accel.decoding.verify import Verifying
from lantern_accel.device.operations import KVCache, TensorOps
from lantern_accel.strategy.values import DraftSource, Sampling, Strategy

__all__ = ["Decoded", "Engine"]


class Engine(EngineBase):
    """Decodes ``batch`` images a call on static buffers.

    Raises :class:`StrategyError` where the strategy needs a drafter or a neighbour table that is not
    there, or a tree that is deeper than the image has tokens.
    """

    source: Drafts[Any]
    state: State
    returns = False  # the drafter does not follow plain steps
    untimed = 0
    scattered = False
    """Whether longer steps on these buffers leave tokens in slots of other numbers."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        ops: TensorOps,
        strategy: Strategy,
        sampling: Sampling,
        *,
        batch: int = 1,
        neighbours: Tensor | None = None,
        longest: Engine | None = None,
    ) -> None:
        """``longest``: an engine of more drafts, whose buffers this one steps on."""
        self.geometry = g = geometry_of(target, drafter, strategy, sampling, batch)
        self.strategy, self.sampling, self.ops = strategy, sampling, ops
        dtype, device = place_of(target)
        if longest is not None:
            self._share(longest, drafter)
            return
        guidance = self._prepare(target, neighbours)
        layout, drafter_layout = cache_layouts(g, target, drafter, ops)
        self.state = State(g, target.condition_buffer(g.rows), dtype, ops.index, device)
        self._watch()
        cache = None if drafter_layout is None else ops.allocate(drafter_layout)
        drafter = drafter if cache is not None else None
        self._draft_with(target, drafter, cache, guidance)
        taps: Sequence[int] = () if drafter is None else drafter.taps
        open_pads = drafter is not None and not (drafter.config.mask_padding or g.own_prompts)
        cache = ops.allocate(layout)
        self.verifying = Verifying(target, ops, cache, g, guidance, taps, open_pads)
        self._divide_and_plan()

    def _draft_with(
        self, target: Target, drafter: Drafter | None, cache: KVCache | None, guidance: Guidance
    ) -> None:
        """Make the drafts of the strategy's source."""
        given: Setting[DraftSource] = Setting(
            self.strategy.tree,
            self.geometry,
            target,
            self.ops,
            self.choices,
            guidance,
            drafter,
            cache,
        )
        self.source = drafts_of(given)
        self.drafting = self.source if isinstance(self.source, Drafting) else None

    def _share(self, longest: Engine, drafter: Drafter | None) -> None:
        """Step on the buffers of an engine of more drafts, with this one's tree."""
        self._step_on(longest)
        one, v = longest.geometry, longest.verifying
        # A chain's tokens lie in the slots of their own numbers; those of a tree, among its nodes'.
        spread = 0 if one.nodes == one.depth + 1 else one.nodes
        self.scattered = spread > 0
        self.geometry = g = replace(
            self.geometry,
            scratch=one.scratch,
            draft_columns=one.draft_columns,
            spread=spread if self.geometry.depth else 0,
        )
        own = longest.drafting if g.drafted else None
        taps = () if own is None else v.taps
        cache = None if own is None else own.cache
        self._draft_with(v.target, drafter if g.drafted else None, cache, v.guidance)
        self.verifying = Verifying(v.target, self.ops, v.cache, g, v.guidance, taps, v.open_pads)
        self._divide_and_plan()

    def shorter(self, source: DraftSource) -> Engine:
        drafter = None if self.drafting is None else self.drafting.drafter
        one = self.strategy.model_copy(update={"tree": source})
        batch, target = self.geometry.batch, self.verifying.target
        return Engine(target, drafter, self.ops, one, self.sampling, batch=batch, longest=self)

    def moves(self) -> dict[str, Callable[[], None]]:
        plain = not self.geometry.depth
        return {"gather": self.gather} if plain and self.scattered else {}

    def gather(self) -> None:
        """Move keys and values to the slots of their positions' numbers, where plain steps look."""
        state, v, g = self.state, self.verifying, self.geometry
        rows, slots = v.branches.rows, state.slot_of
        own = v.slots[: slots.shape[1]].expand_as(slots)
        order, address = rows(slots + g.prefix), self.ops.address(v.cache, rows(own + g.prefix))
        for layer in range(v.cache.layout.layers):
            keys, values = self.ops.read(v.cache, layer, order)
            self.ops.write(v.cache, layer, address, keys, values)
        state.slot_of.copy_(own)
        state.place_of.copy_(own)

    def _divide_and_plan(self) -> None:
        g, ops = self.geometry, self.ops
        self.divide(usual(g, self.verifying.cache.layout, ops))
        # In plain decoding every token keeps its slot; the one more is for what is past the image.
        slots = g.target_slots if g.depth else g.prefix + g.tokens + 1
        #: A whole step where the device does that at once.
        self.fused = FusedSteps(ops, self.plan(g, self.source.planned(self.state), slots))

    def prefill(self) -> None:
        """Run the prompt and draw the first token. No value is read by the host."""
        state = self.state
        features, logits = self.verifying.prefill(state)
        root, _ = self.first(logits)
        state.root.copy_(root)
        state.tokens[:, 0].copy_(root)
        state.step.fill_(1)
        self.source.begin(state, features)

    def step(self, slots: int | None = None) -> None:
        """One LANTERN step: draft, verify, accept, commit. No value is read by the host.

        ``slots``: how many of the target's cache it looks at (:attr:`sizes`); None: all.
        """
        if slots is None and self.fuses and self.fused.step():
            return
        state = self.state
        uniforms = self._uniforms()
        with self.ops.phase("draft"):
            tree = self._draft(uniforms)
        with self.ops.phase("verify"):
            features, logits = self.verifying.verify(state, tree, slots)
        with self.ops.phase("accept"):
            accepted = self._accept(tree, logits, uniforms)
        with self.ops.phase("commit"):
            commit(self.verifying, state, tree, features, accepted, self.source)
            self.finite.end()

    def _uniforms(self) -> Tensor | None:
        """Return this step's uniforms ``[B, columns]``; None where keys decide."""
        g, state = self.geometry, self.state
        if g.keyed:
            return None
        now = state.step.clamp(max=g.tokens - 1)
        here: Tensor = state.uniforms.index_select(1, now).squeeze(1)
        return here

    def _draft(self, uniforms: Tensor | None) -> DraftTree:
        known = self.source.tables is not None
        window = self.verifying.window(self.state) if known else None
        return self.source.draft(self.state, uniforms, window)

    def _accept(self, tree: DraftTree, logits: Tensor, uniforms: Tensor | None) -> Accepted:
        self.finite.note(logits, logits=True)
        if self.greedy and self.rule.relaxed:
            return accept_greedy(tree, logits, self.rule)
        if uniforms is None:
            return accept_invariant(tree, logits, self.choices, self.state.length)
        first, masked = self.geometry.draft_columns, self.verifying.guidance.allowed is not None
        tests, bonus = uniforms[:, first : first + self.geometry.test_columns], uniforms[:, -1]
        accepted = accept(tree, logits, self.filters, self.rule, tests, bonus, masked=masked)
        if self.accounting == "exact" and self.rule.relaxed:
            official = self.rule.residual == "official" and masked
            allowed = logits > float("-inf") if official else None
            probs = distribution(logits, self.filters)
            price = path_prices(
                tree, probs, self.rule, tests, accepted.path, accepted.length, allowed
            )
            accepted = replace(accepted, price=price)
        return accepted
