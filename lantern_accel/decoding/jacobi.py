"""The engine without a drafter: a window of drafts that the target improves step by step.

Speculative Jacobi decoding (SJD, arXiv 2410.01699; SCD, 2510.24211; SJD-PAC). A step is one pass over
the window: ``verify -> accept -> commit``, and fresh drafts at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lantern_accel.decoding.at_once import AtOnce
from lantern_accel.decoding.buckets import usual
from lantern_accel.decoding.coupling import Coupled, compare, couple, gumbel
from lantern_accel.decoding.dials import Dials
from lantern_accel.decoding.fresh import Freshness
from lantern_accel.decoding.geometry import cache_layouts, check
from lantern_accel.decoding.logits import Filters, distribution
from lantern_accel.decoding.pricing import window_prices
from lantern_accel.decoding.recall import Recall
from lantern_accel.decoding.rows import Guidance
from lantern_accel.decoding.rule import Rule
from lantern_accel.decoding.running import Running
from lantern_accel.decoding.siblings import Siblings, Tried
from lantern_accel.decoding.target import Target, above_of, place_of, row_of
from lantern_accel.decoding.verify import Verifying
from lantern_accel.decoding.window import Ring, WindowGeometry, WindowPass, WindowState
from lantern_accel.device.operations import TensorOps
from lantern_accel.errors import StrategyError
from lantern_accel.strategy.trees import tree_size
from lantern_accel.strategy.values import Sampling, Strategy, Window

#: Shares of a sibling's own distribution, its left neighbour's and the one above it, by measurement
#: (docs/jacobi.md); their sum does not matter.
SIBLING_SHARES = (1.0, 2.0, 1.0)


class JacobiEngine(Running):
    """Decodes ``batch`` images a call in windows, on static buffers.

    Raises :class:`StrategyError` for a window that is longer than the image, and where a relaxed rule
    lacks its neighbour table.
    """

    geometry: WindowGeometry
    filters: Filters
    rule: Rule
    ring: Ring

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
    ) -> None:
        """``longest``: an engine of a longer window, whose buffers this one steps on."""
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
        #: Whether Gumbel noise decides: the uniforms are then one a code, a row a position.
        self.noisy = window.tail == "gumbel" and not sampling.greedy
        ahead = window.length - 1
        self.fresh = Freshness(
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
        passes = 0 if sampling.greedy or window.tail != "coupled" else window.passes
        reach = max(self.fresh.reach, self.fresh.width if counts else 1)
        most = window.length if longest is None else longest.window.length
        kept = min(2 * most + reach, tokens)
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
            siblings=self.siblings.total,
            kept=0 if sampling.greedy else kept,
            widest=self.siblings.widest,
            noisy=self.noisy,
            passes=passes,
        )
        if longest is None:
            self._own(target, neighbours)
        else:
            self.dials, self.filters, self.rule = longest.dials, longest.filters, longest.rule
            self.verifying, self.ring, self.state = longest.verifying, longest.ring, longest.state
            self.sound, self._progress = longest.sound, longest._progress
            self.greedy = longest.greedy
        self.forward = WindowPass(self.verifying, g, counts)
        self._counts = counts
        self.divide(usual(g, self.verifying.cache.layout, ops))
        self.recall = None
        if passes:
            self.recall = Recall(
                passes,
                window.length,
                tokens,
                config.vocab_size,
                ops.index,
                device,
                ops,
                self.filters.draws,
            )
        self.looked_up = 0 if self.recall is None else len(self.recall.slots)
        #: Tests, fresh drafts, siblings drawn, siblings tested, draws: the bonus's is the last.
        self._columns = (most - 1, most - 1, self.siblings.total, self.siblings.widest, most)
        self.fresh_column = most - 1
        self.ahead = torch.arange(1, window.length + 1, dtype=ops.index, device=device)
        #: What a step may gain, by the columns of the histogram, which the longest window has made.
        self.counts = torch.arange(1, most + 1, dtype=ops.index, device=device)
        #: A whole step, or what follows a pass, where the device does that at once.
        self.at_once = AtOnce(ops, self, self.verifying, window.length, self.forward.reach)
        self.advance = self.at_once.advance

    def _own(self, target: Target, neighbours: Tensor | None) -> None:
        """Make the buffers that every window of one state steps on."""
        g, strategy, sampling, ops = self.geometry, self.strategy, self.sampling, self.ops
        _, device = place_of(target)
        self.dials = Dials(strategy, sampling, g.tokens, device)
        sums = ops.running_sums(g.vocab, device)
        self.filters = Filters(sampling, self.dials.temperature, self.dials.top_p, ops, sums)
        self.rule = self._rule(neighbours, device)
        image_scale = None if sampling.cfg_scale_image is None else self.dials.image_scale
        scale = self.dials.scale if sampling.guided else None
        guidance = Guidance(scale, image_scale, target.allowed(), ops)
        layout, _ = cache_layouts(g, target, None, ops)
        self.verifying = Verifying(target, ops, ops.allocate(layout), g, guidance)
        ahead = 2 * self.window.length
        self.ring = Ring(max(g.kept, 1), g.tokens, ahead, g.batch, ops, device)
        self.state = WindowState(g, target.condition_buffer(g.rows), ops.index, device)
        self._watch()

    def prefill(self) -> None:
        """Run the prompt, draw the first token and fresh drafts. No value is read by the host."""
        state = self.state
        _, logits = self.verifying.prefill(state)
        uniforms = state.uniforms[:, 0]
        state.tokens[:, 0].copy_(self._first(logits, uniforms))
        state.step.fill_(1)
        self._draft(state.length, uniforms)

    def _first(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        if self.greedy:
            self.sound.begin(logits)
            return logits.argmax(dim=-1).to(self.ops.index)
        weights = distribution(logits, self.filters)
        self.sound.begin(weights)
        self.ring.write(self.state.q, self.state.length.unsqueeze(1), weights.unsqueeze(1))
        if self.noisy:
            return (weights.log() + gumbel(uniforms)).argmax(dim=-1).to(self.ops.index)
        return self.filters.draws.draw(weights, uniforms[:, -1])

    def _draft(self, newest: Tensor, uniforms: Tensor) -> None:
        """Draw fresh drafts for the positions behind ``newest [B]``, the last that a pass has seen."""
        state, n, fresh = self.state, self.geometry.tokens, self.fresh
        targets = fresh.targets(newest)
        places = targets.clamp(max=n)
        left, above = fresh.sources(newest)
        if self.greedy:
            if fresh.kind not in ("uniform", "code"):
                near = left if fresh.kind.startswith("left") else above
                state.tokens.scatter_(1, places, state.tokens.gather(1, near))
            return
        rows = fresh.rows(self._given(left, above), targets)
        if self.noisy:
            drawn = (rows.log() + self._noise(targets)).argmax(dim=-1).to(self.ops.index)
        else:
            first = self.fresh_column
            here = uniforms[:, first : first + targets.shape[1]]
            drawn = self.filters.draws.draw(rows, here)
        state.tokens.scatter_(1, places, drawn)
        if fresh.certain:
            rows = torch.zeros_like(rows).scatter(-1, drawn.unsqueeze(-1), 1.0)
        self.ring.write(state.q, targets, rows)

    def _given(self, left: Tensor, above: Tensor) -> Tensor | None:
        """Return what fresh drafts' sources say, ``[B, T, V]``; None where any code will do."""
        state, kind = self.state, self.fresh.kind
        if kind in ("uniform", "code"):
            return None
        near = left if kind.startswith("left") else above
        if self.fresh.certain:
            codes = state.tokens.gather(1, near).unsqueeze(-1)
            nothing = torch.zeros(*near.shape, self.geometry.vocab, device=near.device)
            return nothing.scatter(-1, codes, 1.0)
        given = self.ring.read(state.q, near)
        if kind in ("left", "above"):
            return given
        return self.fresh.blend(self.ring.read(state.q, left), given)

    def widen(self) -> None:
        """Draw the fresh drafts that this window needs after steps of a shorter one."""
        now = (self.state.step - 1).clamp(max=self.geometry.tokens - 1)
        uniforms = self.state.uniforms.index_select(1, now).squeeze(1)
        self._draft(self.state.newest, uniforms)

    def _noise(self, positions: Tensor) -> Tensor:
        """Return the Gumbel noise of positions ``[B, T]``, float32 ``[B, T, V]``."""
        g = self.geometry
        first = torch.arange(g.batch, dtype=self.ops.index, device=positions.device) * g.tokens
        rows = positions.clamp(max=g.tokens - 1) + first.unsqueeze(1)
        flat = self.state.uniforms.flatten(0, 1).index_select(0, rows.flatten())
        return gumbel(flat.view(*positions.shape, -1))

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
        if slots is None and self.at_once():
            return
        state, g = self.state, self.geometry
        forward = self.forward if slots is None else self.passes.get(slots, self.forward)
        now = state.step.clamp(max=g.tokens - 1)
        uniforms = state.uniforms.index_select(1, now).squeeze(1)
        chain = state.length.unsqueeze(1) + self.forward.chain
        x = state.tokens.gather(1, chain.clamp(max=g.tokens))
        q = others = shares = None
        with self.ops.phase("draft"):
            drawn = not self.greedy and not self.noisy
            if self.advance is None and drawn:
                q = self.ring.read(state.q, chain[:, 1:])
                others, shares = self._siblings(x, q, uniforms)
        with self.ops.phase("verify"):
            nodes = x if others is None else torch.cat((x, others), dim=1)
            logits = forward.logits(state.length, state.start, state.prefix_mask, nodes)
        with self.ops.phase("accept"):
            if self.advance is not None:
                if self.advance(logits):
                    return
                q = self.ring.read(state.q, chain[:, 1:])
            coupled = self._accept(x, logits, q, others, shares, uniforms)
        with self.ops.phase("commit"):
            self._commit(coupled, uniforms)
            self.sound.end()

    def _siblings(
        self, x: Tensor, q: Tensor | None, uniforms: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Draw siblings; return them and what they were drawn from, None where there are none."""
        if not self.siblings.total or q is None:
            return None, None
        first = sum(self._columns[:2])
        deep = len(self.siblings.counts)
        drawn = uniforms[:, first : first + self.siblings.total]
        rows = self._others(q)
        return self.siblings.draft(x[:, 1 : 1 + deep], rows, drawn, self.filters.draws), rows

    def _others(self, q: Tensor) -> Tensor:
        """Return what the siblings of the first drafts are drawn from, ``[B, D, V]``, of any sum.

        Where a draft is refused its own distribution was a bad guess, most often because it was made
        for another token on the left. So that token's own distribution is mixed in, and the one above.
        """
        deep = len(self.siblings.counts)
        newest = self.state.length
        own = q[:, :deep]
        left = self.ring.read(self.state.q, newest.unsqueeze(1) + self.forward.chain[:deep])
        places = self.fresh.above(newest.unsqueeze(1) + self.ahead[:deep])
        places = torch.where(places < 0, newest.unsqueeze(1), places).clamp(min=0)
        above = self.ring.read(self.state.q, places)
        one, two, three = SIBLING_SHARES
        rows = one * own + two * left + three * above
        kind = newest.unsqueeze(1) + self.ahead[:deep]
        return self.fresh.rows(rows, kind)

    def _accept(
        self,
        window: Tensor,
        logits: Tensor,
        q: Tensor | None,
        others: Tensor | None,
        shares: Tensor | None,
        uniforms: Tensor,
    ) -> Coupled:
        """Decide, and keep the distributions of what is drafted for the next step."""
        state, x = self.state, window[:, 1:]
        if self.greedy:
            self.sound.note(logits)
            return compare(x, logits, self.rule)
        positions = state.length.unsqueeze(1) + self.ahead
        p = distribution(logits, self.filters)
        self.sound.note(p)
        length = self.window.length
        chain = p[:, :length]
        self.ring.write(state.q, positions, chain)
        if q is None:
            return compare(x, chain.log() + self._noise(positions), self.rule)
        tests, draws = uniforms[:, : length - 1], uniforms[:, -length:]
        coupled = couple(
            x, chain, q, self.rule, tests, draws, anew=self.window.tail == "anew", ops=self.ops,
            siblings=others is not None, drawing=self.filters.draws,
        )  # fmt: skip
        if self.accounting == "exact" and self.rule.relaxed:
            price = window_prices(x, chain, q, self.rule, tests, coupled.count)
            coupled = replace(coupled, price=price)
        taken = None
        if others is not None and shares is not None:
            tried = self._try(x, coupled, others, shares, p[:, length:], uniforms)
            coupled = Coupled(tried.tokens, coupled.count, coupled.price)
            taken = tried.taken
        if self.recall is None:
            return coupled
        found = self.recall.refine(
            state, window, chain, q, coupled.tokens, coupled.count, tests, draws, taken
        )
        self.recall.write(state, window, chain)
        self.ring.write(state.q, found.places, found.rows)
        return Coupled(found.tokens, coupled.count, coupled.price)

    def _try(
        self,
        x: Tensor,
        coupled: Coupled,
        others: Tensor,
        shares: Tensor,
        after: Tensor,
        uniforms: Tensor,
    ) -> Tried:
        """Try siblings of the first refused draft; keep what the token after one was drawn from."""
        assert coupled.left is not None
        state, length = self.state, self.window.length
        first, deep = sum(self._columns[:3]), len(self.siblings.counts)
        refused = coupled.count - 1
        tried = self.siblings.attempt(
            others,
            x[:, :deep],
            shares,
            coupled.left,
            refused,
            coupled.tokens,
            after,
            uniforms[:, first : first + self.siblings.widest],
            uniforms[:, -length:],
            self.filters.draws,
        )
        place = state.length + 2 + refused
        place = torch.where(tried.taken, place, self.geometry.tokens)
        self.ring.write(state.q, place.unsqueeze(1), tried.row.unsqueeze(1))
        return tried

    def _commit(self, coupled: Coupled, uniforms: Tensor) -> None:
        """Write tokens and counters, and draw fresh drafts; complete images stay as they are."""
        state, g = self.state, self.geometry
        positions = state.length.unsqueeze(1) + self.ahead
        state.tokens.scatter_(1, positions.clamp(max=g.tokens), coupled.tokens)
        # A longer window may have seen more before this one.
        newest = torch.maximum(state.newest, state.length + self.window.length)
        state.newest.copy_(newest)
        self._draft(newest, uniforms)
        open_ = state.length < g.tokens - 1
        length = (state.length + coupled.count).clamp(max=g.tokens - 1)
        gained = length - state.length
        entry = self.forward.chain
        # Drafts past the end of the image are dropped, and counted nowhere; a complete one gains nothing.
        state.histogram.add_(self.counts == gained.unsqueeze(1))
        state.steps.add_(open_)
        if self.rule.relaxed:
            unused = entry[:-1] >= gained.unsqueeze(1)
            state.price.add_(coupled.price.masked_fill(unused, 0).sum(dim=1))
        state.last_length.copy_(gained - 1)
        state.length.copy_(length)
        state.step.add_(1)
