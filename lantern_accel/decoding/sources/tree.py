"""Drafts that are a tree: each node is a token that may follow its parent.

A table says which slot of the cache each position of the image has, so that accepted nodes stay where
verification wrote them.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lantern_accel.decoding.accept import accept, accept_greedy, accept_invariant
from lantern_accel.decoding.drafts import DraftContext, DraftSource, Sizing, Value
from lantern_accel.decoding.geometry import Geometry
from lantern_accel.decoding.state import State, Zeros
from lantern_accel.decoding.trees import Accepted, DraftTree, topology_of
from lantern_accel.strategy.trees import TreeTables


def put_first(buffer: Tensor, values: Tensor) -> None:
    """Write ``values [B, n, ...]`` over the first n of a buffer's dimension 1, by one write of the whole.

    Some recorders of steps refuse writes to a part, which is a view.
    """
    rest = buffer[:, values.shape[1] :]
    buffer.copy_(torch.cat((values, rest), dim=1) if rest.shape[1] else values)


class TreeState(State):
    """The state of steps whose nodes lie in any slots; the root, known and not yet run, is ``length``.

    ``slot_of [B, S]``: the cache slot that holds each image position, a permutation; positions up to
    ``length`` are committed, and the ``nodes`` after them are where the next tree is written. ``place_of
    [B, S]`` is its inverse. ``pending_*``: tokens that the drafter has yet to catch up on, ``depth + 1``
    at most, with the target features they follow from.
    """

    def _own(self, g: Geometry, zeros: Zeros, ints: Zeros, dtype: torch.dtype) -> None:
        self.root = ints(g.batch)
        self.pending_tokens = ints(g.batch, g.depth + 1)
        self.pending_count = ints(g.batch)
        self.pending_features = zeros(g.rows, g.depth + 1, (g.taps + 1) * g.dim, dtype=dtype)
        self.last_path = ints(g.batch, g.depth + 1)
        self.slot_of = ints(g.batch, g.image_slots)
        self.place_of = ints(g.batch, g.image_slots)
        self._slots = torch.arange(g.image_slots).to(self.slot_of)
        self.reset()

    def begin(self, token: Tensor) -> None:
        self.root.copy_(token)
        super().begin(token)

    def rewind(self, position: int, pending: int) -> None:
        super().rewind(position, pending)
        self.pending_count.fill_(pending)

    def reset(self) -> None:
        """Return every buffer to zero, and every position to the slot of its own number, in place."""
        super().reset()
        self.slot_of.copy_(self._slots.expand_as(self.slot_of))
        self.place_of.copy_(self._slots.expand_as(self.place_of))


@dataclass(frozen=True)
class CommittedPath:
    """What a step kept, before the state's length moves on; of ``D`` drafts at most.

    ``open`` bool ``[B]``: the image was not complete; ``path`` integer ``[B, D + 1]``: the nodes from
    the root on; ``tokens`` integer ``[B, D + 1]``: the tokens behind each, the bonus last; ``gained``
    integer ``[B]``: how many of these count; ``features [R, T, D]``: the target's, of all nodes.
    """

    open: Tensor
    path: Tensor
    tokens: Tensor
    gained: Tensor
    features: Tensor


class TreeDrafts(DraftSource[Value, TreeState, DraftTree, Accepted]):
    """Proposes a tree, which is judged by the strategy's rule, or by what noise chooses."""

    state_type = TreeState

    def __init__(self, given: DraftContext[Value]) -> None:
        super().__init__(given)
        g, verifying, shape = self.geometry, self.verifying, given.config.shape
        index, device = self.ops.index, verifying.slots.device
        self.no_length = torch.full((g.batch,), -1, dtype=index, device=device)
        self.ones = torch.ones(g.batch, g.nodes, dtype=index, device=device)
        #: Constants of a source whose shape is known before the drafts.
        self.tables = None if shape is None else TreeTables(shape)
        tables = self.tables
        self.topology = {} if tables is None else topology_of(tables, g.batch, device, index)

    @classmethod
    def add_sizes(cls, g: Geometry, value: Value, given: Sizing) -> Geometry:
        g, longest = cls.columns(g, value), given.longest
        if longest is None:
            return g
        return replace(g, scratch=longest.scratch, draft_columns=longest.draft_columns)

    @classmethod
    def columns(cls, g: Geometry, value: Value) -> Geometry:
        """Return the sizes with the drafter's scratch slots and the uniforms of drafts and tests."""
        if value.shape is None:
            return g
        tables = TreeTables(value.shape)
        tests, scratch = sum(tables.max_children), sum(len(level) for level in tables.inner[1:])
        widths = zip(tables.inner, tables.max_children, strict=True)
        drafts = sum(len(level) * width for level, width in widths)
        if not g.drafted:
            scratch = drafts = 0
        if g.keyed:
            drafts = tests = 0
        return replace(g, scratch=scratch, draft_columns=drafts, test_columns=tests)

    def tree(self, tokens: Tensor, q: Tensor | None) -> DraftTree:
        """Return a tree of the source's known shape.

        ``tokens [B, T]``, the root's first; ``q [B, G, V]``: what each group of siblings was sampled
        from, None where drafts are certain.
        """
        assert self.tables is not None
        return DraftTree(tokens=tokens, max_children=self.tables.max_children, q=q, **self.topology)

    def _mask_of(self, state: TreeState, tree: DraftTree, slots: int) -> Tensor:
        """Return the device's form of what each node sees of the first ``slots`` slots.

        That is the prompt, every committed position, and its own ancestors in the tree. Positions below
        ``length + nodes`` lie in the slots below ``length + nodes``: a step hands slots round among the
        ``nodes`` positions behind ``length``, and every later one still lies in the slot of its number.
        """
        g, v = self.geometry, self.verifying
        place = state.place_of[:, : slots - g.prefix] - state.length.unsqueeze(1)
        place = v.branches.repeat_images(place).unsqueeze(1)
        # What is committed counts as the root, which all nodes see. Behind the nodes is more than 0.
        node = place.clamp(min=0, max=g.nodes - 1).expand(-1, g.nodes, -1)
        behind = (place - (g.nodes - 1)).clamp(min=0)
        seen = v.branches.repeat_images(tree.visible).gather(2, node) > behind
        hidden = len(v.slots) - slots if slots == g.target_slots else 0
        return v.mask_of(state.prefix_mask, seen, hidden)

    def _writes(self, state: TreeState) -> tuple[Tensor, Tensor]:
        """Return the positions behind the known tokens, and their slots, integer ``[B, T]`` each."""
        positions = state.length.unsqueeze(1) + self.verifying.slots[: self.geometry.nodes]
        return positions, state.slot_of.gather(1, positions)

    def verify(
        self, state: TreeState, drafted: DraftTree, slots: int | None = None
    ) -> tuple[Tensor, Tensor]:
        g = self.geometry
        at = self._writes(state)[1] + g.prefix
        places = state.length.unsqueeze(1) + drafted.depth
        cells, following = (one.clamp(max=g.tokens - 1) for one in (places, places + 1))
        mask = self._mask_of(state, drafted, min(slots or g.target_slots, g.target_slots))
        return self.verifying.run(state, drafted.tokens, cells, following, at, mask)

    def judge(self, state: TreeState, drafted: DraftTree, logits: Tensor) -> Accepted:
        session, g = self.given.session, self.geometry
        rule = session.rule
        session.finite.note(logits, logits=True)
        if session.greedy and rule.relaxed:
            return accept_greedy(drafted, logits, rule)
        if g.keyed:
            return accept_invariant(drafted, logits, session.choices, state.length)
        uniforms, first = state.get_uniforms(), g.draft_columns
        tests, bonus = uniforms[:, first : first + g.test_columns], uniforms[:, -1]
        masked = self.verifying.guidance.masked
        return accept(drafted, logits, session.filters, rule, tests, bonus, masked=masked)

    def commit(
        self, state: TreeState, drafted: DraftTree, features: Tensor, judged: Accepted
    ) -> None:
        g, slots = self.geometry, self.verifying.slots
        entry, after = (slots[n : n + g.depth + 1] for n in (0, 1))
        open_ = state.length < g.tokens - 1
        if g.depth:
            self._enter_slots(state, drafted, judged, open_)
        # Known tokens from the one after the root on: accepted drafts, then the bonus.
        path = drafted.tokens.gather(1, judged.path)
        count, bonus = judged.length.unsqueeze(1), judged.bonus.unsqueeze(1)
        following = torch.cat((path[:, 1:], bonus), dim=1).scatter(1, count, bonus)
        # Drafts past the end of the image, and all of a complete one, go to the trash column.
        column = (state.length.unsqueeze(1) + after).clamp(max=g.tokens)
        column = column.masked_fill(entry > count, g.tokens)
        state.tokens.scatter_(1, column, following)
        dropped = column[:, : g.depth] == g.tokens
        gained = judged.length + 1
        self.after(state, CommittedPath(open_, judged.path, following, gained, features))
        length = (state.length + gained).clamp(max=g.tokens - 1)
        state.root.copy_(torch.where(open_, judged.bonus, state.root))
        state.quality_loss.add_(judged.quality_loss.masked_fill(dropped, 0).sum(dim=1))
        put_first(state.last_path, judged.path)
        counted = torch.where(open_, judged.length, self.no_length)
        state.advance(length, length - state.length, open_, counted)

    def after(self, state: TreeState, kept: CommittedPath) -> None:
        """Take note of what a step kept."""

    def _enter_slots(
        self, state: TreeState, tree: DraftTree, accepted: Accepted, open_: Tensor
    ) -> None:
        """Reorder the slots of one tree: the accepted path first, in its order, then the other nodes."""
        positions, slots = self._writes(state)
        node = self.verifying.slots[: self.geometry.nodes]
        # Behind its length a path only repeats nodes of its own.
        off_path = self.ones.scatter(1, accepted.path, 0)
        others = off_path.cumsum(1, dtype=node.dtype) + accepted.length.unsqueeze(1)
        place = torch.where(off_path == 0, tree.depth, others)
        # Positions before they are read again: a compiler may write the new length before it reads them.
        place = positions.gather(1, torch.where(open_.unsqueeze(1), place, node))
        state.slot_of.scatter_(1, place, slots)
        state.place_of.scatter_(1, slots, place)


class CertainDrafts(TreeDrafts[Value]):
    """Drafts of a known shape that are sampled from nothing: each is a guess, q = 1."""

    @abstractmethod
    def guess(self, state: TreeState) -> Tensor:
        """Return the drafts ``[B, T - 1]``, in the order of the tree's nodes."""

    def draft(self, state: TreeState) -> DraftTree:
        tokens = torch.cat((state.root.unsqueeze(1), self.guess(state)), 1)
        return self.tree(tokens, None)
