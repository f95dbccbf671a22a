"""Decodes without a drafter: a window of drafts that the target improves step by step.

Speculative Jacobi decoding (SJD, arXiv 2410.01699; SCD, 2510.24211; SJD-PAC). A step is one pass over
the window: ``verify -> accept -> commit``, and fresh drafts at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lantern_accel.decoding.base import EngineBase
from lantern_accel.decoding.buckets import usual
from lantern_accel.decoding.draft_init import DraftInitializer
from lantern_accel.decoding.fused import FusedSteps
from lantern_accel.decoding.geometry import cache_layouts, check
from lantern_accel.decoding.maximal_coupling import Coupled
from lantern_accel.decoding.siblings import Siblings
from lantern_accel.decoding.sources.window import (
    InvariantWindow,
    MaximalWindow,
    WindowDrafts,
    WindowSetting,
)
from lantern_accel.decoding.target import Target, above_of, place_of, row_of
from lantern_accel.decoding.verify import Verifying
from lantern_accel.decoding.window import Ring, WindowGeometry, WindowPass, WindowState
from lantern_accel.device.operations import KVCache, TensorOps
from lantern_accel.device.plan import Window as PlannedWindow
from lantern_accel.errors import StrategyError
from lantern_accel.strategy.trees import tree_size
from lantern_accel.strategy.values import DraftSource, Sampling, Strategy, Window


class JacobiEngine(EngineBase):
    """Decodes ``batch`` images a call in windows, on static buffers.

    Raises :class:`StrategyError` for a window that is longer than the image, and where a relaxed rule
    lacks its neighbour table.
    """

    geometry: WindowGeometry
    state: WindowState
    window: Window
    ring: Ring
    longest_window: int
    """The longest window on these buffers."""
    drafts: WindowDrafts
    """How drafts are made and judged."""
    settles = True

    def __init__(
        self,
        target: Target,
        ops: TensorOps,
        strategy: Strategy,
        sampling: Sampling,
        *,
        batch: int = 1,
        neighbours: Tensor | None = None,
        longest: JacobiEngine | None = None,
        cache: KVCache | None = None,
    ) -> None:
        """``longest``: an engine of a longer window, whose buffers this one steps on.

        A window of one token is plain decoding.
        ``cache``: another engine's, of as many slots, to read and write in place of one of its own.
        """
        window, config = strategy.tree, target.config
        assert isinstance(window, Window)
        tokens, row = config.num_tokens, row_of(config)
        if window.length > tokens:
            raise StrategyError(
                f"the window has {window.length} tokens, but an image has {tokens}; choose a shorter one"
            )
        check(strategy, sampling, config.vocab_size)
        self.strategy, self.sampling, self.ops = strategy, sampling, ops
        self.window = window
        _, device = place_of(target)
        allowed = target.allowed()
        keyed = strategy.invariant or sampling.greedy
        ahead = window.length - 1
        self.fresh = DraftInitializer(
            window.fresh,
            ahead,
            tokens,
            row,
            config.vocab_size,
            allowed,
            ops.index,
            device,
            above_of(config),
        )
        # Greedily a draft is compared with the highest logit: no distribution, and no sibling.
        counts = () if sampling.greedy else window.siblings
        self.siblings = Siblings(counts, ops.index, device)
        self.longest_window = window.length if longest is None else longest.longest_window
        self.geometry = g = WindowGeometry(
            batch=batch,
            branches=sampling.branches,
            prefix=config.prefix_length,
            tokens=tokens,
            nodes=window.length + self.siblings.total,
            depth=tree_size(window)[1],
            scratch=0,
            vocab=config.vocab_size,
            dim=config.dim,
            own_prompts=target.own_prompts,
            keyed=keyed,
            siblings=self.siblings.total,
            kept=self._kept(keyed),
            widest=self.siblings.widest,
            passes=self._passes(keyed),
        )
        if longest is None:
            self._own(target, neighbours, cache)
        else:
            self._step_on(longest)
            self.ring = longest.ring
        self.forward = WindowPass(self.verifying, g, counts)
        self._counts = counts
        self.divide(usual(g, self.verifying.cache.layout, ops))
        self.ahead = torch.arange(1, window.length + 1, dtype=ops.index, device=device)
        #: What a step may gain, by the columns of the histogram, which the longest window has made.
        self.counts = torch.arange(1, self.longest_window + 1, dtype=ops.index, device=device)
        self.drafts = (InvariantWindow if keyed else MaximalWindow)(
            WindowSetting(
                self, window, g, self.state, self.ring, self.fresh, self.siblings,
                self.forward.depths, self.ahead, self.longest_window,
            )
        )  # fmt: skip
        #: A whole step, or what follows a pass, where the device does that at once.
        self.fused = FusedSteps(ops, self.plan(g, self.planned(), self.forward.reach))

    def shorter(self, source: DraftSource) -> JacobiEngine:
        one = self.strategy.model_copy(update={"tree": source})
        batch, target = self.geometry.batch, self.verifying.target
        return JacobiEngine(target, self.ops, one, self.sampling, batch=batch, longest=self)

    def _kept(self, keyed: bool) -> int:
        """Return how many positions' distributions are kept."""
        fresh, most = self.fresh, self.longest_window
        reach = max(fresh.reach, fresh.width if self.siblings.total else 1)
        if keyed and not self.siblings.total:
            follows = fresh.reads and not fresh.copies and not self.sampling.greedy
            return min(most + reach, fresh.tokens) if follows else 0
        return 0 if self.sampling.greedy else min(2 * most + reach, fresh.tokens)

    def _passes(self, keyed: bool) -> int:
        """Return how many passes are recalled."""
        if self.sampling.greedy and self.strategy.acceptance.relaxed:
            return 0
        recalls = keyed or self.window.tail == "coupled"
        return self.window.passes if recalls else 0

    def _own(self, target: Target, neighbours: Tensor | None, cache: KVCache | None) -> None:
        """Make the buffers that every window of one state steps on."""
        g, ops = self.geometry, self.ops
        _, device = place_of(target)
        guidance = self._prepare(target, neighbours)
        layout, _ = cache_layouts(g, target, None, ops)
        self.verifying = Verifying(target, ops, cache or ops.allocate(layout), g, guidance)
        ahead = 2 * self.window.length
        self.ring = Ring(max(g.kept, 1), g.tokens, ahead, g.batch, ops, device)
        self.state = WindowState(g, target.condition_buffer(g.rows), ops.index, device)
        self._watch()

    def planned(self) -> PlannedWindow:
        """Describe where drafts come from, and the buffers that are theirs."""
        g, state, fresh = self.geometry, self.state, self.fresh
        maximal = self.drafts if isinstance(self.drafts, MaximalWindow) else None
        noted = g.passes > 0
        return PlannedWindow(
            fresh=fresh.kind,
            width=fresh.width,
            anew=self.window.tail == "anew",
            siblings=self.siblings.counts,
            passes=g.passes,
            kept=g.kept,
            recalled=0 if maximal is None else maximal.looked_up,
            fresh_column=0 if maximal is None else maximal.fresh_column,
            newest=state.newest,
            place=self.ring.place,
            q=state.q if g.kept else None,
            row_keys=state.row_keys if noted else None,
            row_previous=state.row_previous if noted else None,
            row_tokens=state.row_tokens if noted and g.keyed else None,
            row_probs=state.row_probs if noted and not g.keyed else None,
            above=fresh.up,
            code_kind=fresh.kinds,
            open_codes=fresh.open,
        )

    def prefill(self) -> None:
        """Run the prompt, draw the first token and fresh drafts. No value is read by the host."""
        state = self.state
        _, logits = self.verifying.prefill(state)
        self.begin(logits)
        if self.geometry.depth:
            self.drafts.draft(state.length, back=1)

    def begin(self, logits: Tensor) -> None:
        """Take the first token of guided ``logits [B, V]``, and keep what it was drawn from."""
        token, row = self.first(logits)
        if self.geometry.kept:
            self.ring.write(self.state.q, self.verifying.first.unsqueeze(1), row.unsqueeze(1))
        self.state.tokens[:, 0].copy_(token)
        self.state.step.fill_(1)

    def moves(self) -> dict[str, Callable[[], None]]:
        return {"widen": self.widen} if self.geometry.depth else {}

    def widen(self) -> None:
        """Draw the fresh drafts that this window needs after steps of a shorter one."""
        self.drafts.draft(self.state.newest, back=1)

    def divide(self, sizes: Sequence[int]) -> None:
        super().divide(sizes)
        smaller = self.sizes[:-1]
        self.passes = {
            n: WindowPass(self.verifying, self.geometry, self._counts, n) for n in smaller
        }

    def step(self, slots: int | None = None) -> None:
        """One step over the window: verify, accept, commit. No value is read by the host.

        ``slots``: how many of the cache it looks at (:attr:`sizes`); None: all.
        """
        if slots is None and self.fuses and self.fused.step():
            return
        state, g = self.state, self.geometry
        forward = self.forward if slots is None else self.passes.get(slots, self.forward)
        chain = state.length.unsqueeze(1)
        if g.depth:
            chain = chain + self.forward.chain
        x = state.tokens.gather(1, chain.clamp(max=g.tokens) if g.depth else chain)
        with self.ops.phase("draft"):
            others = None if self.fused.after is not None else self.drafts.propose(x[:, 1:], chain)
        with self.ops.phase("verify"):
            nodes = x if others is None else torch.cat((x, others[0]), dim=1)
            logits = forward.logits(state.length, state.start, state.prefix_mask, nodes)
        with self.ops.phase("accept"):
            if self.fused.follow(logits):
                return
            coupled = self.drafts.decide(x, chain, logits, others)
        with self.ops.phase("commit"):
            self._commit(coupled)
            self.finite.end()

    def _commit(self, coupled: Coupled) -> None:
        """Write tokens and counters, and draw fresh drafts; complete images stay as they are."""
        state, g = self.state, self.geometry
        positions = state.length.unsqueeze(1) + self.ahead
        state.tokens.scatter_(1, positions.clamp(max=g.tokens), coupled.tokens)
        # A longer window may have seen more before this one.
        newest = torch.maximum(state.newest, positions[:, -1])
        state.newest.copy_(newest)
        if g.depth:
            self.drafts.draft(newest)
        open_ = state.length < g.tokens - 1
        length = (state.length + coupled.count).clamp(max=g.tokens - 1)
        gained = length - state.length
        entry = self.forward.chain
        # Drafts past the end of the image are dropped, and counted nowhere; a complete one gains nothing.
        state.histogram.add_(self.counts == gained.unsqueeze(1))
        state.steps.add_(open_)
        if self.rule.relaxed and coupled.price is not None:
            unused = entry[:-1] >= gained.unsqueeze(1)
            state.price.add_(coupled.price.masked_fill(unused, 0).sum(dim=1))
        state.last_length.copy_(gained - 1)
        state.length.copy_(length)
        state.step.add_(1)
