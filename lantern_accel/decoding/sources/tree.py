"""Drafts that are a tree: each node is a token that may follow its parent."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from lantern_accel.decoding.accept import accept, accept_greedy
from lantern_accel.decoding.drafts import DraftContext, Sizing, Value
from lantern_accel.decoding.geometry import Geometry
from lantern_accel.decoding.invariant import accept_invariant
from lantern_accel.decoding.state import TreeState
from lantern_accel.decoding.tree_layout import TreeLayout
from lantern_accel.decoding.trees import Accepted, DraftTree, TreeTables


class TreeDrafts(TreeLayout[Value]):
    """Proposes a tree, which is judged by the strategy's rule, or by what noise chooses."""

    def __init__(self, given: DraftContext[Value]) -> None:
        super().__init__(given)
        g, device = given.geometry, given.target.weight.device
        shape = given.source.shape
        #: Constants of a source whose shape is known before the drafts.
        self.tables = None if shape is None else TreeTables(shape)
        self.topology: dict[str, Any] = {}
        if self.tables is not None:
            self.topology = self.tables.topology(g.batch, device, self.ops.index)
        self.ranks = None if self.tables is None else self.tables.ranks(self.topology)

    @classmethod
    def sized(cls, g: Geometry, value: Value, given: Sizing) -> Geometry:
        g, longest = cls._columns(g, value), given.longest
        if longest is None:
            return g
        # A chain's tokens lie in the slots of their own numbers; those of a tree, among its nodes'.
        spread = longest.nodes if g.depth and longest.nodes > longest.depth + 1 else 0
        more = {"scratch": longest.scratch, "draft_columns": longest.draft_columns}
        return Geometry(**{**vars(g), **more, "spread": spread})

    @classmethod
    def _columns(cls, g: Geometry, value: Value) -> Geometry:
        """Return the sizes with the drafter's scratch slots and the uniforms of drafts and tests."""
        if value.shape is None:
            return g
        tables, more = TreeTables(value.shape), {}
        if g.drafted:
            widths = zip(tables.inner, tables.max_children, strict=True)
            more["scratch"] = sum(len(level) for level in tables.inner[1:])
            more["draft_columns"] = sum(len(level) * width for level, width in widths)
        more["test_columns"] = sum(tables.max_children)
        if g.keyed:
            more |= {"draft_columns": 0, "test_columns": 0}
        return Geometry(**{**vars(g), **more})

    def drawn(self, state: TreeState) -> Tensor | None:
        """Return this step's uniforms ``[B, columns]``, the first of which are for drafts; None: keys."""
        return None if self.geometry.keyed else state.drawn()

    def tree(
        self, state: TreeState, tokens: Tensor, q: Tensor | None, uniforms: Tensor | None = None
    ) -> DraftTree:
        """Return a tree of the source's known shape.

        ``tokens [B, T]``, the root's first; ``q [B, G, V]``: what each group of siblings was sampled
        from, None where drafts are certain; ``uniforms``: this step's, where drafts took some.
        """
        assert self.tables is not None
        return DraftTree(
            tokens=tokens,
            max_children=self.tables.max_children,
            q=q,
            **self.topology,
            known_ranks=self.ranks,
            writes=self.writes(state),
            uniforms=uniforms,
        )

    def judge(self, state: TreeState, drafted: DraftTree, logits: Tensor) -> Accepted:
        session, g = self.given.session, self.geometry
        rule, guidance = session.rule, self.verifying.guidance
        session.finite.note(logits, logits=True)
        if session.greedy and rule.relaxed:
            return accept_greedy(drafted, logits, rule)
        if g.keyed:
            return accept_invariant(drafted, logits, session.choices, state.length)
        uniforms = state.drawn() if drafted.uniforms is None else drafted.uniforms
        first = g.draft_columns
        tests, bonus = uniforms[:, first : first + g.test_columns], uniforms[:, -1]
        masked = guidance.masked
        return accept(drafted, logits, session.filters, rule, tests, bonus, masked=masked)


class CertainDrafts(TreeDrafts[Value]):
    """Drafts of a known shape that are sampled from nothing: each is a guess, q = 1."""

    @abstractmethod
    def guess(self, state: TreeState) -> Tensor:
        """Return the drafts ``[B, T - 1]``, in the order of the tree's nodes."""

    def draft(self, state: TreeState) -> DraftTree:
        tokens = torch.cat((state.root.unsqueeze(1), self.guess(state)), 1)
        return self.tree(state, tokens, None)
