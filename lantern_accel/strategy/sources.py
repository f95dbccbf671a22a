"""Sources of drafts as values: each says where a step's drafts come from, and how many there are.

A source is one class, registered by its ``kind`` when it is defined; what it does in a step is
registered with :func:`lantern_accel.decoding.sources.register`. The command line, JSON and reports then
take it: ``--strategy KIND``, ``--strategy NAME:tree=KIND:field=value,...`` and ``{"kind": KIND, ...}``.
A kind that nothing has defined is looked up among the entry points of the group
``lantern_accel.sources``, by its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, SerializeAsAny, WithJsonSchema, model_validator

from lantern_accel.errors import StrategyError
from lantern_accel.records import Frozen
from lantern_accel.strategy.rules import Registered

#: A node's ranks from the root: ``(0, 2)`` is the third-best child of the root's best child.
Path = tuple[int, ...]
#: The entry points of packages that have sources: ``KIND = "module"``.
GROUP = "lantern_accel.sources"


def chain_paths(length: int) -> tuple[Path, ...]:
    """Return the paths of a chain of ``length`` drafts."""
    return tuple((0,) * (i + 1) for i in range(length))


#: Every source that is defined, by kind.
SOURCES: dict[str, type[DraftSource]] = {}
#: Modules whose classes make a source's drafts, and the source's kind.
SERVED_BY: dict[str, str] = {}


class DraftSource(Registered):
    """Where drafts come from.

    A subclass gives ``kind`` (a ``Literal`` with a default), its fields, and :attr:`shape`, or the
    sizes that follow from them.
    """

    registry: ClassVar[dict[str, Any]] = SOURCES
    sort: ClassVar[str] = "source of drafts"
    needs_drafter: ClassVar[bool] = False
    """Whether drafts are a drafter's."""
    by_name: ClassVar[bool] = True
    """Whether a strategy has the source's kind as its name."""
    device_sets: ClassVar[Literal["", "tree", "length"]] = ""
    """What a device decides where nobody chose: a tree that ``tune`` found, a length by costs of rows."""
    windowed: ClassVar[bool] = False
    """Whether they are a window of the target's own guesses, which the seed decides unless asked."""
    root: ClassVar[int] = 1
    """Tokens of a step's length that :meth:`text` does not count: the last known one."""

    @classmethod
    def of_kind(cls, kind: object) -> type[Self]:
        """Return the class of a kind, loading the package that has it; raises StrategyError."""
        if isinstance(kind, str) and kind not in SOURCES:
            import_module("lantern_accel.strategy.values")  # which has ours
        if isinstance(kind, str) and kind not in SOURCES:
            for one in entry_points(group=GROUP, name=kind):
                try:
                    one.load()
                except Exception as error:
                    raise StrategyError(
                        f"the source of drafts {kind!r} cannot be loaded from {one.value!r}: {error}; "
                        "update or remove the package that has it"
                    ) from error
        return super().of_kind(kind)

    @property
    def apart(self) -> bool:
        """Whether no other kind of drafts takes their place in a strategy, as a drafter's trees may."""
        return self.by_name or not (self.needs_drafter or self.kind == "none")

    @property
    def copy_weights(self) -> str | None:
        """What the weights of the target's copy that drafts are kept in; None: no copy drafts."""
        return None

    def refusal(self, relaxed: bool, coupling: str | None) -> str | None:
        """Say why no strategy has these drafts with relaxed acceptance or a coupling; None: one may."""
        return None

    def of_length(self, length: int) -> DraftSource:
        """Return the source of steps that add at most ``length`` tokens."""
        raise StrategyError(f"the source of drafts {self.kind!r} has steps of one length")

    def text(self, longest: int) -> str:
        """Say what drafts steps of up to ``longest`` tokens."""
        return f"up to {longest - self.root} drafts of the kind {self.kind}"

    @property
    def shape(self) -> tuple[Path, ...] | None:
        """The drafts of a step as paths of a tree; None where the shape is not known before them."""
        return None

    @property
    def size(self) -> tuple[int, int]:
        """Nodes of a step with the root, and the depth of the deepest draft."""
        if self.shape is None:
            raise StrategyError(
                f"the source of drafts {self.kind!r} does not say how many there are"
            )
        return 1 + len(self.shape), max((len(path) for path in self.shape), default=0)

    @property
    def widest(self) -> int:
        """The most drafts of one place."""
        return 1 + max((path[-1] for path in self.shape or ()), default=-1)


