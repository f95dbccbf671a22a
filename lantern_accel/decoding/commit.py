"""Commits accepted nodes: enters their slots, writes tokens and counters, and informs the source."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lantern_accel.decoding.accept import Accepted
from lantern_accel.decoding.sources.base import Drafts, Kept
from lantern_accel.decoding.state import State
from lantern_accel.decoding.trees import DraftTree
from lantern_accel.decoding.verify import Verifying


def commit(
    verifying: Verifying,
    state: State,
    tree: DraftTree,
    features: Tensor,
    accepted: Accepted,
    drafts: Drafts[Any],
) -> None:
    """Enter accepted nodes in the slot table, write tokens, update lengths and counters.

    No key or value moves: an accepted node stays in the slot that verification wrote, and its slot
    becomes that of its position. ``features [R, T, D]`` are the target's, after the final norm. Images
    that are complete stay as they are.
    """
    g = verifying.geometry
    last = g.tokens - 1
    entry, after = (verifying.slots[n : n + g.depth + 1] for n in (0, 1))
    open_ = state.length < last
    if g.depth:
        _enter_slots(verifying, state, tree, accepted, open_)
    # Known tokens from the one after the root on: accepted drafts, then the bonus.
    path = tree.tokens.gather(1, accepted.path)
    count, bonus = accepted.length.unsqueeze(1), accepted.bonus.unsqueeze(1)
    following = torch.cat((path[:, 1:], bonus), dim=1).scatter(1, count, bonus)
    # Drafts past the end of the image, and all of a complete one, go to the trash column.
    column = (state.length.unsqueeze(1) + after).clamp(max=g.tokens)
    column = column.masked_fill(entry > count, g.tokens)
    state.tokens.scatter_(1, column, following)
    gained = accepted.length + 1
    length = (state.length + gained).clamp(max=last)
    drafts.after(state, Kept(open_, accepted.path, following, gained, features))
    state.root.copy_(torch.where(open_, accepted.bonus, state.root))
    # What is dropped is counted nowhere; a complete image gains nothing.
    counts = verifying.slots[1 : state.histogram.shape[1] + 1]  # of the widest tree here
    state.histogram.add_(counts == (length - state.length).unsqueeze(1))
    state.steps.add_(open_)
    dropped = column[:, : g.depth] == g.tokens
    state.price.add_(accepted.price.masked_fill(dropped, 0).sum(dim=1))
    put_first(state.last_path, accepted.path)
    state.last_length.copy_(torch.where(open_, accepted.length, verifying.no_length))
    state.length.copy_(length)
    state.step.add_(1)


def put_first(buffer: Tensor, values: Tensor) -> None:
    """Write ``values [B, n, ...]`` over the first n of a buffer's dimension 1.

    The whole buffer is written, in one go: a write to a part of one is a view, and some recorders of
    steps refuse to record those.
    """
    rest = buffer[:, values.shape[1] :]
    buffer.copy_(torch.cat((values, rest), dim=1) if rest.shape[1] else values)


def _enter_slots(
    verifying: Verifying, state: State, tree: DraftTree, accepted: Accepted, open_: Tensor
) -> None:
    """Reorder the slots of one tree: the accepted path first, in its order, then the other nodes."""
    g = verifying.geometry
    window = tree.window or verifying.window(state)
    node = verifying.slots[: g.nodes]
    # Behind its length a path only repeats nodes of its own.
    off_path = verifying.ones.scatter(1, accepted.path, 0)
    others = off_path.cumsum(1, dtype=node.dtype) + accepted.length.unsqueeze(1)
    place = torch.where(off_path == 0, tree.depth, others)
    # Positions before they are read again: a compiler may write the new length before what reads it late.
    place = window.positions.gather(1, torch.where(open_.unsqueeze(1), place, node))
    state.slot_of.scatter_(1, place, window.slots)
    state.place_of.scatter_(1, window.slots, place)
