"""The EAGLE drafter and its trees against tensors recorded from the official code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.engines import engine_of
from support.golden import golden
from support.recorded import lantern_drafter, lantern_target
from torch import Tensor
from torch.testing import assert_close

from lantern_accel.decoding.engine import Engine
from lantern_accel.decoding.sources.static import StaticDrafts
from lantern_accel.decoding.trees import DraftTree
from lantern_accel.strategy.sources import AnyKind
from lantern_accel.strategy.trees import EAGLE2_TREE, NAIVE_EXTEND_57
from lantern_accel.strategy.values import Sampling, Strategy

CLOSE = {"rtol": 0.0, "atol": 1e-4}
#: Positions of a prompt that the drafter reads, one fewer than the target.
PREFIX = 119


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


def same_tree(tree: DraftTree, tokens: Tensor, mask: Tensor, depth: Tensor) -> None:
    assert torch.equal(tree.tokens[0], tokens.flatten())
    assert torch.equal(tree.visible[0], mask.bool())
    assert torch.equal(tree.depth[0], depth)


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
    """Return what LANTERN's drafter drafts behind the recorded caption and the first token."""
    models = lantern_target(), lantern_drafter(mask_padding=False)
    engine = engine_of(models, Strategy(drafts=tree), Sampling(temperature=0, cfg_scale=3.0))
    engine.state.prefix_mask.fill_(True)
    ids, features = cap0["in_ids"], cap0["in_hidden"]
    assert not ids[:, :PREFIX].any()
    # The features end with the one that the first image token follows from, which is not a prompt's.
    engine.source.prefill(engine.state, features)
    feed(engine, ids[:, PREFIX:], features[:, PREFIX:])
    return engine, engine.source, engine.source.draft(engine.state)


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


# --- padded captions, where a drafter was trained to see the pads


def prefilled(cap: str, tree: AnyKind, mask_padding: bool) -> tuple[Engine, Tensor]:
    """Return an engine after a recorded caption, and the target's states over the prompt."""
    recorded, target, prefix = golden("lantern/pads"), lantern_target(), PREFIX + 1
    caption = recorded[f"{cap}.caption"]
    mask = torch.arange(prefix) >= prefix - len(caption)
    condition = torch.zeros(prefix, caption.shape[1]).masked_scatter(mask.unsqueeze(1), caption)
    models = target, lantern_drafter(mask_padding=mask_padding)
    engine = engine_of(models, Strategy(drafts=tree), Sampling(temperature=0, cfg_scale=3.0))
    rows = torch.stack((condition, target.unconditional(1)[0]))
    engine.session.load(rows, mask.unsqueeze(0), engine.randomness(0, [0]))
    states, _ = engine.verifying.prefill(engine.state)
    engine.prefill()
    return engine, states


@pytest.mark.parametrize("cap", ["cap0", "cap2"])
def test_pads_hold_what_was_recorded(cap: str) -> None:
    recorded = golden("lantern/pads")
    places = recorded[f"{cap}.places"].long()
    _, states = prefilled(cap, EAGLE2_TREE, mask_padding=False)
    assert_close(states[:, places], recorded[f"{cap}.hidden"], rtol=0, atol=1e-4)
    _, hidden = prefilled(cap, EAGLE2_TREE, mask_padding=True)
    assert (hidden[:, places] - recorded[f"{cap}.hidden"]).abs().max() > 0.1
    # What is drawn does not depend on what pads hold.
    assert_close(hidden[:, -1], states[:, -1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("cap", ["cap0", "cap2"])
@pytest.mark.parametrize(("tree", "name"), [(EAGLE2_TREE, "tree"), (NAIVE_EXTEND_57, "drafts")])
def test_drafts_after_a_padded_caption_are_the_recorded_ones(
    cap: str, tree: AnyKind, name: str
) -> None:
    recorded = golden("lantern/pads")
    engine, _ = prefilled(cap, tree, mask_padding=False)
    assert engine.state.root.tolist() == recorded[f"{cap}.root"].tolist()
    found = engine.source.draft(engine.state)
    assert found.tokens[0].tolist() == recorded[f"{cap}.{name}"].tolist()
