"""Names the published trees, lists a tree's paths, and reads trees and windows from text."""

from __future__ import annotations

import math

from lantern_accel.errors import StrategyError, did_you_mean
from lantern_accel.strategy.rules import validate_model
from lantern_accel.strategy.sources import DraftConfig, DynamicTree, Path, StaticTree, source_class


def tree_paths(tree: DraftConfig) -> tuple[Path, ...]:
    """Return the paths of a tree whose shape is known in advance; () without a tree."""
    if tree.shape is None:
        raise StrategyError(f"drafts of the kind {tree.kind!r} have no paths before they are made")
    return tree.shape


class TreeTables:
    """A static tree's topology as tables, built once from its paths."""

    def __init__(self, paths: tuple[Path, ...]) -> None:
        nodes: list[Path] = [(), *sorted(paths, key=lambda p: (len(p), p))]
        index = {path: i for i, path in enumerate(nodes)}
        self.nodes = len(nodes)
        self.max_depth = max(len(p) for p in nodes)
        self.parents = [index[path[:-1]] for path in nodes]
        self.depths = [len(p) for p in nodes]
        self.children: list[list[int]] = [[] for _ in nodes]
        for i in range(1, self.nodes):
            self.children[self.parents[i]].append(i)
        #: Non-leaf nodes at each depth, in node order: the groups of siblings are sampled from them.
        self.inner = [
            [i for i in range(self.nodes) if self.depths[i] == d and self.children[i]]
            for d in range(self.max_depth)
        ]
        self.max_children = tuple(max(len(self.children[i]) for i in level) for level in self.inner)

    @property
    def groups(self) -> int:
        """Groups of siblings, one a non-leaf node."""
        return sum(len(level) for level in self.inner)


def cut_tree(tree: DraftConfig, nodes: int) -> DraftConfig:
    """Return a drafter's tree with at most ``nodes`` nodes, the root included, and at least one draft.

    A static tree keeps the likeliest drafts: one level deeper halves what a draft is worth, one sibling
    further quarters it. A dynamic tree gets a beam about as wide as deep. Other sources stay as they
    are.
    """
    if not isinstance(tree, StaticTree | DynamicTree) or tree.size[0] <= max(nodes, 2):
        return tree
    nodes = max(nodes, 2)
    if isinstance(tree, DynamicTree):
        wide = min(tree.top_k, math.isqrt(nodes), nodes - 1)
        return DynamicTree(top_k=wide, depth=min(tree.depth, nodes - 1 - wide), total=nodes)
    likely = sorted(tree.paths, key=lambda path: (len(path) + 2 * sum(path), len(path), path))
    return StaticTree(name=f"{tree.name}, {nodes} nodes", paths=tuple(likely[: nodes - 1]))


def _paths(text: str) -> tuple[Path, ...]:
    return tuple(tuple(int(c) for c in word) for word in text.split())


#: Official default for LlamaGen and Anole: 57 drafts, 5/13/16/14/9 at depths 1 to 5.
NAIVE_EXTEND_57 = StaticTree(
    name="naive_extend_57",
    paths=_paths(
        "0 1 2 3 4 00 01 02 03 10 11 12 20 21 22 30 31 40 000 001 002 003 010 011 012 020 021 022 "
        "030 031 100 101 110 200 0000 0001 0002 0003 0010 0011 0012 0020 0021 0030 0100 0101 0110 "
        "0200 00000 00001 00002 00010 00011 00100 00101 00110 00200"
    ),
)
#: EAGLE-1's tree, the official default for Lumina-mGPT: 25 drafts, 4/8/8/3/2.
MC_SIM_7B_63 = StaticTree(
    name="mc_sim_7b_63",
    paths=_paths(
        "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
    ),
)
#: Small trees for devices on which every verified node costs time.
SMALL_8 = StaticTree(name="small_8", paths=_paths("0 1 2 00 01 000 0000"))
SMALL_12 = StaticTree(name="small_12", paths=_paths("0 1 2 00 01 02 10 000 001 0000 00000"))
SMALL_16 = StaticTree(
    name="small_16", paths=_paths("0 1 2 3 00 01 02 10 11 000 001 010 0000 0001 00000")
)

STATIC_TREES = {
    tree.name: tree for tree in (NAIVE_EXTEND_57, MC_SIM_7B_63, SMALL_8, SMALL_12, SMALL_16)
}
EAGLE2_TREE = DynamicTree(top_k=10, depth=4, total=59)


def parse_drafts(text: str) -> DraftConfig:
    """Read a source of drafts from text, as ``--strategy NAME:drafts=TEXT`` takes it.

    ``none``; ``chain:4``; a static tree's name; ``dynamic`` or ``dynamic:K,DEPTH,TOTAL``; or paths
    of ranks such as ``0,1,00,01,000`` (single digits); or ``window:16,above,passes=2`` and
    ``self:16,int6,window=16,passes=6``, whose words may come in any order
    (:meth:`.Registered.parse`). Raises :class:`StrategyError`.
    """
    kind, _, rest = text.strip().partition(":")
    if kind in STATIC_TREES and not rest:
        return STATIC_TREES[kind]
    words = text.replace(",", " ").split()
    if words and all(word.isascii() and word.isdecimal() for word in words):
        paths = [[int(c) for c in word] for word in words]
        return validate_model(StaticTree, {"paths": paths}, "drafts")
    source = source_class(kind)
    if source is None or source is StaticTree:
        known = [*STATIC_TREES, "none", "chain:4", "dynamic", "window:16"]
        raise StrategyError(f"unknown tree {text[:80]!r}{did_you_mean(kind, known)}")
    return source.parse(rest)
