"""Drafts in a window: the model's own earlier guesses, one row of them behind the last known token.

Speculative Jacobi decoding: a step is one pass over the window, and fresh drafts at its end. Where the
seed decides every token (:class:`InvariantWindow`), a draft is any guess, kept where it is the token
chosen; behind a rejected one an earlier pass that saw the same past knows better (SCD-GS, arXiv
2510.24211; the recall is this project's). Under the coupling ``maximal`` (:class:`MaximalWindow`)
drafts are tested and replaced by uniforms, as SJD was published (2410.01699).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from lantern_accel.decoding.draft_init import GIVEN, DraftInitializer, row_width
from lantern_accel.decoding.drafts import DraftContext, DraftSource, Sizing, Value
from lantern_accel.decoding.geometry import Geometry
from lantern_accel.decoding.logits import distribution
from lantern_accel.decoding.maximal_coupling import Coupled, couple, leading
from lantern_accel.decoding.state import State, Zeros
from lantern_accel.device import plan
from lantern_accel.device.operations import TensorOps
from lantern_accel.device.sampling import SamplingOps
from lantern_accel.strategy.sources import Fresh, Window


class WindowState(State):
    """The state of steps in which everything lies at its position of the image.

    ``length`` is the last known token, whose keys and values the next pass writes; behind it ``tokens``
    has drafts. ``newest [B]``: the last position that a pass has predicted. ``q`` float32 ``[B, K + 1,
    V]``: the distributions of positions, a ring of K and a trash row. ``row_keys`` integer ``[B, M,
    L]`` of the last M passes: which position each row is of and which token it followed, as one number;
    ``row_previous``: the token before that; ``row_tokens``: the token that the pass chose. ``feature``
    float32 ``[B, D]``: the last exact state, which a draft head guesses from.
    """

    def _own(self, g: Geometry, zeros: Zeros, ints: Zeros, dtype: torch.dtype) -> None:
        self.newest = ints(g.batch)
        self.q = zeros(g.batch, g.kept + 1, g.vocab) if g.kept else zeros(0)
        held = (g.batch, g.passes, g.depth + 1) if g.passes else (0, 0, 0)
        self.row_keys, self.row_previous, self.row_tokens = (ints(*held) for _ in range(3))
        self.feature = zeros(g.batch, g.dim) if g.guesses else zeros(0)

    def rewind(self, position: int, pending: int) -> None:
        super().rewind(position, pending)
        self.newest.fill_(position)  # what is known there does not change the time


class Ring:
    """Finds the rows of :attr:`.WindowState.q` that belong to positions; past the image is trash."""

    def __init__(self, g: Geometry, ops: TensorOps, device: torch.device) -> None:
        kept = max(g.kept, 1)
        place = torch.arange(g.tokens + 2 * g.nodes, dtype=ops.index, device=device) % kept
        place[g.tokens :] = kept
        self.place, self.ops = place, ops
        first = torch.arange(g.batch, dtype=ops.index, device=device)
        self.first = first.unsqueeze(1) * (kept + 1)

    def _rows(self, positions: Tensor) -> Tensor:
        place = self.place.index_select(0, positions.flatten()).view(positions.shape)
        return (place + self.first).flatten()

    def read(self, q: Tensor, positions: Tensor) -> Tensor:
        """Return the distributions ``[B, T, V]`` of positions ``[B, T]``."""
        flat = q.flatten(0, 1).index_select(0, self._rows(positions))
        return flat.view(*positions.shape, -1)

    def write(self, q: Tensor, positions: Tensor, values: Tensor) -> None:
        """Store the distributions ``[B, T, V]`` of positions ``[B, T]``."""
        self.ops.put(q, 0, self._rows(positions), values.flatten(0, 1))


class RowCache:
    """Finds what one of the last passes chose behind the same past (this project's)."""

    def __init__(self, g: Geometry, device: torch.device, ops: TensorOps) -> None:
        self.passes, self.vocab, self.ops = g.passes, g.vocab, ops
        self.ahead = torch.arange(g.nodes, dtype=ops.index, device=device)
        self.order = torch.arange(g.passes, dtype=ops.index, device=device)

    def find(
        self, state: WindowState, places: Tensor, left: Tensor, earlier: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return what was chosen for positions ``places [B, S]``, and whether anything was.

        Integer and bool ``[B, S]``. ``left``: the token on the left of each, ``earlier``: the one before
        that. The latest pass comes first, and before it one in which the earlier token agrees too.
        """
        wide = state.row_keys.shape[2]
        # Read now: their writes need less than what is compared with them.
        rows = (state.row_keys, state.row_previous, state.row_tokens)
        keys, previous, chosen = (self.ops.snapshot(t).flatten(1).unsqueeze(1) for t in rows)
        hit = keys == (places * self.vocab + left).unsqueeze(-1)
        age = (self.order + (self.passes - 1) - state.step % self.passes) % self.passes  # never < 0
        recent = 1 + age.unsqueeze(1).expand(-1, wide).flatten()
        worth = torch.where(previous == earlier.unsqueeze(-1), recent + self.passes, recent)
        entry = torch.where(hit, worth, 0).argmax(dim=-1).to(self.ops.index)
        return chosen.squeeze(1).gather(1, entry), hit.any(dim=-1)

    def write(self, state: WindowState, places: Tensor, x: Tensor, chosen: Tensor) -> None:
        """Keep what a pass chose for ``places [B, L]``, behind the window's tokens ``x [B, L]``."""
        # A shorter window on a longer one's buffers leaves older rows behind its own: they stay true.
        at = (state.step % self.passes) * state.row_keys.shape[2] + self.ahead
        self.ops.put(state.row_tokens, 1, at, chosen)
        self.ops.put(state.row_keys, 1, at, places * self.vocab + x)
        # What is before the first lies outside the window; the token itself stands for it.
        self.ops.put(state.row_previous, 1, at, torch.cat((x[:, :1], x[:, :-1]), dim=1))


class WindowDrafts(DraftSource[Value, WindowState, Tensor, Coupled]):
    """The drafts of one window; one of a single token is plain decoding.

    Node i of a window is image token ``n + i``, n the last known one, in the slot of its number: a window
    moves on by a larger ``length``. Where a pass looks at fewer slots, the last of these is the trash: a
    pass over more has an image position there, and writes it before any pass sees it.
    """

    state_type = WindowState
    returns = settles = True

    def __init__(self, given: DraftContext[Value]) -> None:
        super().__init__(given)
        session, g = given.session, self.geometry
        self.session, self.greedy, self.choices = session, session.greedy, session.choices
        self.filters, self.finite = session.filters, session.finite
        device = session.state.length.device
        self.chain = torch.arange(g.nodes, dtype=self.ops.index, device=device)
        self.ahead = torch.arange(1, g.nodes + 1, dtype=self.ops.index, device=device)
        self.ring = Ring(session.geometry, self.ops, device)
        kind = self.window_of(given.config)[0]
        self.initial = DraftInitializer(kind, g, given.verifying.target, self.ops)
        #: The rows of earlier passes; None where none are recalled.
        self.recall = RowCache(g, device, self.ops) if g.passes else None

    @classmethod
    def window_of(cls, value: Value) -> tuple[Fresh | Literal["given"], int]:
        """Return what fresh drafts are sampled from, and how many passes are recalled."""
        assert isinstance(value, Window)
        return value.fresh, value.passes

    @classmethod
    def add_sizes(cls, g: Geometry, value: Value, given: Sizing) -> Geometry:
        fresh, passes = cls.window_of(value)
        reads, kept = fresh == "above", 0
        if given.longest is not None:
            kept = given.longest.kept
        elif not given.greedy and (reads or not g.keyed):
            reach = row_width(given.target) if reads else 1
            kept = min((1 if g.keyed else 2) * g.nodes + reach, g.tokens)
        g = replace(g, in_place=True, kept=kept)
        if g.keyed:
            return replace(g, passes=passes)
        return replace(g, draft_columns=2 * g.depth, test_columns=g.depth)

    def widening(self, state: WindowState) -> Callable[[], None] | None:
        # The fresh drafts that this window needs after steps of a shorter one.
        return partial(self.renew, state, state.newest, back=1) if self.geometry.depth else None

    def begin(self, state: WindowState, features: Tensor, weights: Tensor) -> None:
        """Keep what the first token was sampled from, and draw the first drafts."""
        if self.geometry.kept:
            place = self.session.verifying.first.unsqueeze(1)
            self.ring.write(state.q, place, weights.unsqueeze(1))
        if self.geometry.depth:
            self.renew(state, state.length, back=1)

    def draft(self, state: WindowState) -> Tensor:
        """Return the window ``[B, L]``: the last known token and the drafts behind it."""
        chain = state.length.unsqueeze(1)
        if self.geometry.depth:
            chain = (chain + self.chain).clamp(max=self.geometry.tokens)
        return state.tokens.gather(1, chain)

    def verify(
        self, state: WindowState, drafted: Tensor, slots: int | None = None
    ) -> tuple[Tensor, Tensor]:
        v, g, length = self.verifying, self.geometry, state.length
        seen = min(slots or g.target_slots, g.target_slots)
        last = seen - g.prefix - 1  # the trash, behind the image's slots
        place = length.unsqueeze(1) + self.chain
        cells = place.clamp(max=g.tokens - 1)
        following = (cells + 1).clamp(max=g.tokens - 1)
        at = torch.where(place < last, g.prefix + place, seen - 1)
        reach = v.branches.repeat_images(place + g.prefix).unsqueeze(-1)
        past = v.slots[g.prefix : g.prefix + last] <= reach
        prompt, masked = state.prefix_mask, v.branches.repeat_images
        if v.ops.preferences.skips_finished_rows and g.batch > 1:
            open_ = masked(length).unsqueeze(1) < g.tokens - 1
            prompt, past = prompt & open_, past & open_.unsqueeze(1)
        rest = v.cache.layout.capacity - seen if seen == g.target_slots else 0
        return v.run(state, drafted, cells, following, at, v.mask_of(prompt, past, 1 + rest))

    def commit(
        self, state: WindowState, drafted: Tensor, features: Tensor, judged: Coupled
    ) -> None:
        positions, last = state.length.unsqueeze(1) + self.ahead, self.geometry.tokens - 1
        state.tokens.scatter_(1, positions.clamp(max=last + 1), judged.tokens)
        # A longer window may have seen more before this one.
        newest = torch.maximum(state.newest, positions[:, -1])
        state.newest.copy_(newest)
        self.after(state, drafted, judged, features, newest)
        open_ = state.length < last
        length = (state.length + judged.count).clamp(max=last)
        gained = length - state.length
        state.advance(length, gained, open_, gained - 1)

    def after(
        self, state: WindowState, window: Tensor, coupled: Coupled, features: Tensor, newest: Tensor
    ) -> None:
        """Draft for the next step, before the state's length moves on.

        ``window [B, L]``: the tokens that the pass saw; ``features [R, L, D]``: the target's;
        ``newest [B]``: the last position that a pass has predicted.
        """
        if self.geometry.depth:
            self.renew(state, newest)

    @abstractmethod
    def renew(self, state: WindowState, newest: Tensor, back: int = 0) -> None:
        """Draft what is behind ``newest [B]``, the last position that a pass has seen.

        ``back``: of this step's uniforms those of this many steps before.
        """

    def guide_states(self, features: Tensor, length: Tensor) -> Tensor:
        """Return guided states float32 ``[B, L, D]`` of rows ``[R, L, D]`` behind ``length [B]``."""
        scale = self.verifying.guidance.scale
        if scale is None:
            return features.float()
        following = length.unsqueeze(1) + self.ahead[: features.shape[1]]
        following = following.clamp(max=self.geometry.tokens - 1)
        return SamplingOps.guide(self.ops, features.float(), following, scale)

    def describe(self, state: WindowState) -> plan.WindowPlan:
        g, fresh, noted = self.geometry, self.initial, self.geometry.passes > 0
        return plan.WindowPlan(
            fresh=fresh.kind,
            width=fresh.width,
            passes=g.passes,
            kept=g.kept,
            fresh_column=0 if g.keyed else g.depth,
            newest=state.newest,
            place=self.ring.place,
            q=state.q if g.kept else None,
            row_keys=state.row_keys if noted else None,
            row_previous=state.row_previous if noted else None,
            row_tokens=state.row_tokens if noted else None,
            above=fresh.up,
            code_kind=fresh.kinds,
            open_codes=fresh.open,
        )


class InvariantWindow(WindowDrafts[Value]):
    """Chooses tokens by noise, or the likeliest, and drafts by the same noise."""

    def _choose(self, state: WindowState, logits: Tensor, positions: Tensor) -> Tensor:
        """Return the tokens of ``positions [B, T]``; keep their rows where fresh drafts follow them."""
        if self.greedy:
            self.finite.note(logits)
            return logits.argmax(dim=-1).to(self.ops.index)
        p = distribution(logits, self.filters)
        self.finite.note(p)
        if self.geometry.kept:
            self.ring.write(state.q, positions, p)
        return self.choices.of(p, positions)

    def renew(self, state: WindowState, newest: Tensor, back: int = 0) -> None:
        fresh = self.initial
        if fresh.kind == GIVEN or (self.greedy and not fresh.reads):
            return
        targets = newest.unsqueeze(1) + fresh.ahead
        places = targets.clamp(max=self.geometry.tokens)
        if self.greedy:
            state.tokens.scatter_(1, places, state.tokens.gather(1, fresh.sources(newest)))
            return
        above = self.ring.read(state.q, fresh.sources(newest)) if fresh.reads else None
        state.tokens.scatter_(1, places, self.choices.of(fresh.rows(above, targets), targets))

    def judge(self, state: WindowState, drafted: Tensor, logits: Tensor) -> Coupled:
        """Compare the drafts with the tokens that are chosen, which take their places."""
        places = state.length.unsqueeze(1) + self.ahead
        tokens = self._choose(state, logits, places)
        if not self.geometry.depth:  # there is nothing to compare
            return Coupled(tokens, self.ahead)
        x = drafted[:, 1:]
        count = leading(x == tokens[:, :-1], x.dtype) + 1
        return Coupled(self._recall(state, drafted, tokens, count), count)

    def _recall(self, state: WindowState, window: Tensor, tokens: Tensor, first: Tensor) -> Tensor:
        """Take what earlier passes chose behind tokens that this one did not see; note what it chose.

        ``window [B, L]``: what the pass saw; ``tokens [B, L]``: what it chose; ``first [B]``: the first
        of these that is not known.
        """
        if self.recall is None:
            return tokens
        behind = self.ahead > first.unsqueeze(1)
        left = torch.cat((window[:, :1], tokens[:, :-1]), dim=1)
        earlier = torch.cat((window[:, :1], left[:, :-1]), dim=1)
        places = state.length.unsqueeze(1) + self.ahead
        recalled, found = self.recall.find(state, places, left, earlier)
        self.recall.write(state, places, window, tokens)
        return torch.where(behind & (left != window) & found, recalled, tokens)


class MaximalWindow(WindowDrafts[Value]):
    """SJD: draws, tests and replaces drafts by uniforms, and keeps what they were sampled from.

    Of a step's uniforms the first are for tests, then come fresh drafts, then draws, the bonus's last.
    """

    def renew(self, state: WindowState, newest: Tensor, back: int = 0) -> None:
        targets = newest.unsqueeze(1) + self.initial.ahead
        rows = self.initial.rows(None, targets)
        here = state.get_uniforms(back)[:, self.geometry.depth :][:, : targets.shape[1]]
        drawn = self.filters.sample(rows, here)
        state.tokens.scatter_(1, targets.clamp(max=self.geometry.tokens), drawn)
        self.ring.write(state.q, targets, rows)

    def judge(self, state: WindowState, drafted: Tensor, logits: Tensor) -> Coupled:
        """Test the drafts, and keep the distributions of what is drafted for the next step."""
        places, length = state.length.unsqueeze(1) + self.ahead, self.geometry.nodes
        p = distribution(logits, self.filters)
        self.finite.note(p)
        q = self.ring.read(state.q, places[:, :-1])
        self.ring.write(state.q, places, p)
        uniforms = state.get_uniforms()
        tests, draws = uniforms[:, : length - 1], uniforms[:, -length:]
        return couple(drafted[:, 1:], p, q, tests, draws, draw=self.filters.sample)
