"""The sources of drafts as values, and the strategies that have names.

``vanilla``, ``eagle``, ``eagle2``, ``lantern`` and ``lantern++`` are the papers' combinations:
EAGLE arXiv 2401.15077, EAGLE-2 2406.16858, LANTERN 2410.03355, LANTERN++ 2502.06352. ``sjd`` (arXiv
2410.01699) and ``scd`` (2510.24211) draft in a window, without a drafter.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from lantern_accel.bounds import MOST_DEPTH, MOST_NODES
from lantern_accel.errors import StrategyError, did_you_mean
from lantern_accel.strategy.rules import Exact, Lantern, LanternPP, validated
from lantern_accel.strategy.sampling import Sampling
from lantern_accel.strategy.sources import (
    AdaptiveSource,
    DraftSource,
    NoTree,
    Path,
    chain_paths,
    named_sources,
    source_class,
    with_tokens_per_step,
)
from lantern_accel.strategy.strategy import (
    AUTO,
    NO_DRAFTER,
    SELF,
    WINDOW_STRATEGIES,
    Coupling,
    NeighbourSpace,
    Residual,
    Strategy,
)

#: Names of other files that are imported from here too.
__all__ = [
    "AUTO",
    "NO_DRAFTER",
    "SELF",
    "WINDOW_STRATEGIES",
    "Coupling",
    "NeighbourSpace",
    "NoTree",
    "Residual",
    "Sampling",
    "Strategy",
    "with_tokens_per_step",
]

#: What a window's newest drafts are sampled from.
Fresh = Literal["uniform", "above", "head"]


class ChainTree(AdaptiveSource):
    """One drafted token after another; with ``draft_lengths`` the host may shorten it at any step."""

    kind: Literal["chain"] = "chain"
    needs_drafter: ClassVar[bool] = True
    by_name: ClassVar[bool] = False
    length: int = Field(4, ge=1, le=64, description="drafted tokens a step")

    @property
    def shape(self) -> tuple[Path, ...]:
        return chain_paths(self.length)

    def of_length(self, length: int) -> DraftSource:
        return NoTree() if length == 1 else ChainTree(length=length - 1)


class StaticTree(DraftSource):
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


class DynamicTree(DraftSource):
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

    def of_length(self, length: int) -> DraftSource:
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

    def of_length(self, length: int) -> DraftSource:
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


#: Lengths of auto's window, few since a longer one takes some steps to settle.
AUTO_LENGTHS = (1, 2, 4, 8, 16)
#: Lengths of auto's drafts by a copy of the target's own weights, those drafts and one.
AUTO_SELF = (1, 2, 3, 5, 7, 9)
#: Lengths of auto's chains of a drafter's drafts, those drafts and one.
AUTO_CHAIN = (1, 2, 4, 6)
#: Strategies whose drafts are a drafter's, and plain decoding.
TREE_STRATEGIES = ("vanilla", "eagle", "eagle2", "lantern", "lantern++")
STRATEGIES = (*TREE_STRATEGIES, *WINDOW_STRATEGIES, SELF)


def named_strategy(
    name: str,
    *,
    static: StaticTree,
    dynamic: DynamicTree,
    lantern: Lantern | None = None,
    lantern_pp: LanternPP | None = None,
) -> Strategy:
    """Return the strategy called ``name`` over the given trees; unknown names raise with the nearest."""
    points: dict[str, tuple[Any, Any]] = {
        AUTO: (Window.over(AUTO_LENGTHS), Exact()),
        "vanilla": (NoTree(), Exact()),
        "eagle": (static, Exact()),
        "eagle2": (dynamic, Exact()),
        "lantern": (dynamic, lantern or Lantern()),
        "lantern++": (static, lantern_pp or LanternPP()),
        "sjd": (Window(fresh="uniform"), Exact()),
        "scd": (Window(), Exact()),
        SELF: (SelfDrafts(), Exact()),
    }
    if name not in points:
        source = source_class(name)
        if source is None or not source.by_name:
            known = [*points, *named_sources()]
            text = f"unknown strategy {name!r}{did_you_mean(name, known)}"
            raise StrategyError(text, field="strategy")
        return Strategy(name=name, drafts=validated(source, {}, name))
    tree, acceptance = points[name]
    return Strategy(name=name, drafts=tree, acceptance=acceptance)
