"""The EAGLE drafter and its trees against tensors recorded from the official code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.engines import engine_of
from support.golden import golden
from support.recorded import lantern_drafter, lantern_target, published_drafter
from torch import Tensor
from torch.testing import assert_close

from lantern_accel.decoding.engine import Engine
from lantern_accel.decoding.sources.static import StaticDrafts
from lantern_accel.decoding.trees import DraftTree
from lantern_accel.families.llamagen.drafter import LlamaGenDrafter
from lantern_accel.families.llamagen.model import LlamaGenGPT
from lantern_accel.strategy.sources import AnyKind
from lantern_accel.strategy.trees import EAGLE2_TREE, NAIVE_EXTEND_57
from lantern_accel.strategy.values import DynamicTree, Sampling, Strategy

CLOSE = {"rtol": 0.0, "atol": 1e-4}
PREFIX = 119


def drafting_engine(
    target: LlamaGenGPT, drafter: LlamaGenDrafter, tree: AnyKind, cfg_scale: float
) -> tuple[Engine, StaticDrafts]:
    sampling = Sampling(temperature=0, cfg_scale=cfg_scale)
    engine = engine_of((target, drafter), Strategy(drafts=tree), sampling)
    engine.state.prefix_mask.fill_(True)
    return engine, engine.source


def feed(engine: Engine, ids: Tensor, features: Tensor) -> None:
    """Make the tokens ``ids [R, n]`` and the features they follow from pending."""
    state, count = engine.state, ids.shape[1]
    assert torch.equal(ids[0], ids[1]), "both guidance branches get the same tokens"
    known = int(state.length) + 1 if int(state.pending_count) else 0
    state.length.fill_(known + count - 1)
    state.pending_count.fill_(count)
    state.pending_tokens[:, :count] = ids[0]
    state.pending_features[:, :count] = features
    state.root.fill_(int(ids[0, -1]))


def prefill(engine: Engine, ids: Tensor, features: Tensor) -> None:
    """Run the prompt of recorded inputs ``[R, n]``, then feed the image tokens in two calls."""
    engine.state.reset()
    engine.state.prefix_mask.fill_(True)
    assert not ids[:, :PREFIX].any()
    # The features end with the one that the first image token follows from, which is not a prompt's.
    engine.source.prefill(engine.state, features[:, : PREFIX + 1])
    for part in (slice(PREFIX, PREFIX + 1), slice(PREFIX + 1, None)):
        if ids[:, part].shape[1]:
            feed(engine, ids[:, part], features[:, part])
            if part.stop is not None and ids.shape[1] > part.stop:
                engine.source.catch_up(engine.state)


def same_tree(tree: DraftTree, tokens: Tensor, mask: Tensor, depth: Tensor) -> None:
    assert torch.equal(tree.tokens[0], tokens.flatten())
    assert torch.equal(tree.visible[0], mask.bool())
    assert torch.equal(tree.depth[0], depth)


def test_cached_continuation_of_the_published_drafter() -> None:
    target, drafter = published_drafter()
    io = golden("lantern_drafters/llamagen_io")
    engine, drafting = drafting_engine(target, drafter, DynamicTree(top_k=4, total=30), 7.5)
    ids, features = io["input_ids"].clone(), io["hidden_states"]
    if ids[:, :PREFIX].any():
        pytest.fail("the recorded prompt is fed code 0")
    prefill(engine, ids, features)
    _, last = drafting.catch_up(engine.state)
    assert_close(last[:, 0], io["out_hidden"][:, -1], **CLOSE)
    before = {k: v.clone() for k, v in engine.state.buffers.items()}
    for count in (1, 2, 3):
        for name, value in before.items():
            getattr(engine.state, name).copy_(value)
        feed(engine, io["cont_ids"][:, :count], io["cont_hidden"][:, :count])
        _, last = drafting.catch_up(engine.state)
        assert_close(last[:, 0], io["cont_out"][:, count - 1], **CLOSE)


def test_the_published_drafters_dynamic_tree() -> None:
    target, drafter = published_drafter()
    io = golden("lantern_drafters/llamagen_io")
    engine, drafting = drafting_engine(target, drafter, DynamicTree(top_k=4, total=30), 7.5)
    prefill(engine, io["input_ids"], io["hidden_states"])
    tree = drafting.draft(engine.state)
    depth = io["tree_position_ids"] - io["tree_position_ids"][0]
    same_tree(tree, io["tree_draft_tokens"], io["tree_mask"][0, 0], depth)
    leaves = {int(path[path >= 0][-1]) for path in io["tree_retrieve_indices"]}
    assert leaves == set((tree.num_children[0] == 0).nonzero().flatten().tolist())


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def cap0() -> dict[str, Any]:
    return {k.removeprefix("cap0."): v for k, v in golden("lantern/drafter_io").items()}


def test_the_drafter_sees_pads_where_it_was_trained_seeing_them(cap0: dict[str, Any]) -> None:
    drafter = lantern_drafter(mask_padding=False)
    codes = cap0["in_ids"][:, PREFIX:]
    out = drafter.forward_image(None, codes, cap0["in_hidden"])
    assert_close(out, cap0["out_hidden"], **CLOSE)
    # The option that hides them changes the state of the first image token.
    hidden = torch.zeros(2, PREFIX, dtype=torch.bool)
    other = drafter.forward_image(None, codes, cap0["in_hidden"], hidden)
    assert (other[:, -1] - out[:, -1]).abs().max() > 1e-3


def drafted(cap0: dict[str, Any], tree: AnyKind) -> tuple[Engine, StaticDrafts, DraftTree]:
    """Return what LANTERN's drafter drafts behind the recorded caption."""
    models = lantern_target(), lantern_drafter(mask_padding=False)
    engine, drafting = drafting_engine(*models, tree, 3.0)
    prefill(engine, cap0["in_ids"], cap0["in_hidden"])
    return engine, drafting, drafting.draft(engine.state)


