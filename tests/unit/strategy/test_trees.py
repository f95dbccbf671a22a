"""Trees that are cut to what a device's costs favour."""

from __future__ import annotations

import pytest

from lantern_accel.strategy.sources import AnyKind
from lantern_accel.strategy.trees import (
    EAGLE2_TREE,
    MC_SIM_7B_63,
    NAIVE_EXTEND_57,
    STATIC_TREES,
    cut_tree,
    tree_paths,
)
from lantern_accel.strategy.values import ChainTree, DynamicTree, NoTree, StaticTree, Window


@pytest.mark.parametrize("nodes", [0, 1, 2, 3, 4, 5, 6, 9, 16, 40])
@pytest.mark.parametrize(
    "tree", [*STATIC_TREES.values(), EAGLE2_TREE, DynamicTree(top_k=1, depth=6, total=8)]
)
def test_a_cut_tree_has_so_many_nodes_or_stays(tree: AnyKind, nodes: int) -> None:
    cut = cut_tree(tree, nodes)
    size, depth = cut.size
    if tree.size[0] <= nodes:
        assert cut is tree
    else:
        # Two at least: a tree without drafts would be another strategy.
        assert size == max(nodes, 2) and type(cut) is type(tree)
        assert 1 <= depth <= tree.size[1]


def test_the_likeliest_drafts_stay() -> None:
    chain, pair = [(0,), (0, 0)], [(0,), (1,), (0, 0)]
    assert [sorted(tree_paths(cut_tree(NAIVE_EXTEND_57, n))) for n in (3, 4)] == [
        sorted(chain),
        sorted(pair),
    ]
    five = cut_tree(MC_SIM_7B_63, 5)
    assert isinstance(five, StaticTree) and five.name == "mc_sim_7b_63, 5 nodes"
    assert set(five.paths) == {(0,), (1,), (0, 0), (0, 0, 0)}


def test_beams_are_about_as_wide_as_deep() -> None:
    shapes = {n: cut_tree(EAGLE2_TREE, n) for n in (2, 3, 5, 12)}
    assert shapes == {
        2: DynamicTree(top_k=1, depth=0, total=2),
        3: DynamicTree(top_k=1, depth=1, total=3),
        5: DynamicTree(top_k=2, depth=2, total=5),
        12: DynamicTree(top_k=3, depth=4, total=12),
    }


@pytest.mark.parametrize("tree", [NoTree(), ChainTree(length=9), Window(length=16)])
def test_other_sources_of_drafts_stay(tree: AnyKind) -> None:
    assert cut_tree(tree, 2) is tree
