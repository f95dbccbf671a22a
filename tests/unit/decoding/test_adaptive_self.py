"""Drafts of the model's own weights whose number changes: the law stays the target's, in every family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.engines import engine_of, finish, start
from support.moving import (
    IMAGES,
    SAMPLING,
    Decide,
    Walk,
    against,
    at_random,
    by_acceptance,
    each_its_own,
    law_models,
    misfit_of,
)
from support.tiny import tiny_models
from torch import Tensor

from lantern_accel.decoding.sources.copy import CopyDrafts
from lantern_accel.families.registry import families
from lantern_accel.generation.calibrate import count
from lantern_accel.nn import rounding as rounding_module
from lantern_accel.nn.rounding import Rounded, rounding
from lantern_accel.nn.transformer import REFERENCE, projections, rounded_copy
from lantern_accel.strategy.values import Sampling, SelfDrafts, Strategy
from lantern_accel.testing import tiny

#: A sound sampler misses by more than this once in a million tests.
SOUND = 4.9


def drafted(
    lengths: tuple[int, ...] = (1, 2, 4), weights: str = "int4", window: int = 0
) -> Strategy:
    return Strategy(drafts=SelfDrafts.over(lengths, weights=weights, window=window))


@pytest.mark.parametrize(
    ("window", "decide"),
    [
        (0, at_random),
        *(pytest.param(0, decide, marks=pytest.mark.long) for decide in (by_acceptance, against)),
        *(
            pytest.param(2, decide, marks=pytest.mark.long)
            for decide in (at_random, by_acceptance, against)
        ),
    ],
)
def test_images_follow_the_enumerated_law_whatever_counts_decide(
    decide: Decide, window: int
) -> None:
    engine = engine_of(law_models(), drafted(window=window), SAMPLING, IMAGES)
    assert misfit_of(engine, decide) < SOUND


@pytest.mark.long
def test_even_a_rule_that_reads_drafts_changes_nothing() -> None:
    def looks(gains: Tensor, state: Any) -> Tensor:
        following = state.tokens.gather(1, (state.length + 1).clamp(max=4).unsqueeze(1))[:, 0]
        return torch.where(following == 1, 1, 4)

    engine = engine_of(law_models(), drafted(), SAMPLING, IMAGES)
    with torch.inference_mode():
        assert torch.equal(each_its_own(engine, looks), each_its_own(engine, at_random))


class Coin:
    """A rule that takes any length."""

    def __init__(self, lengths: list[int], seed: int) -> None:
        self.lengths, self.generator = lengths, torch.Generator().manual_seed(seed)

    def begin(self) -> int:
        return self.observe(None)

    def observe(self, block: Any) -> int:
        return self.lengths[int(torch.randint(0, len(self.lengths), (), generator=self.generator))]

    def forget(self, row: int) -> None:
        pass


@pytest.mark.parametrize(
    "family",
    [
        # The rows of its images have ends; the frozen images have the others' copies.
        one.name if one.name == "emu3" else pytest.param(one.name, marks=pytest.mark.long)
        for one in families()
    ],
)
def test_every_family_draws_plain_tokens_for_a_batch_of_prompts(family: str) -> None:
    model = tiny.tiny_model(REFERENCE, torch.device("cpu"), torch.float32, family)
    shape = model.family.usual_shape(model)
    target, _ = model.family.target_for_shape(model, shape)
    fewer = rounded_copy(model.target, REFERENCE, rounding("int4"))
    copy, _ = model.family.target_for_shape(replace(model, target=fewer), shape)
    scale = 2.5 if model.manifest.defaults.sampling.guided else 1.0

    def drawn(tree: Any, seed: int, temperature: float) -> Tensor:
        sampling = Sampling(temperature=temperature, cfg_scale=scale)
        strategy = Strategy() if tree is None else Strategy(drafts=tree)
        engine = engine_of((target, None), strategy, sampling, 3, copy=copy)
        if len(engine.lengths) > 1:
            engine.chosen = Coin(engine.lengths, seed)
        vars(engine)["model"] = model
        tiny.start(engine, seed)
        return engine.run().tokens

    with torch.inference_mode():
        for temperature in (0.0, 1.0):
            want = drawn(None, 4, temperature)
            for window in (0, 3):
                tree = SelfDrafts.over((1, 2, 5), weights="int4", window=window)
                assert torch.equal(drawn(tree, 4, temperature), want)


# --- what is wrong is seen -------------------------------------------------------------------------


def test_keys_that_the_copy_leaves_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the check of a step that follows drafts writes nothing."""
    small = tiny_models(0, dim=64)
    ops, sampling = small[0].ops, Sampling(top_k=0, top_p=0.95, cfg_scale=2.0)
    engine = engine_of(small, drafted((1, 3, 5)), sampling, 2, ops=ops, rule=Walk(5, 1, 3))
    want = finish(engine_of(small, Strategy(), sampling, 2, ops=ops), seed=5).tokens
    assert torch.equal(finish(engine, seed=5).tokens, want)
    write, guess, checking = ops.write, CopyDrafts.prepare, {"now": False}

    def planted(*given: Any) -> None:
        if not checking["now"]:
            write(*given)

    def guessed(self: Any, state: Any) -> None:
        checking["now"] = False
        guess(self, state)
        checking["now"] = True

    monkeypatch.setattr(ops, "write", planted, raising=False)
    monkeypatch.setattr(CopyDrafts, "prepare", guessed)
    assert not torch.equal(finish(engine, seed=5).tokens, want)