def test_dynamic_trees_first_and_after_a_commit(cap0: dict[str, Any]) -> None:
    engine, drafting, tree = drafted(cap0, EAGLE2_TREE)
    pos = cap0["dyn_pos"]
    same_tree(tree, cap0["dyn_draft_tokens"], cap0["dyn_mask"], pos - pos[0])
    # Greedy prefers the path whose leaf comes first.
    first: dict[int, int] = {}
    for rank, path in enumerate(cap0["dyn_retrieve"].tolist()):
        for node in path:
            first.setdefault(node, rank)
    first.pop(-1, None)
    nodes = sorted(first)
    assert nodes == list(range(59))
    for depth in range(1, 6):
        level = [n for n in nodes if int(tree.depth[0, n]) == depth]
        ours = sorted(level, key=lambda n: int(tree.row_rank[0, n]))
        assert ours == sorted(level, key=lambda n: first[n])
    # Three more tokens; scratch entries of the first tree must not leak into the second.
    ids = cap0["inc_ids_full"][:, 1 + PREFIX + 1 :]
    assert ids.shape[1] == cap0["inc_hidden"].shape[1] == 3
    feed(engine, ids, cap0["inc_hidden"])
    tree = drafting.draft(engine.state)
    pos = cap0["inc_pos"]
    same_tree(tree, cap0["inc_draft_tokens"], cap0["inc_mask"], pos - pos[0])


def test_the_static_tree_drafts_the_recorded_codes(cap0: dict[str, Any]) -> None:
    _, drafting, tree = drafted(cap0, NAIVE_EXTEND_57)
    same_tree(tree, cap0["static_tree_candidates"], cap0["static_mask"], cap0["static_pos"])
    assert tree.q is None
    # tree_indices: where each node's draft lies among [root, group 0's ten drafts, group 1's ...].
    drafts = torch.cat((tree.tokens[0, :1], cap0["static_tokens"].flatten()))
    assert torch.equal(tree.tokens[0], drafts[cap0["static_tree_indices"]])
    tables = drafting.tables
    assert tables is not None and (tables.groups, tables.nodes) == (25, 58)
    recorded = {tuple(n for n in path if n >= 0) for path in cap0["static_retrieve"].tolist()}
    ours = set()
    for leaf in (i for i in range(tables.nodes) if not tables.children[i]):
        path = [leaf]
        while path[0]:
            path.insert(0, tables.parents[path[0]])
        ours.add(tuple(path))
    assert ours == recorded
