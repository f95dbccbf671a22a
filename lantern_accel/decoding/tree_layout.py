"""Where the nodes of a tree lie: a table says which slot each position of the image has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lantern_accel.decoding.drafts import DraftContext, Drafts, Value
from lantern_accel.decoding.state import TreeState, put_first
from lantern_accel.decoding.trees import Accepted, CacheWrites, DraftTree
from lantern_accel.device.operations import flags


@dataclass(frozen=True)
class Kept:
    """What a step kept, before the state's length moves on; of ``D`` drafts at most.

    ``open`` bool ``[B]``: the image was not complete; ``path`` integer ``[B, D + 1]``: the nodes from
    the root on; ``tokens`` integer ``[B, D + 1]``: the tokens behind each, the bonus last; ``gained``
    integer ``[B]``: how many of these count; ``features [R, T, D]``: the target's, of all nodes.
    ``dropped`` bool ``[B, D]``: drafts that are past the image's end or were rejected.
    """

    open: Tensor
    path: Tensor
    tokens: Tensor
    gained: Tensor
    features: Tensor
    dropped: Tensor


class TreeLayout(Drafts[Value, TreeState, DraftTree, Accepted, Kept]):
    """Nodes lie where a table of slots says: an accepted one stays, and its slot is its position's."""

    state_type = TreeState

    def __init__(self, given: DraftContext[Value]) -> None:
        super().__init__(given)
        g, verifying = self.geometry, self.verifying
        index, device = self.ops.index, verifying.slots.device
        #: Slots behind all that a step looks at, which no node sees.
        rest = max(len(verifying.slots) - g.target_slots, 0)
        self.hidden = flags(False, verifying.branches.masks, g.nodes, rest, device=device)
        self.around = torch.arange(-1, g.nodes, dtype=index, device=device)
        self.no_length = torch.full((g.batch,), -1, dtype=index, device=device)
        self.ones = torch.ones(g.batch, g.nodes, dtype=index, device=device)

    def writes(self, state: TreeState) -> CacheWrites:
        """Return where in the image the next tree is written."""
        around = state.length.unsqueeze(1) + self.around
        positions = around[:, 1:]
        return CacheWrites(around[:, :1], positions, state.slot_of.gather(1, positions))

    def _visible(self, state: TreeState, tree: DraftTree, before: Tensor, slots: int) -> Tensor:
        """Return what each node sees of the first ``slots`` slots, bool ``[M, T, slots]``.

        That is the prompt, every committed position, and its own ancestors in the tree. Positions below
        ``length + nodes`` lie in the slots below ``length + nodes``: a step hands slots round among the
        ``nodes`` positions behind ``length``, and every later one still lies in the slot of its number.
        """
        g, branches = self.geometry, self.verifying.branches
        # From 0, which is committed, over the nodes to what is behind them.
        place = state.place_of[:, : slots - g.prefix] - before
        place = place.clamp(min=0, max=g.nodes + 1).unsqueeze(1).expand(-1, g.nodes, -1)
        image = tree.places().gather(2, place)
        prompt = state.prefix_mask.unsqueeze(1).expand(-1, g.nodes, -1)
        seen = [prompt, branches.masked(image)]
        if slots == g.target_slots and self.hidden.shape[-1]:
            seen.append(self.hidden)
        return torch.cat(seen, dim=-1)

    def verify(
        self, state: TreeState, drafted: DraftTree, slots: int | None = None
    ) -> tuple[Tensor, Tensor]:
        g, tree = self.geometry, drafted
        writes = tree.writes or self.writes(state)
        cells = (state.length.unsqueeze(1) + tree.ahead()).clamp(max=g.tokens - 1)
        cells, following = cells.chunk(2, dim=1)
        seen = min(slots or g.target_slots, g.target_slots)
        visible = self._visible(state, tree, writes.before, seen)
        at = writes.slots + g.prefix
        return self.verifying.run(state, tree.tokens, cells, following, at, visible)

    def keep(
        self, state: TreeState, drafted: DraftTree, features: Tensor, judged: Accepted
    ) -> Kept:
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
        return Kept(open_, judged.path, following, judged.length + 1, features, dropped)

    def advance(self, state: TreeState, judged: Accepted, kept: Kept) -> None:
        length = (state.length + kept.gained).clamp(max=self.geometry.tokens - 1)
        state.root.copy_(torch.where(kept.open, judged.bonus, state.root))
        state.price.add_(judged.price.masked_fill(kept.dropped, 0).sum(dim=1))
        put_first(state.last_path, judged.path)
        counted = torch.where(kept.open, judged.length, self.no_length)
        state.advance(length, length - state.length, kept.open, counted)

    def _enter_slots(
        self, state: TreeState, tree: DraftTree, accepted: Accepted, open_: Tensor
    ) -> None:
        """Reorder the slots of one tree: the accepted path first, in its order, then the other nodes."""
        writes = tree.writes or self.writes(state)
        node = self.verifying.slots[: self.geometry.nodes]
        # Behind its length a path only repeats nodes of its own.
        off_path = self.ones.scatter(1, accepted.path, 0)
        others = off_path.cumsum(1, dtype=node.dtype) + accepted.length.unsqueeze(1)
        place = torch.where(off_path == 0, tree.depth, others)
        # Positions before they are read again: a compiler may write the new length before it reads them.
        place = writes.positions.gather(1, torch.where(open_.unsqueeze(1), place, node))
        state.slot_of.scatter_(1, place, writes.slots)
        state.place_of.scatter_(1, writes.slots, place)

    def moves(self, state: TreeState) -> dict[str, Callable[[], None]]:
        one = self.given.session.geometry
        # A chain's tokens lie in the slots of their own numbers; those of a tree, among its nodes'.
        scattered = one.nodes > one.depth + 1 and not self.geometry.depth
        return {"gather": partial(self.gather, state)} if scattered else {}

    def gather(self, state: TreeState) -> None:
        """Move keys and values to the slots of their positions' numbers, where plain steps look."""
        v, g = self.verifying, self.geometry
        rows, slots = v.branches.rows, state.slot_of
        own = v.slots[: slots.shape[1]].expand_as(slots)
        order, address = rows(slots + g.prefix), v.ops.address(v.cache, rows(own + g.prefix))
        for layer in range(v.cache.layout.layers):
            keys, values = v.cache.read(layer, order)
            v.ops.write(v.cache, layer, address, keys, values)
        state.slot_of.copy_(own)
        state.place_of.copy_(own)
