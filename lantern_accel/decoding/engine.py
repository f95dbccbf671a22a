"""The engine: static buffers, and the step that reads like the papers.

``prefill -> [draft -> verify -> accept -> commit] -> tokens``. One engine serves one batch size, one
strategy and one set of sampling settings; calls with other prompts reuse all of its buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from lantern_accel.decoding.accept import Accepted, accept
from lantern_accel.decoding.buckets import usual
from lantern_accel.decoding.commit import commit
from lantern_accel.decoding.dials import Dials
from lantern_accel.decoding.draft import Drafting
from lantern_accel.decoding.fused import FusedSteps, source_of
from lantern_accel.decoding.geometry import cache_layouts, geometry_of, tables_of
from lantern_accel.decoding.greedy import accept_greedy
from lantern_accel.decoding.invariant import accept_invariant
from lantern_accel.decoding.logits import Filters, distribution
from lantern_accel.decoding.pricing import path_prices
from lantern_accel.decoding.rows import Guidance
from lantern_accel.decoding.running import Decoded, Running
from lantern_accel.decoding.state import State
from lantern_accel.decoding.target import Drafter, Target, place_of
from lantern_accel.decoding.trees import DraftTree
from lantern_accel.decoding.verify import Verifying
from lantern_accel.device.operations import TensorOps
from lantern_accel.strategy.values import DynamicTree, Sampling, Strategy

__all__ = ["Decoded", "Engine"]


class Engine(Running):
    """Decodes ``batch`` images a call on static buffers.

    Raises :class:`StrategyError` where the strategy needs a drafter or a neighbour table that is not
    there, or a tree that is deeper than the image has tokens.
    """

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
        """``longest``: an engine of a longer chain, whose buffers this one steps on."""
        self.geometry = g = geometry_of(target, drafter, strategy, sampling, batch)
        self.strategy, self.sampling, self.ops = strategy, sampling, ops
        dtype, device = place_of(target)
        if longest is not None:
            self._share(longest, drafter)
            return
        self.dials = Dials(strategy, sampling, g.tokens, device)
        sums = ops.running_sums(g.vocab, device)
        self.filters = Filters(sampling, self.dials.temperature, self.dials.top_p, ops, sums=sums)
        self.rule = self._rule(neighbours, device)
        image_scale = None if sampling.cfg_scale_image is None else self.dials.image_scale
        guidance = Guidance(
            self.dials.scale if sampling.guided else None, image_scale, target.allowed(), ops
        )
        tables = tables_of(strategy.tree)
        layout, drafter_layout = cache_layouts(g, target, drafter, ops)
        self.state = State(g, target.condition_buffer(g.rows), dtype, ops.index, device)
        self._watch()
        taps: Sequence[int] = ()
        if drafter is not None and drafter_layout is not None:
            taps = drafter.taps
            dynamic = strategy.tree if isinstance(strategy.tree, DynamicTree) else None
            cache = ops.allocate(drafter_layout)
            self.drafting = Drafting(
                drafter, target, ops, cache, g, self.choices, guidance, tables, dynamic
            )
        open_pads = drafter is not None and not (drafter.config.mask_padding or g.own_prompts)
        open_pads = open_pads and strategy.needs_drafter
        cache = ops.allocate(layout)
        self.verifying = Verifying(target, ops, cache, g, guidance, taps, open_pads)
        self._root_only = None if tables is None else tables.topology(batch, device, ops.index)
        self._divide_and_plan()

    def _share(self, longest: Engine, drafter: Drafter | None) -> None:
        """Step on the buffers of an engine of a longer chain, with this one's tree."""
        one = longest.geometry
        g = replace(self.geometry, scratch=one.scratch, draft_columns=one.draft_columns)
        self.geometry, self.dials, self.filters = g, longest.dials, longest.filters
        self.rule, self.state, self.sound = longest.rule, longest.state, longest.sound
        self._progress, self.greedy, self.choices = (
            longest._progress,
            longest.greedy,
            longest.choices,
        )
        v, ops, tables = longest.verifying, self.ops, tables_of(self.strategy.tree)
        taps: Sequence[int] = ()
        if g.depth:
            assert drafter is not None and longest.drafting is not None
            taps, cache = v.taps, longest.drafting.cache
            self.drafting = Drafting(
                drafter, v.target, ops, cache, g, self.choices, v.guidance, tables, None
            )
        self.verifying = Verifying(v.target, ops, v.cache, g, v.guidance, taps, v.open_pads)
        assert tables is not None
        self._root_only = tables.topology(g.batch, v.slots.device, ops.index)
        self._divide_and_plan()

    def _divide_and_plan(self) -> None:
        g, ops = self.geometry, self.ops
        self.divide(usual(g, self.verifying.cache.layout, ops))
        # In plain decoding every token keeps its slot; the one more is for what is past the image.
        slots = g.target_slots if self.drafting is not None else g.prefix + g.tokens + 1
        source = source_of(self.state, self.drafting)
        #: A whole step where the device does that at once.
        self.fused = FusedSteps(ops, self.plan(g, source, slots))

    def prefill(self) -> None:
        """Run the prompt and draw the first token. No value is read by the host."""
        state = self.state
        features, logits = self.verifying.prefill(state)
        weights = logits if self.greedy else distribution(logits, self.filters)
        if self.greedy:
            root = logits.argmax(dim=-1).to(self.ops.index)
        elif self.geometry.keyed:
            first = self.verifying.first.unsqueeze(1)
            root = self.choices.of(weights.unsqueeze(1), first).squeeze(1)
        else:
            root = self.filters.draws.draw(weights, state.uniforms[:, 0, -1])
        self.sound.begin(weights)
        state.root.copy_(root)
        state.tokens[:, 0].copy_(root)
        state.step.fill_(1)
        if self.drafting is not None:
            self.drafting.prefill(state, features)
            state.pending_tokens[:, 0].copy_(root)
            state.pending_features[:, 0].copy_(features[:, -1])
            state.pending_count.fill_(1)

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
            commit(self.verifying, state, tree, features, accepted)
            self.sound.end()

    def _uniforms(self) -> Tensor | None:
        """Return this step's uniforms ``[B, columns]``; None where keys decide."""
        g, state = self.geometry, self.state
        if g.keyed:
            return None
        now = state.step.clamp(max=g.tokens - 1)
        here: Tensor = state.uniforms.index_select(1, now).squeeze(1)
        return here

    def _draft(self, uniforms: Tensor | None) -> DraftTree:
        if self.drafting is not None:
            static = self.drafting.tables is not None
            window = self.verifying.window(self.state) if static else None
            return self.drafting.draft(self.state, uniforms, window)
        assert self._root_only is not None
        return DraftTree(tokens=self.state.root.unsqueeze(1), max_children=(), **self._root_only)

    def _accept(self, tree: DraftTree, logits: Tensor, uniforms: Tensor | None) -> Accepted:
        self.sound.note(logits, logits=True)
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