class NoTree(DraftSource):
    """Plain autoregressive decoding: one token a step, no drafter."""

    kind: Literal["none"] = "none"
    by_name: ClassVar[bool] = False

    def refusal(self, relaxed: bool, coupling: str | None) -> str | None:
        nothing = "a strategy without a tree drafts nothing that could be relaxed"
        return nothing if relaxed else None

    @property
    def shape(self) -> tuple[Path, ...]:
        return ()


class DraftLength(Frozen):
    """The most tokens that a step adds to an image, of n drafts in a row n + 1: 1 is plain decoding.

    ``cost``: a step's time relative to a plain one, on the device at hand; ``tokens_per_step``: what a
    step adds, on average over prompts. None: not known.
    """

    length: int = Field(ge=1, le=256)
    cost: float | None = Field(None, gt=0, allow_inf_nan=False)
    tokens_per_step: float | None = Field(None, ge=1, allow_inf_nan=False)


def with_tokens_per_step(
    draft_lengths: tuple[DraftLength, ...], known: Mapping[int, float]
) -> tuple[DraftLength, ...]:
    """Return lengths with the tokens per step that are known; what was measured before stays."""
    return tuple(
        one
        if one.tokens_per_step is not None or one.length not in known
        else one.model_copy(update={"tokens_per_step": known[one.length]})
        for one in draft_lengths
    )


class AdaptiveSource(DraftSource):
    """A source whose steps may have fewer drafts than all, as the host chooses from step to step.

    ``draft_lengths`` rise to that of all drafts; none: every step has all of them.
    """

    draft_lengths: tuple[DraftLength, ...] = ()

    @classmethod
    def over(cls, lengths: Sequence[int], **fields: Any) -> Self:
        """Return one with the most drafts of steps of ``lengths``, which the host may cut to the others.

        ``fields``: its others; ``length`` is the number of drafts, or a window's tokens.
        """
        made = [{"length": one} for one in sorted(lengths)]
        return cls(**{"length": max(lengths) - cls.root, "draft_lengths": made, **fields})

    @model_validator(mode="after")
    def _lengths_rise(self) -> AdaptiveSource:
        lengths = [one.length for one in self.draft_lengths]
        if lengths and (lengths != sorted(set(lengths)) or lengths[-1] != self.size[1] + 1):
            raise ValueError(
                f"draft_lengths of lengths {lengths} do not rise to {self.size[1] + 1}, drafts and one"
            )
        return self


def source_class(kind: str) -> type[DraftSource] | None:
    """Return the source of this kind; None: there is none. Raises StrategyError for a broken package."""
    known = kind in SOURCES or any(entry_points(group=GROUP, name=kind))
    return DraftSource.of_kind(kind) if known else None


def named_sources() -> list[str]:
    """Return the kinds that are names of strategies too, with those of packages that are not loaded."""
    brought = [one.name for one in entry_points(group=GROUP)]
    known = [kind for kind, one in SOURCES.items() if one.by_name]
    return list(dict.fromkeys([*known, *(name for name in brought if name not in SOURCES)]))


_SCHEMA = {
    "type": "object",
    "required": ["kind"],
    "properties": {"kind": {"type": "string"}},
    "description": "a source of drafts by its kind, with the fields of that source",
}
#: A source of drafts as a field of a model.
Tree = Annotated[
    SerializeAsAny[DraftSource], BeforeValidator(DraftSource.described), WithJsonSchema(_SCHEMA)
]
