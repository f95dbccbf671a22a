"""Drafters of prompted targets: the cache changes no feature, and they have no tables of their own.

That their drafts change no token is in ``test_invariance.py``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from support.engines import of_family, request_of, sampling_of
from torch import Tensor

from lantern_accel.device.operations import TensorOps
from lantern_accel.families.prompted_drafter import PromptedDrafter
from lantern_accel.strategy.values import ChainTree, Strategy
from lantern_accel.testing.tiny import TinyModel, tiny_model

FAMILIES = ("janus", "glm_image", "emu3")


@cache
def model_of(name: str) -> TinyModel:
    return tiny_model(TensorOps(), torch.device("cpu"), torch.float32, name)


@pytest.mark.parametrize("name", FAMILIES)
def test_with_a_cache_features_are_those_of_the_dense_pass(name: str) -> None:
    """Prompts of several lengths, padded; float32, products over rows of some tens of numbers."""
    model = model_of(name)
    fresh = model.family.fresh_drafter(model.target, 1, model.drafter.taps)
    fresh.load_state_dict(model.drafter.state_dict())
    fresh.eval()
    given = sampling_of(model, 0.0)
    engine = of_family(model, Strategy(drafts=ChainTree(length=3)), given, 3)
    caught: list[tuple[Tensor, Tensor]] = []
    real = engine.source.catch_up

    def catch_up(state: Any) -> tuple[Any, Tensor]:
        ahead, out = real(state)
        caught.append((state.length.clone(), out.clone()))
        return ahead, out

    engine.source.catch_up = catch_up
    with torch.inference_mode():
        condition, mask, keys = request_of(model, engine, [0, 1, 2], seed=5)
        engine.start(condition, mask, keys)
        codes = engine.run().tokens.repeat(given.branches, 1)
        mask = mask.repeat(len(codes) // len(mask), 1)
        states = model.target.forward_dense(condition, codes[:, :-1], mask, fresh.taps)
        fused = fresh.fuse_states(states[:, :-1])
        dense = fresh.forward_image(condition, codes[:, :-1], fused, mask[:, :-1])
    assert not mask.all()
    prefix, compared = condition.shape[1], 0
    for length, out in caught:
        for row in range(len(codes)):
            at = int(length[row % 3])
            if at < codes.shape[1] - 1:
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
    longer = target.resize(prefix_length=target.config.prefix_length + 3)
    beside = drafter.for_target(longer)
    assert len(beside.rope_cos) == len(longer.rope_cos) - 1 == len(drafter.rope_cos) + 3
    assert beside.fc.weight is drafter.fc.weight
    assert len(drafter.rope_cos) == len(target.rope_cos) - 1
