"""Trees: what is refused, the shapes of the official ones, and the links of dynamic ones."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import engine_of
from support.tiny import captions, tiny_models

from lantern_accel.decoding.sources.beam import BeamDrafts
from lantern_accel.decoding.trees import DraftTree, topology_of
from lantern_accel.errors import StrategyError
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
    with pytest.raises(StrategyError, match="before they are made"):
        tree_paths(EAGLE2_TREE)


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


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([[0], [0, 1]], "no sibling of rank 0"),
        ([[1]], "no sibling of rank 0"),
        ([[0], [1, 0]], r"the node \[1, 0\] has no parent \[1\]"),
        ([[0], [0]], "every node once"),
        ([[0], []], "not a path of ranks"),
        ([[0], [-1]], "not a path of ranks"),
        ([], "at least 1"),
    ],
)
def test_what_is_not_a_tree_is_refused(paths: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StaticTree(paths=paths)  # type: ignore[arg-type]


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chain:x", "'chain' has no field 'x'; it has length=..."),
        ("chain:4,4", "has no field '4'"),
        ("dynamic:1,2", "total 59 asks for more nodes"),
        ("chain:0", "length.*1 or more.*not 0"),
        ("chain:65", "64 or less"),
        ("dynamic:2,1,9", "asks for more nodes"),
        ("0,00,02", r"no sibling of rank 1"),
        ("1", r"no sibling of rank 0"),
        ("small_9", r"unknown tree 'small_9'; did you mean .*small_8"),
        ("chan:4", "did you mean chain:4"),
        ("", "unknown tree ''; known: .*naive_extend_57"),
        ("none:1", "'none' has no field '1'; it has no fields"),
        ("static:1", "unknown tree"),
    ],
)
def test_text_that_is_no_tree_is_refused_with_a_way_out(text: str, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        parse_drafts(text)


def test_a_dynamic_tree_needs_as_many_candidates_as_nodes() -> None:
    assert DynamicTree(top_k=2, depth=1, total=7).total == 7
    with pytest.raises(ValueError, match=r"total 8 asks for more nodes than .* \(6 and the root\)"):
        DynamicTree(top_k=2, depth=1, total=8)


# --- dynamic links -------------------------------------------------------------------------------------


def drafted_pool(
    tree: DynamicTree, seed: int, levels: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Simulate the drafter: codes, cumulative scores and origins of the whole pool, three images.

    ``levels`` distinct probabilities make ties, the case that parts children from parents.
    """
    generator = torch.Generator().manual_seed(seed)
    batch, k, vocab = 3, tree.top_k, 50

    def children(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        raw = torch.rand(batch, rows, vocab, generator=generator)
        raw = (raw * levels).floor() if levels else 8 * raw
        logp = (raw * 3).log_softmax(-1)
        if levels == 1:
            logp = torch.where(torch.arange(vocab) == 0, 0.0, -1e4).expand_as(logp)
        return logp.topk(k, dim=-1)

    score, code = children(1)
    scores, codes = [score[:, 0]], [code[:, 0]]
    origin = [torch.zeros(batch, 1, dtype=torch.int64)]
    beam_scores = scores[0]
    beam = torch.arange(k).expand(batch, -1)
    for level in range(tree.depth):
        best, code = children(k)
        margin = beam_scores.abs().unsqueeze(-1) * 2.0**-22 + 2.0**-30
        total = beam_scores.unsqueeze(-1) + best.clamp(max=0.0) - margin
        codes.append(code.flatten(1))
        scores.append(total.flatten(1))
        origin.append(beam + 1)
        beam_scores, pick = total.flatten(1).topk(k, dim=-1)
        beam = k + level * k * k + pick
    return torch.cat(codes, 1), torch.cat(scores, 1), torch.cat(origin, 1)


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


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    top_k=st.integers(1, 6),
    depth=st.integers(0, 5),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**31),
    levels=st.sampled_from([0, 1, 2, 4]),
)
def test_dynamic_trees_keep_children_with_their_parents(
    top_k: int, depth: int, share: float, seed: int, levels: int
) -> None:
    pool = top_k + depth * top_k**2
    tree = DynamicTree(top_k=top_k, depth=depth, total=2 + int(share * (pool - 1)))
    codes, scores, origin = drafted_pool(tree, seed, levels)
    root = torch.full((3,), 99)
    best = scores.topk(tree.total - 1, dim=-1).indices
    check_closed(tree, best, origin)
    kept = BeamDrafts._link(root, tree, codes, best, origin)
    assert kept.tokens.shape == (3, tree.total) and (kept.tokens[:, 0] == 99).all()
    check_links(kept, top_k)
    assert torch.equal(kept.tokens[:, 1:], codes.gather(1, best.sort(-1).values))


def check_closed(tree: DynamicTree, kept: torch.Tensor, origin: torch.Tensor) -> None:
    """Whoever is among the best has its parent there."""
    parents = origin.gather(1, kept // tree.top_k)
    for mine, above in zip(kept.tolist(), parents.tolist(), strict=True):
        assert {p - 1 for p in above if p} <= set(mine)


@pytest.mark.parametrize("top_k", [1, 2, 3, 0])
@pytest.mark.parametrize("total", [2, 9, 40])
def test_an_engines_dynamic_trees_keep_children_with_their_parents(
    top_k: int, total: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With a filter of one code its child is as likely as the node itself, and all else is on the
    # floor: nothing but ties.
    models = tiny_models(0)
    shape = DynamicTree(top_k=5, depth=4, total=total)
    sampling = Sampling(temperature=1.0, top_k=top_k)
    engine = engine_of(models, Strategy(drafts=shape), sampling, 3)
    drafted: list[DraftTree] = []
    plain = BeamDrafts._link

    def spying(
        root: torch.Tensor,
        tree: DynamicTree,
        codes: torch.Tensor,
        kept: torch.Tensor,
        origin: torch.Tensor,
    ) -> DraftTree:
        check_closed(tree, kept, origin)
        drafted.append(plain(root, tree, codes, kept, origin))
        return drafted[-1]

    monkeypatch.setattr(BeamDrafts, "_link", staticmethod(spying))
    features, mask = captions(models[0], 3)
    with torch.inference_mode():
        engine.start(features, mask, engine.randomness(0, [0, 1, 2]))
        engine.run()
    assert len(drafted) > 3
    for tree in drafted:
        check_links(tree, 5)
