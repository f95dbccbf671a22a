"""Defines what every source of drafts does in a step, and registers sources."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from lantern_accel.decoding.geometry import Geometry
from lantern_accel.decoding.invariant import Choices
from lantern_accel.decoding.rows import Guidance
from lantern_accel.decoding.state import State
from lantern_accel.decoding.target import Drafter, Target
from lantern_accel.decoding.trees import DraftTree, TreeTables, Written
from lantern_accel.device import plan
from lantern_accel.device.kv_cache import KVCache
from lantern_accel.device.operations import TensorOps
from lantern_accel.errors import StrategyError
from lantern_accel.strategy.sources import SERVED_BY, DraftSource

Value = TypeVar("Value", bound=DraftSource)
Serving = TypeVar("Serving", bound=type[Any])


@dataclass(frozen=True)
class Setting(Generic[Value]):
    """What the drafts of one engine are made for.

    ``source``: the value that was chosen. ``choices, guidance``: how tokens are chosen from rows of
    logits. ``drafter`` and its ``cache`` are None for a source that needs no drafter.
    """

    source: Value
    geometry: Geometry
    target: Target
    ops: TensorOps
    choices: Choices
    guidance: Guidance
    drafter: Drafter | None = None
    cache: KVCache | None = None


@dataclass(frozen=True)
class Kept:
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


class Drafts(ABC, Generic[Value]):
    """The drafts of one engine: functions of static buffers, which a device captures with the step.

    No method reads a value on the host, and no shape depends on one. Whatever is drafted, decoding stays
    exact: the better the drafts, the fewer the steps.
    """

    def __init__(self, given: Setting[Value]) -> None:
        g, device = given.geometry, given.target.weight.device
        self.given, self.ops, self.geometry = given, given.ops, g
        shape = given.source.shape
        #: Constants of a source whose shape is known before the drafts.
        self.tables = None if shape is None else TreeTables(shape)
        self.topology: dict[str, Any] = {}
        if self.tables is not None:
            self.topology = self.tables.topology(g.batch, device, self.ops.index)
        self.ranks = None if self.tables is None else self.tables.ranks(self.topology)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Tensors that :meth:`begin`, :meth:`draft` and :meth:`after` change in place, by name."""
        return {}

    @property
    def caches(self) -> tuple[KVCache, ...]:
        """Caches that they write."""
        return ()

    def begin(self, state: State, features: Tensor) -> None:
        """Get ready for a request's first step: its prompt was run and its first token is known.

        ``features [R, P, D]``: the target's, of the prompt. The reference has nothing to get ready.
        """

    @abstractmethod
    def draft(self, state: State, uniforms: Tensor | None, window: Written | None) -> DraftTree:
        """Propose what comes after the known tokens.

        ``state.tokens [B, N + 1]`` are known up to position ``state.length [B]``, where the root is.
        ``uniforms [B, columns]``, of which the first are for drafts; None where none are drawn.
        ``window``: where nodes are written, for a tree of known shape.
        """

    def after(self, state: State, kept: Kept) -> None:
        """Take note of what a step kept. The reference remembers nothing."""

    def planned(self, state: State) -> plan.Source | None:
        """Describe the source for a fused step; None: the step runs operator by operator."""
        return None

    def tree(self, tokens: Tensor, q: Tensor | None, window: Written | None) -> DraftTree:
        """Return a tree of the source's known shape.

        ``tokens [B, T]``, the root's first; ``q [B, G, V]``: what each group of siblings was drawn
        from, None where drafts are certain.
        """
        assert self.tables is not None
        return DraftTree(
            tokens=tokens,
            max_children=self.tables.max_children,
            q=q,
            **self.topology,
            known_ranks=self.ranks,
            window=window,
        )


class CertainDrafts(Drafts[Value]):
    """Drafts of a known shape that are drawn from nothing: each is a guess, q = 1."""

    @abstractmethod
    def guess(self, state: State) -> Tensor:
        """Return the drafts ``[B, T - 1]``, in the order of the tree's nodes."""

    def draft(self, state: State, uniforms: Tensor | None, window: Written | None) -> DraftTree:
        return self.tree(torch.cat((state.root.unsqueeze(1), self.guess(state)), 1), None, window)


#: What serves each source: a subclass of :class:`Drafts`, or an engine with steps of its own.
_SERVED: dict[type[DraftSource], type[Any]] = {}


def register(source: type[DraftSource]) -> Callable[[Serving], Serving]:
    """Say what serves a source: ``@register(MySource)`` above a subclass of :class:`Drafts`.

    A source whose steps are of another form registers a subclass of
    :class:`~lantern_accel.decoding.step_engine.StepEngine`.
    """

    def registered(made: Serving) -> Serving:
        _SERVED[source] = made
        SERVED_BY[made.__module__] = source.model_fields["kind"].default
        return made

    return registered


def serving(source: DraftSource) -> type[Any]:
    """Return what was registered for a source; raises StrategyError where that is nothing."""
    made = _SERVED.get(type(source))
    if made is None:
        raise StrategyError(
            f"nothing is registered that makes drafts of the kind {source.kind!r}; register it "
            "with lantern_accel.decoding.sources.register"
        )
    return made
