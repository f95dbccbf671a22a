"""Decodes with trees of drafts, the way the papers' speculative decoding does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lantern_accel.decoding.accept import Accepted, accept, accept_greedy
from lantern_accel.decoding.base import EngineBase
from lantern_accel.decoding.geometry import Geometry
from lantern_accel.decoding.invariant import accept_invariant
from lantern_accel.decoding.logits import distribution
from lantern_accel.decoding.pricing import path_prices
from lantern_accel.decoding.sources import none as none
from lantern_accel.decoding.sources.base import Drafts, Kept, Setting, serving
from lantern_accel.decoding.sources.drafter import Drafting
from lantern_accel.decoding.state import State, put_first
from lantern_accel.decoding.step_engine import StepEngine
from lantern_accel.decoding.target import Drafter, Target
from lantern_accel.decoding.trees import DraftTree
from lantern_accel.decoding.verify import Verifying
from lantern_accel.device.plan import Source

#: A tree, and this step's uniforms ``[B, columns]``; None where keys decide.
Drafted = tuple[DraftTree, Tensor | None]


class Engine(StepEngine):
    """Decodes with the drafts of any source that proposes a tree: a drafter's, a stranger's, none."""

    source: Drafts[Any]
    returns = False  # the drafter does not follow plain steps
    untimed = 0
    scattered = False
    """Whether longer steps on these buffers leave tokens in slots of other numbers."""

    def _sized(self, g: Geometry, target: Target, longest: Engine | None) -> Geometry:
        if longest is None:
            return g
        one = longest.geometry
        # A chain's tokens lie in the slots of their own numbers; those of a tree, among its nodes'.
        spread = 0 if one.nodes == one.depth + 1 else one.nodes
        self.scattered = spread > 0
        return replace(
            g,
            scratch=one.scratch,
            draft_columns=one.draft_columns,
            spread=spread if g.depth else 0,
        )

    def _step_on(self, longest: EngineBase) -> None:
        super()._step_on(longest)
        g, v = self.geometry, self.verifying
        self.verifying = replace(v, geometry=g, taps=v.taps if g.drafted else ())

    def _draft_with(self, drafter: Drafter | None) -> None:
        tree, v = self.strategy.drafts, self.verifying
        cache = None if drafter is None else self.drafter_cache
        given: Setting[Any] = Setting(
            tree, self.geometry, v.target, self.ops, self.choices, v.guidance, drafter, cache
        )
        self.source = serving(tree)(given)
        self.drafting = self.source if isinstance(self.source, Drafting) else None

    def planned(self) -> Source | None:
        return self.source.planned(self.state)

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
            keys, values = v.cache.read(layer, order)
            self.ops.write(v.cache, layer, address, keys, values)
        state.slot_of.copy_(own)
        state.place_of.copy_(own)

    def _keep(self, token: Tensor, weights: Tensor) -> None:
        self.state.root.copy_(token)

    def _first_drafts(self, features: Tensor) -> None:
        self.source.begin(self.state, features)

    def _draft(self) -> Drafted:
        state = self.state
        uniforms = None if self.geometry.keyed else state.drawn()
        window = self.verifying.window(state) if self.source.tables is not None else None
        return self.source.draft(state, uniforms, window), uniforms

    def _verify(self, drafted: Drafted, slots: int | None) -> tuple[Tensor, Tensor]:
        return self.verifying.verify(self.state, drafted[0], slots)

    def _accept(self, drafted: Drafted, logits: Tensor) -> Accepted:
        tree, uniforms = drafted
        self.finite.note(logits, logits=True)
        if self.greedy and self.rule.relaxed:
            return accept_greedy(tree, logits, self.rule)
        if uniforms is None:
            return accept_invariant(tree, logits, self.choices, self.state.length)
        first, masked = self.geometry.draft_columns, self.verifying.guidance.masked
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

    def _commit(self, drafted: Drafted, features: Tensor, accepted: Accepted) -> None:
        commit(self.verifying, self.state, drafted[0], features, accepted, self.source)


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
    dropped = column[:, : g.depth] == g.tokens
    state.price.add_(accepted.price.masked_fill(dropped, 0).sum(dim=1))
    put_first(state.last_path, accepted.path)
    counted = torch.where(open_, accepted.length, verifying.no_length)
    state.advance(length, length - state.length, open_, counted)


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
