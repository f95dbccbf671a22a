"""Defines what every source of drafts does in a step, and registers sources."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from lantern_accel.decoding.geometry import Geometry
from lantern_accel.decoding.session import Session
from lantern_accel.decoding.state import State
from lantern_accel.decoding.target import Drafter, Target
from lantern_accel.decoding.verify import TargetRunner
from lantern_accel.device import plan
from lantern_accel.device.kv_cache import KVCache
from lantern_accel.strategy.sources import DraftConfig
from lantern_accel.strategy.strategy import Strategy

Value = TypeVar("Value", bound=DraftConfig)
Serving = TypeVar("Serving", bound="type[Source]")
S = TypeVar("S", bound=State)
#: What is drafted, and what is judged.
D = TypeVar("D")
J = TypeVar("J")


@dataclass(frozen=True)
class DraftContext(Generic[Value]):
    """What the drafts of one step are made for.

    ``config``: the value that was chosen; ``verifying``: what runs the target. ``drafter`` and its
    ``cache`` are None for a source that needs no drafter; ``copy``: the quantized target, where one was
    given. ``longest``: the drafts of the engine's longest step; None: these are.
    """

    config: Value
    geometry: Geometry
    session: Session
    verifying: TargetRunner
    drafter: Drafter | None = None
    cache: KVCache | None = None
    copy: Target | None = None
    longest: Source | None = None


@dataclass(frozen=True)
class Sizing:
    """What a step's sizes follow from; ``longest``: those of the engine's longest step, once known."""

    target: Target
    greedy: bool
    longest: Geometry | None = None


class DraftSource(ABC, Generic[Value, S, D, J]):
    """The drafts of one step: functions of static buffers, which a device captures with the step.

    No method reads a value on the host, and no shape depends on one. Whatever is drafted, decoding stays
    exact: the better the drafts, the fewer the steps.
    """

    state_type: ClassVar[type[State]]
    """The buffers of such steps."""
    rewrites: ClassVar[bool] = False
    """Whether a step writes the target's cache more than once (:attr:`.KVLayout.rewritten`)."""
    returns: ClassVar[bool] = False
    """Whether drafts can be taken up again after plain steps."""
    settles: ClassVar[bool] = False
    """Whether drafts carry over between steps, so that acceptance recovers some steps after a change."""

    def __init__(self, given: DraftContext[Value]) -> None:
        self.given, self.ops, self.geometry = given, given.session.ops, given.geometry
        self.verifying = given.verifying

    @classmethod
    def select_class(cls, strategy: Strategy, greedy: bool) -> type[Source]:
        """Return the class that serves a strategy."""
        return cls

    @classmethod
    @abstractmethod
    def add_sizes(cls, g: Geometry, value: Value, given: Sizing) -> Geometry:
        """Return a step's sizes, of ``g``, those that all sources have."""

    @classmethod
    def shorter(cls, value: Value, length: int) -> DraftConfig:
        """Return the source of steps that add at most ``length`` tokens, on the same buffers."""
        return value.of_length(length)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Tensors that :meth:`begin`, :meth:`draft` and :meth:`after` change in place, by name."""
        return {}

    def begin(self, state: S, features: Tensor, weights: Tensor) -> None:
        """Get ready for a request's first step: its prompt was run and its first token is known.

        ``features [R, P, D]``: the target's, of the prompt; ``weights [B, V]``: what the first token was
        sampled from, greedily the logits.
        """

    def prepare(self, state: S) -> None:
        """Write drafts that a fused step finds in the state."""

    @abstractmethod
    def draft(self, state: S) -> D:
        """Propose what comes after the known tokens.

        ``state.tokens [B, N + 1]`` are known up to position ``state.length [B]``.
        """

    @abstractmethod
    def verify(self, state: S, drafted: D, slots: int | None = None) -> tuple[Tensor, Tensor]:
        """Run every node in one pass; return features ``[R, T, D]`` and guided logits [B, T, V].

        ``slots``: how many of the cache are looked at, the first ones; None: all.
        """

    @abstractmethod
    def judge(self, state: S, drafted: D, logits: Tensor) -> J:
        """Say which drafts are kept, by guided ``logits [B, T, V]`` of the step's nodes."""

    @abstractmethod
    def commit(self, state: S, drafted: D, features: Tensor, judged: J) -> None:
        """Write the tokens that became known, call ``after``, move images on, and count the step.

        ``after`` takes note of what was kept, before the state's length moves on. Complete images stay
        as they are.
        """

    def describe(self, state: S) -> plan.Source | None:
        """Describe the source for a fused step; None: the step runs operator by operator."""
        return None

    def fuse(self, step: plan.FusedStep | None) -> None:
        """Take what the device does of the step at once, some of which may be the source's own work."""

    def widening(self, state: S) -> Callable[[], None] | None:
        """Return what must run before a step of this length after shorter ones; None: nothing."""
        return None


Source = DraftSource[Any, Any, Any, Any]
#: What serves each source.
SERVED: dict[type[DraftConfig], type[Source]] = {}


def register(source: type[DraftConfig]) -> Callable[[Serving], Serving]:
    """Say what serves a source: ``@register(MySource)`` above a subclass of :class:`DraftSource`."""

    def add_class(made: Serving) -> Serving:
        SERVED[source] = made
        return made

    return add_class
