"""Trees: what is refused, the shapes of the official ones, and the links of dynamic ones."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import engine_of
from support.tiny import captions, tiny_models
from torch import Tensor

from lantern_accel.decoding.sources.beam import BeamDrafts
from lantern_accel.decoding.trees import DraftTree, topology_of
from lantern_accel.strategy.sources import chain_paths
from lantern_accel.strategy.trees import (
    EAGLE2_TREE,
    MC_SIM_7B_63,
    NAIVE_EXTEND_57,
    STATIC_TREES,
    TreeTables,
    parse_drafts,
    tree_paths,
)
from lantern_accel.strategy.values import (
    ChainTree,
    DynamicTree,
    NoTree,
    Sampling,
    StaticTree,
    Strategy,
)

# --- shapes ------------------------------------------------------------------------------------------


def level_counts(tree: StaticTree) -> list[int]:
    count = Counter(len(path) for path in tree.paths)
    return [count[depth] for depth in sorted(count)]


def test_the_official_trees_have_their_published_levels() -> None:
    assert level_counts(NAIVE_EXTEND_57) == [5, 13, 16, 14, 9]
    assert level_counts(MC_SIM_7B_63) == [4, 8, 8, 3, 2]
    assert NAIVE_EXTEND_57.size == (58, 5)
    assert MC_SIM_7B_63.size == (26, 5)
    assert EAGLE2_TREE.size == (59, 5)
    assert (EAGLE2_TREE.top_k, EAGLE2_TREE.depth) == (10, 4)


def test_sizes_of_the_other_trees() -> None:
    assert NoTree().size == (1, 0)
    assert ChainTree(length=3).size == (4, 3)
    assert tree_paths(NoTree()) == ()
    assert chain_paths(3) == ((0,), (0, 0), (0, 0, 0))
    assert {name: tree.size[0] for name, tree in STATIC_TREES.items()} == {
        "naive_extend_57": 58, "mc_sim_7b_63": 26, "small_8": 8, "small_12": 12, "small_16": 16,
    }  # fmt: skip


# --- static tables -----------------------------------------------------------------------------------


@st.composite
def static_paths(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    """Draw a tree: every node gets 0 to 3 children until there are enough."""
    wanted = draw(st.integers(1, 25))
    nodes: list[tuple[int, ...]] = [()]
    for node in nodes:
        count = draw(st.integers(0, 3))
        if node == nodes[-1]:
            count = max(count, 1)
        nodes += [(*node, rank) for rank in range(min(count, wanted + 1 - len(nodes)))]
        if len(nodes) > wanted:
            break
    return tuple(draw(st.permutations(nodes[1:])))


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(static_paths())
def test_tables_link_every_node_as_its_path_says(paths: tuple[tuple[int, ...], ...]) -> None:
    tree = StaticTree(paths=paths)
    tables = TreeTables(tree.paths)
    nodes = [(), *tree.paths]
    topology = {k: v[1] for k, v in topology_of(tables, 2, torch.device("cpu")).items()}
    inner: list[int] = []
    for i, path in enumerate(nodes):
        assert int(topology["depth"][i]) == len(path)
        if path:
            assert nodes[int(topology["parent"][i])] == path[:-1]
            first = int(topology["first_child"][topology["parent"][i]])
            assert i == first + path[-1], "siblings are consecutive and in the order of their ranks"
            assert tables.max_children[len(path) - 1] > path[-1]
        kids = sum(1 for other in nodes if other and other[:-1] == path)
        assert int(topology["num_children"][i]) == kids
        if kids:
            inner.append(i)
            assert int(topology["group"][i]) == len(inner) - 1
        for j, other in enumerate(nodes):
            assert bool(topology["visible"][i, j]) == (path[: len(other)] == other)
    assert tables.groups == len(inner)
    for depth in range(tables.max_depth + 1):
        level = [i for i, path in enumerate(nodes) if len(path) == depth]
        order = sorted(level, key=lambda i: int(topology["row_rank"][i]))
        assert [nodes[i] for i in order] == sorted(nodes[i] for i in level)
    widest = [
        max(p[-1] for p in tree.paths if len(p) == d + 1) + 1 for d in range(tables.max_depth)
    ]
    assert list(tables.max_children) == widest


def test_paths_are_sorted_by_depth_then_rank() -> None:
    tree = StaticTree(paths=((0, 0), (1,), (0,), (0, 0, 0), (1, 0)))
    assert tree.paths == ((0,), (1,), (0, 0), (1, 0), (0, 0, 0))


# --- text ----------------------------------------------------------------------------------------------


def test_trees_are_read_from_text() -> None:
    assert parse_drafts("none") == NoTree()
    assert parse_drafts("chain") == ChainTree()
    assert parse_drafts(" chain:7 ") == ChainTree(length=7)
    assert parse_drafts("dynamic") == EAGLE2_TREE
    assert parse_drafts("dynamic:4,2,20") == DynamicTree(top_k=4, depth=2, total=20)
    assert parse_drafts("mc_sim_7b_63") is MC_SIM_7B_63
    own = parse_drafts("0,1,00,01,000")
    assert own == StaticTree(paths=((0,), (1,), (0, 0), (0, 1), (0, 0, 0)))
    assert parse_drafts("0 1 00") == StaticTree(paths=((0,), (1,), (0, 0)))


# --- dynamic links -------------------------------------------------------------------------------------


def check_links(tree: DraftTree, tops: int) -> None:
    """Every table says the same tree; children follow their parents side by side."""
    batch, nodes = tree.tokens.shape
    for image in range(batch):
        parent = tree.parent[image].tolist()
        depth = tree.depth[image].tolist()
        assert parent[0] == 0 and depth[0] == 0
        for node in range(1, nodes):
            assert parent[node] < node
            assert depth[node] == depth[parent[node]] + 1
            ancestors = {node}
            at = node
            while at:
                at = parent[at]
                ancestors.add(at)
            assert set(tree.visible[image, node].nonzero().flatten().tolist()) == ancestors
        for node in range(nodes):
            kids = [n for n in range(1, nodes) if parent[n] == node]
            assert int(tree.num_children[image, node]) == len(kids)
            if kids:
                first = int(tree.first_child[image, node])
                assert kids == list(range(first, first + len(kids)))
                codes = tree.tokens[image, kids].tolist()
                assert len(set(codes)) == len(codes)
                assert len(kids) <= tree.max_children[depth[node]]
    assert int(tree.depth.max()) <= len(tree.max_children) and max(tree.max_children) == tops


def check_closed(tree: DynamicTree, kept: Tensor, origin: Tensor) -> None:
    """Whoever is among the best has its parent there."""
    parents = origin.gather(1, kept // tree.top_k)
    for mine, above in zip(kept.tolist(), parents.tolist(), strict=True):
        assert {p - 1 for p in above if p} <= set(mine)


@pytest.mark.parametrize("top_k", [1, 2, 3, 0])
@pytest.mark.parametrize(
    "shape", [(5, 4, 2), (5, 4, 9), (5, 4, 40), (1, 5, 7), (3, 0, 4), (2, 2, 11)]
)
def test_dynamic_trees_keep_children_with_their_parents(
    top_k: int, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # With a filter of one code its child is as likely as the node itself, and all else is on the
    # floor: nothing but ties.
    wide, depth, total = shape
    models, tree = tiny_models(0), DynamicTree(top_k=wide, depth=depth, total=total)
    sampling = Sampling(temperature=1.0, top_k=top_k)
    engine = engine_of(models, Strategy(drafts=tree), sampling, 3)
    drafted: list[DraftTree] = []
    plain = BeamDrafts._link

    def spying(
        root: Tensor, tree: DynamicTree, codes: Tensor, kept: Tensor, origin: Tensor
    ) -> DraftTree:
        check_closed(tree, kept, origin)
        drafted.append(made := plain(root, tree, codes, kept, origin))
        assert torch.equal(made.tokens[:, 0], root)
        assert torch.equal(made.tokens[:, 1:], codes.gather(1, kept.sort(-1).values))
        return made

    monkeypatch.setattr(BeamDrafts, "_link", staticmethod(spying))
    features, mask = captions(models[0], 3)
    with torch.inference_mode():
        engine.start(features, mask, engine.randomness(0, [0, 1, 2]))
        engine.run()
    assert len(drafted) > 3
    for made in drafted:
        check_links(made, wide)
