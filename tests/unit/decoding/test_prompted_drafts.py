"""Drafters of prompted targets: drafts change no token, and the cache changes no feature."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from support.engines import LOPSIDED, engine_of
from torch import Tensor

from lantern_accel.device.operations import TensorOps
from lantern_accel.families.base import Model
from lantern_accel.families.prompted_drafter import PromptedDrafter
from lantern_accel.strategy.sources import AnyKind, DraftLength
from lantern_accel.strategy.values import ChainTree, DynamicTree, NoTree, Sampling, Strategy, Window
from lantern_accel.testing.tiny import tiny_model

FAMILIES = ("janus", "glm_image", "emu3")
TREES: dict[str, AnyKind] = {
    "eagle": LOPSIDED,
    "eagle2": DynamicTree(top_k=3, depth=2, total=9),
    "chain": ChainTree(length=3),
    "chains that move": ChainTree(
        length=3,
        draft_lengths=tuple(
            DraftLength(length=n, cost=1.0, tokens_per_step=1.0) for n in (1, 2, 4)
        ),
    ),
    "scd": Window(length=4),
}


@cache
def model_of(name: str) -> Model:
    return tiny_model(TensorOps(), torch.device("cpu"), torch.float32, name)


def sampling(model: Model, temperature: float) -> Sampling:
    scale = 2.5 if model.family.guided else 1.0
    return Sampling(temperature=temperature, cfg_scale=scale, top_k=20, top_p=0.95)


def engine_on(model: Model, tree: AnyKind, given: Sampling, batch: int) -> Any:
    parts = model.family.target_for_shape(model, model.family.usual_shape(model))
    return engine_of(parts, Strategy(drafts=tree), given, batch)


def begin(model: Model, one: Any, images: list[int], seed: int = 5) -> None:
    made = model.family.tiny_conditions(model, 3, seed).pick(images)
    rows = model.family.rows(model, made, one.sampling)
    one.start(rows.condition, rows.mask, one.randomness(seed, images))


def drawn(name: str, tree: AnyKind, temperature: float, batch: int = 3) -> Tensor:
    model = model_of(name)
    given = sampling(model, temperature)
    out = []
    with torch.inference_mode():
        one = engine_on(model, tree, given, batch)
        for first in range(0, 3, batch):
            begin(model, one, list(range(first, first + batch)))
            out.append(one.run().tokens)
    return torch.cat(out)


@cache
def vanilla(name: str, temperature: float) -> Tensor:
    return drawn(name, NoTree(), temperature)


@pytest.mark.parametrize(("temperature", "batch"), [(0.0, 1), (0.9, 3)])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_draft_draws_vanillas_tokens(
    name: str, tree: str, temperature: float, batch: int
) -> None:
    found = drawn(name, TREES[tree], temperature, batch)
    assert torch.equal(found, vanilla(name, temperature))


@pytest.mark.parametrize("name", FAMILIES)
def test_with_a_cache_features_are_those_of_the_dense_pass(name: str) -> None:
    """Prompts of several lengths, padded; float32, products over rows of some tens of numbers."""
    model = model_of(name)
    fresh = model.family.fresh_drafter(model.target, 1, model.drafter.taps)
    fresh.load_state_dict(model.drafter.state_dict())
    fresh.eval()
    one = engine_on(model, ChainTree(length=3), sampling(model, 0.0), 3)
    caught: list[tuple[Tensor, Tensor, Tensor]] = []
    drafting = one.source
    real = drafting.catch_up

    def catch_up(state: Any) -> tuple[Any, Tensor]:
        ahead, out = real(state)
        caught.append((state.length.clone(), state.tokens.clone(), out.clone()))
        return ahead, out

    drafting.catch_up = catch_up
    with torch.inference_mode():
        begin(model, one, [0, 1, 2])
        tokens = one.run().tokens
        made = model.family.tiny_conditions(model, 3, 5)
        rows = model.family.rows(model, made, one.sampling)
        branches = one.sampling.branches
        codes = tokens.repeat(branches, 1)
        mask = rows.mask.repeat(len(codes) // len(rows.mask), 1)
        states = model.target.forward_dense(rows.condition, codes[:, :-1], mask, fresh.taps)
        dense = fresh.forward_image(
            rows.condition, codes[:, :-1], fresh.fused(states[:, :-1]), mask[:, :-1]
        )
    assert not torch.equal(mask, torch.ones_like(mask))
    prefix, compared = rows.condition.shape[1], 0
    for length, _, out in caught:
        for row in range(len(codes)):
            at = int(length[row % 3])
            if at < tokens.shape[1] - 1:
                # What was read last is the token at `at`, whose entry follows the prompt's.
                want = dense[row, prefix - 1 + at]
                torch.testing.assert_close(out[row, 0], want, rtol=1e-4, atol=1e-4)
                compared += 1
    assert compared > len(codes) * 5


@pytest.mark.parametrize("name", FAMILIES[:2])
def test_a_drafter_has_no_tables_of_its_own(name: str) -> None:
    model = model_of(name)
    drafter, target = model.drafter, model.target
    assert isinstance(drafter, PromptedDrafter)
    assert not any("words" in key or "codes" in key for key in drafter.state_dict())
    assert drafter.words.data_ptr() == target.tok_embeddings.weight.data_ptr()
    assert drafter.codes.data_ptr() == target.code_table.data_ptr()
    assert torch.equal(drafter.rope_cos, target.rope_cos[1:])
    other = {"prefix_length": target.config.prefix_length + 3}
    longer = target.resized(**other)
    beside = drafter.beside(longer)
    assert len(beside.rope_cos) == len(longer.rope_cos) - 1 == len(drafter.rope_cos) + 3
    assert beside.fc.weight is drafter.fc.weight
    assert len(drafter.rope_cos) == len(target.rope_cos) - 1