def test_rounding_that_reaches_the_target_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what is rounded for the copy replaces the target's own weights."""
    sampling, small = Sampling(top_k=0, cfg_scale=2.0), tiny_models(0, dim=64)
    want = finish(engine_of(small, Strategy(), sampling, 2)).tokens

    def decoded() -> Tensor:
        return finish(engine_of(small, drafted((1, 3, 5)), sampling, 2)).tokens

    assert torch.equal(decoded(), want)
    rounded = rounding_module.rounded

    def planted(weight: Tensor, *how: Any) -> Rounded:
        made = rounded(weight, *how)
        weight.copy_(made.dense(weight.dtype))
        return made

    monkeypatch.setattr(rounding_module, "rounded", planted)
    assert not torch.equal(decoded(), want)


# --- buffers and values ----------------------------------------------------------------------------


def test_the_copy_is_one_and_its_settings_follow() -> None:
    engine = engine_of(law_models(), drafted((1, 2, 3, 4)), SAMPLING, 2)
    assert len({id(one.source.copy) for n, one in engine.by_length.items() if n > 1}) == 1
    assert engine.lengths == [1, 2, 3, 4]
    assert engine.changes["source.state.tokens"] is engine.source.copy.session.state.tokens
    warmer = SAMPLING.model_copy(update={"temperature": 0.5})
    engine.configure(engine.strategy, warmer)
    assert float(engine.source.copy.session.runtime_params.temperature) == 0.5
    assert len(projections(engine.source.copy.verifying.target)) > 0


def test_tokens_are_counted_and_lengths_timed() -> None:
    sampling = Sampling(temperature=0, cfg_scale=2.0)
    engine = engine_of(law_models(), drafted(weights="int8"), sampling, 3)
    finish(engine)
    start(engine)
    with torch.inference_mode():
        gained, steps = count(engine, 2, 1)
    assert steps == 3 and 3 <= gained <= 6


def test_shorter_drafts_take_their_share_of_passes() -> None:
    drafts = SelfDrafts(length=8, window=4, passes=4)
    assert [drafts.of_length(n + 1).copy_passes for n in (1, 2, 4, 8)] == [1, 1, 2, 4]
    assert [SelfDrafts.over((1, 9)).of_length(n + 1).copy_passes for n in (1, 8)] == [1, 8]
