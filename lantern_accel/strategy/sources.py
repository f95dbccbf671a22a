"""Sources of drafts as values: each says where a step's drafts come from, and how many there are.

A source is one class, registered by its ``kind`` when it is defined; what it does in a step is
registered with :func:`lantern_accel.decoding.sources.register`. The command line, JSON and reports then
take it: ``--strategy KIND``, ``--strategy NAME:drafts=KIND:field=value,...`` and ``{"kind": KIND, ...}``.
A kind that nothing has defined is looked up among the entry points of the group
``lantern_accel.sources``, by its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    SerializeAsAny,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from lantern_accel.bounds import MOST_DEPTH, MOST_NODES
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
SOURCES: dict[str, type[DraftConfig]] = {}


class DraftConfig(Registered):
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

    def of_length(self, length: int) -> DraftConfig:
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


class AdaptiveSource(DraftConfig):
    """A source whose steps may have fewer drafts than all, as the host chooses from step to step.

    ``draft_lengths`` rise to that of all drafts; none: every step has all of them.
    """

    draft_lengths: tuple[DraftLength, ...] = ()

    @classmethod
    def over(cls, lengths: Sequence[int], **fields: object) -> Self:
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


#: What a window's newest drafts are sampled from.
Fresh = Literal["uniform", "above", "head"]


class NoTree(DraftConfig):
    """Plain autoregressive decoding: one token a step, no drafter."""

    kind: Literal["none"] = "none"
    by_name: ClassVar[bool] = False

    def refusal(self, relaxed: bool, coupling: str | None) -> str | None:
        nothing = "a strategy without a tree drafts nothing that could be relaxed"
        return nothing if relaxed else None

    @property
    def shape(self) -> tuple[Path, ...]:
        return ()


class ChainTree(AdaptiveSource):
    """One drafted token after another; with ``draft_lengths`` the host may shorten it at any step."""

    kind: Literal["chain"] = "chain"
    needs_drafter: ClassVar[bool] = True
    by_name: ClassVar[bool] = False
    length: int = Field(4, ge=1, le=64, description="drafted tokens a step")

    @property
    def shape(self) -> tuple[Path, ...]:
        return chain_paths(self.length)

    def of_length(self, length: int) -> DraftConfig:
        return NoTree() if length == 1 else ChainTree(length=length - 1)


class StaticTree(DraftConfig):
    """A tree of fixed shape, as in EAGLE-1 and LANTERN++; drafts are sampled without replacement.

    ``paths`` lists every node but the root; the parent of a node must be there too, and siblings are
    ranked 0, 1, 2, ... without gaps.
    """

    kind: Literal["static"] = "static"
    needs_drafter: ClassVar[bool] = True
    by_name: ClassVar[bool] = False
    device_sets: ClassVar[Literal["", "tree", "length"]] = "tree"
    name: str = "custom"
    paths: tuple[Path, ...] = Field(min_length=1, max_length=MOST_NODES)

    @field_validator("paths")
    @classmethod
    def _is_a_tree(cls, paths: tuple[Path, ...]) -> tuple[Path, ...]:
        nodes = set(paths)
        if len(nodes) != len(paths):
            raise ValueError("a tree lists every node once")
        for path in paths:
            if len(path) > MOST_DEPTH:
                raise ValueError(f"a node is {len(path)} ranks deep, and {MOST_DEPTH} are the most")
            if not path or any(rank < 0 for rank in path):
                raise ValueError(f"{list(path)} is not a path of ranks from 0 on")
            if len(path) > 1 and path[:-1] not in nodes:
                raise ValueError(f"the node {list(path)} has no parent {list(path[:-1])}")
            if path[-1] > 0 and (*path[:-1], path[-1] - 1) not in nodes:
                raise ValueError(f"the node {list(path)} has no sibling of rank {path[-1] - 1}")
        return tuple(sorted(paths, key=lambda p: (len(p), p)))

    @property
    def shape(self) -> tuple[Path, ...]:
        return self.paths

    def text(self, longest: int) -> str:
        return f"trees of {len(self.paths)} drafts, up to {longest - 1} deep"


class DynamicTree(DraftConfig):
    """EAGLE-2's tree: a beam of the drafter's most likely paths, the best ``total`` nodes kept."""

    kind: Literal["dynamic"] = "dynamic"
    needs_drafter: ClassVar[bool] = True
    by_name: ClassVar[bool] = False
    top_k: int = Field(10, ge=1, le=64, description="beam width, and children a node")
    depth: int = Field(4, ge=0, le=32, description="levels below the first")
    total: int = Field(59, ge=2, le=MOST_NODES, description="nodes, the root included")

    @model_validator(mode="after")
    def _has_candidates(self) -> DynamicTree:
        pool = self.top_k + self.depth * self.top_k**2
        if self.total - 1 > pool:
            raise ValueError(
                f"total {self.total} asks for more nodes than top_k {self.top_k} and depth "
                f"{self.depth} propose ({pool} and the root)"
            )
        return self

    @property
    def size(self) -> tuple[int, int]:
        return self.total, self.depth + 1

    @property
    def widest(self) -> int:
        return self.top_k


class Window(AdaptiveSource):
    """A window of drafts that the target itself improves from step to step: no drafter, no tree.

    ``fresh`` says what a draft is sampled from that no pass has seen yet: any code (``uniform``), or the
    distribution of the position one row above (``above``; this project's); with ``head`` the model's
    draft head guesses, which needs the coupling invariant. Behind a rejected draft every one becomes the
    token that its noise chooses (SCD-GS, arXiv 2510.24211), or that of one of the last ``passes`` which
    had seen this past (this project's). Under the coupling ``maximal`` a window is SJD's.

    ``draft_lengths``: lengths between which the host moves, rising to the whole; none: every step is
    ``length`` long.
    """

    kind: Literal["window"] = "window"
    by_name: ClassVar[bool] = False
    device_sets: ClassVar[Literal["", "tree", "length"]] = "length"
    root: ClassVar[int] = 0
    windowed: ClassVar[bool] = True
    length: int = Field(
        16, ge=2, le=256, description="tokens of the window, the last known included"
    )
    fresh: Fresh = "above"
    passes: int = Field(4, ge=0, le=16, description="passes whose drafts are recalled; 0: none")

    @property
    def size(self) -> tuple[int, int]:
        return self.length, self.length - 1

    def refusal(self, relaxed: bool, coupling: str | None) -> str | None:
        if relaxed:
            return (
                "a window's drafts are the model's own guesses, and nothing is relaxed there; relax a "
                "drafter's drafts, as lantern and lantern++ do, or use exact acceptance"
            )
        if coupling == "maximal" and (self.fresh != "uniform" or self.draft_lengths):
            return (
                "with the coupling 'maximal' a window is SJD's: of one length, fresh drafts of any code; "
                "choose the strategy 'sjd', or the coupling 'invariant'"
            )
        return None

    def of_length(self, length: int) -> DraftConfig:
        return self.model_copy(update={"length": length, "draft_lengths": ()})

    def text(self, longest: int) -> str:
        by = " by its draft head" if self.fresh == "head" else ""
        return f"windows of up to {longest} tokens{by}"


class SelfDrafts(AdaptiveSource):
    """Drafts by a copy of the target's own quantized weights, checked by the target in one pass.

    The copy guesses ``length`` tokens, one a pass, or in windows of its own of ``window`` tokens, in
    ``passes`` passes (0: a third of the drafts). ``draft_lengths``: of drafts and one, rising to those
    of ``length``.
    """

    kind: Literal["self"] = "self"
    by_name: ClassVar[bool] = False
    length: int = Field(4, ge=1, le=128, description="drafted tokens a step")
    weights: Literal["int8", "int6", "int4", "fp8"] = Field("int8", description="the copy's")
    window: int = Field(0, ge=0, le=128, description="tokens of the copy's own window; 0: none")
    passes: int = Field(0, ge=0, le=128, description="of the copy's window, a step; 0: by length")

    @model_validator(mode="after")
    def _fits(self) -> SelfDrafts:
        if self.window == 1 or (self.passes and not self.window):
            raise ValueError(
                "the copy's own window has 2 tokens or more (0: none), and passes belong to one"
            )
        most = self.length + 1
        if self.window > most:
            raise ValueError(
                f"the copy's own window of {self.window} tokens is longer than the {self.length} drafts "
                "and one that the target checks; take more drafts or a shorter window"
            )
        return self

    def refusal(self, relaxed: bool, coupling: str | None) -> str | None:
        if relaxed or coupling == "maximal":
            return (
                "drafts of the model's own weights are compared with the tokens that the seed decides; "
                "use exact acceptance and the coupling 'invariant'"
            )
        return None

    @property
    def copy_weights(self) -> str:
        return self.weights

    def text(self, longest: int) -> str:
        return f"up to {longest - 1} drafts of the model's own weights in {self.weights}"

    @property
    def copy_passes(self) -> int:
        """Passes of the copy a step."""
        return (self.passes or -(-self.length // 3)) if self.window else self.length

    def of_length(self, length: int) -> DraftConfig:
        """Return fewer drafts with their share of the passes, rounded; NoTree for 1."""
        drafts = length - 1
        passes = max(
            min(self.passes, 1), (2 * self.passes * drafts + self.length) // (2 * self.length)
        )
        update = {"length": drafts, "passes": passes, "draft_lengths": ()}
        return self.model_copy(update=update) if drafts else NoTree()

    @property
    def size(self) -> tuple[int, int]:
        return self.length + 1, self.length

    @property
    def widest(self) -> int:
        return 1


def source_class(kind: str) -> type[DraftConfig] | None:
    """Return the source of this kind; None: there is none. Raises StrategyError for a broken package."""
    known = kind in SOURCES or any(entry_points(group=GROUP, name=kind))
    return DraftConfig.of_kind(kind) if known else None


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
AnyKind = Annotated[
    SerializeAsAny[DraftConfig], BeforeValidator(DraftConfig.read_value), WithJsonSchema(_SCHEMA)
]
