"""The slot table: nothing moves on commit, and no committed slot is written again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.engines import NAMED, SAMPLED, TREES, Models, engine_of, start
from support.tiny import tiny_models
from torch import Tensor

from lantern_accel.decoding.engine import Engine
from lantern_accel.decoding.sources.tree import TreeDrafts
from lantern_accel.decoding.trees import Accepted
from lantern_accel.strategy.values import Strategy


@pytest.fixture(scope="module")
def models() -> Models:
    return tiny_models(0)


def committed(engine: Engine) -> tuple[list[Tensor], Tensor]:
    """Return every layer's keys by position, and each row's committed positions."""
    g, verifying = engine.geometry, engine.verifying
    slots = verifying.branches.rows(engine.state.slot_of) + g.prefix
    layers = range(verifying.cache.layout.layers)
    keys = [verifying.cache.read(layer, slots)[0] for layer in layers]
    return keys, verifying.branches.rows(engine.state.length)


def follow(engine: Engine, accepted_of: object = None) -> int:
    """Decode; after every step compare the committed keys with those from before it."""
    g, state = engine.geometry, engine.state
    steps = 0
    while int(state.length.min()) < g.tokens - 1:
        before, lengths = committed(engine)
        known = state.slot_of.clone()
        engine.step()
        steps += 1
        order = torch.arange(g.image_slots).expand(g.batch, -1)
        assert torch.equal(state.slot_of.sort(dim=1).values, order)
        assert torch.equal(state.slot_of.gather(1, state.place_of), order)
        after, _ = committed(engine)
        for row, count in enumerate(lengths.tolist()):
            image = row % g.batch
            assert torch.equal(state.slot_of[image, :count], known[image, :count])
            for old, new in zip(before, after, strict=True):
                assert torch.equal(old[row, :count], new[row, :count])
        assert steps < 2 * g.tokens
    return steps


@pytest.mark.parametrize("name", ["eagle", "eagle2", "lantern++"])
def test_committed_slots_are_never_written(models: Models, name: str) -> None:
    engine = engine_of(models, NAMED[name], SAMPLED, batch=3)
    start(engine)
    with torch.inference_mode():
        assert follow(engine) >= (engine.geometry.tokens - 1) / (engine.geometry.depth + 1)


def any_path(engine: Engine, share: float) -> Callable[..., Accepted]:
    """Return a judge that accepts a random child with probability ``share``, level by level."""
    generator = torch.Generator().manual_seed(3)

    def accept(state: Any, tree: Any, logits: Tensor) -> Accepted:
        batch, depth = len(logits), engine.geometry.depth
        path = torch.zeros(batch, depth + 1, dtype=torch.int64)
        length = torch.zeros(batch, dtype=torch.int64)
        for image in range(batch):
            node = 0
            for level in range(depth):
                count = int(tree.num_children[image, node])
                if not count or float(torch.rand((), generator=generator)) >= share:
                    break
                pick = int(torch.randint(count, (), generator=generator))
                node = int(tree.first_child[image, node]) + pick
                path[image, level + 1] = node
                length[image] += 1
        return Accepted(
            path, length, logits[:, 0].argmax(-1), logits[:, 0], torch.zeros(batch, depth)
        )

    return accept


@pytest.mark.parametrize("pattern", ["random", "none", "all"])
@pytest.mark.parametrize("tree", ["mc_sim", "chain4", "lopsided"])
def test_any_pattern_of_acceptance_keeps_the_table(
    models: Models, tree: str, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(models, Strategy(drafts=TREES[tree]), SAMPLED, batch=4)
    share = {"none": 0.0, "all": 1.0, "random": 0.7}[pattern]
    monkeypatch.setattr(engine.source, "judge", any_path(engine, share))
    start(engine)
    with torch.inference_mode():
        follow(engine)


def test_a_slot_that_is_handed_out_twice_is_found(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, commit = engine_of(models, NAMED["eagle"], SAMPLED), TreeDrafts.commit

    def careless(self, state, *rest):  # type: ignore[no-untyped-def]
        commit(self, state, *rest)
        if int(state.length.min()) > 8:
            state.slot_of[:, 9] = state.slot_of[:, 3]

    monkeypatch.setattr(TreeDrafts, "commit", careless)
    start(engine)
    with torch.inference_mode(), pytest.raises(AssertionError):
        follow(engine)
