"""Commit: say which slots hold what was accepted, and hand the drafter its next tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_accel.decoding.accept import Accepted
from lantern_accel.decoding.state import State
from lantern_accel.decoding.trees import DraftTree
from lantern_accel.decoding.verify import Verifying


def commit(
    verifying: Verifying, state: State, tree: DraftTree, features: Tensor, accepted: Accepted
) -> None:
    """Enter accepted nodes in the slot table, write tokens, update lengths and counters.

    No key or value moves: an accepted node stays in the slot that verification wrote, and its slot
    becomes that of its position. ``features [R, T, D]`` are the target's, after the final norm. Images
    that are complete stay as they are.
    """
    g = verifying.geometry
    entry = torch.arange(g.depth + 1, dtype=state.length.dtype, device=state.length.device)
    open_ = state.length + 1 < g.tokens
    if g.depth:
        _enter_slots(verifying, state, tree, accepted, open_)
    # Known tokens from the one after the root on: accepted drafts, then the bonus.
    drafts = tree.tokens.gather(1, accepted.path)
    shifted = torch.cat((drafts[:, 1:], accepted.bonus.unsqueeze(1)), dim=1)
    following = torch.where(
        entry == accepted.length.unsqueeze(1), accepted.bonus.unsqueeze(1), shifted
    )
    column = state.length.unsqueeze(1) + 1 + entry
    fits = (entry <= accepted.length.unsqueeze(1)) & (column < g.tokens) & open_.unsqueeze(1)
    state.tokens.scatter_(1, torch.where(fits, column, g.tokens), following)
    gained = accepted.length + 1
    length = (state.length + gained).clamp(max=g.tokens - 1)
    index = verifying._rows(accepted.path).unsqueeze(-1).expand(-1, -1, features.shape[-1])
    keep = open_.unsqueeze(1)
    state.pending_tokens.copy_(torch.where(keep, following, state.pending_tokens))
    rows_open = verifying._rows(open_).view(-1, 1, 1)
    state.pending_features.copy_(
        torch.where(rows_open, features.gather(1, index), state.pending_features)
    )
    state.pending_count.copy_(torch.where(open_, gained, state.pending_count))
    state.root.copy_(torch.where(open_, accepted.bonus, state.root))
    # Drafts past the end of the image are dropped, and counted nowhere.
    state.histogram.add_((entry == (length - state.length - 1).unsqueeze(1)) & open_.unsqueeze(1))
    state.steps.add_(open_)
    state.price.add_(torch.where(fits[:, : g.depth], accepted.price, 0.0).sum(dim=1))
    state.last_path.copy_(accepted.path)
    state.last_length.copy_(torch.where(open_, accepted.length, -1))
    state.length.copy_(torch.where(open_, length, state.length))
    state.step.add_(1)


def _enter_slots(
    verifying: Verifying, state: State, tree: DraftTree, accepted: Accepted, open_: Tensor
) -> None:
    """Reorder the slots of one tree: the accepted path first, in its order, then the other nodes."""
    g = verifying.geometry
    window = verifying.window(state)
    node = verifying.slots[: g.nodes]
    level = verifying.slots[: g.depth + 1]
    on_path = (accepted.path.unsqueeze(-1) == node) & (
        level <= accepted.length.unsqueeze(1)
    ).unsqueeze(-1)
    kept = on_path.any(dim=1)
    others = (~kept).cumsum(1, dtype=node.dtype) + accepted.length.unsqueeze(1)
    place = torch.where(kept, tree.depth, others)
    # Positions before they are read again: a compiler may write the new length before what reads it late.
    following = state.length.unsqueeze(1) + node
    place = following.gather(1, torch.where(open_.unsqueeze(1), place, node))
    state.slot_of.scatter_(1, place, window)
    state.place_of.scatter_(1, window, place)
