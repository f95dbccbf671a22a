"""Drafts of the model's own weights whose number changes: the law stays the target's, in every family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.moving import (
    IMAGES,
    SAMPLING,
    VOCAB,
    Decide,
    Walk,
    against,
    at_random,
    by_acceptance,
    each_its_own,
    misfit_of,
    moving,
)
from support.tiny import captions, tiny_models
from torch import Tensor

from lantern_accel.decoding.calibrate import count
from lantern_accel.decoding.engine import Engine
from lantern_accel.decoding.sources.copy import CopyDrafts
from lantern_accel.device.operations import TensorOps
from lantern_accel.families.registry import families
from lantern_accel.nn import rounding as rounding_module
from lantern_accel.nn.rounding import Rounded, rounding
from lantern_accel.nn.transformer import REFERENCE, projections, rounded_copy
from lantern_accel.strategy.sources import DraftLength
from lantern_accel.strategy.values import Sampling, SelfDrafts, Strategy, self_drafted
from lantern_accel.testing import tiny

#: A sound sampler misses by more than this once in a million tests.
SOUND = 4.9


def engine_of(
    images: int,
    lengths: tuple[int, ...] = (1, 2, 4),
    window: int = 0,
    weights: str = "int4",
    sampling: Sampling = SAMPLING,
    **more: Any,
) -> Engine:
    target, _ = tiny_models(2, vocab=VOCAB, grid=2, prefix=2, dim=8, sharpness=1.0)
    copy = rounded_copy(target, REFERENCE, rounding(weights))
    strategy = Strategy(drafts=self_drafted(lengths, weights, window))
    return moving(target, strategy, sampling, copy=copy, batch=images, **more)


def run(engine: Any, seed: int = 5) -> Any:
    target, batch = engine.verifying.target, engine.geometry.batch
    condition, mask = captions(target, batch)
    if engine.sampling.guided:
        condition = torch.cat((condition, target.unconditional(batch)))
    with torch.inference_mode():
        engine.start(condition, mask, engine.randomness(seed, list(range(batch))))
        return engine.run()


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
    assert misfit_of(engine_of(IMAGES, window=window), decide) < SOUND


@pytest.mark.long
def test_even_a_rule_that_reads_drafts_changes_nothing() -> None:
    def looks(gains: Tensor, state: Any) -> Tensor:
        following = state.tokens.gather(1, (state.length + 1).clamp(max=4).unsqueeze(1))[:, 0]
        return torch.where(following == 1, 1, 4)

    engine = engine_of(IMAGES)
    with torch.inference_mode():
        assert torch.equal(each_its_own(engine, looks), each_its_own(engine, at_random))


def test_one_length_decodes_as_those_drafts_alone() -> None:
    target, _ = tiny_models(1)
    copy = rounded_copy(target, REFERENCE, rounding("int6"))
    sampling, ops = Sampling(top_k=20, cfg_scale=2.0), TensorOps()
    for window in (0, 3):
        strategy = Strategy(drafts=self_drafted((1, 2, 6), "int6", window))
        adaptive = moving(target, strategy, sampling, copy=copy, batch=2, rule=Walk(6))
        tree = SelfDrafts(length=5, weights="int6", window=window)
        alone = Engine(target, None, ops, Strategy(drafts=tree), sampling, batch=2, copy=copy)
        one, other = run(adaptive), run(alone)
        assert torch.equal(one.tokens, other.tokens) and torch.equal(one.steps, other.steps)


def test_plain_steps_are_left_again() -> None:
    target, _ = tiny_models(0)
    copy = rounded_copy(target, REFERENCE, rounding("int8"))
    strategy = Strategy(drafts=self_drafted((1, 3, 5)))
    rule = Walk(5, 1, 3)
    engine = moving(target, strategy, Sampling(top_k=20), copy=copy, batch=2, rule=rule)
    run(engine)
    assert [b.length for b in rule.blocks[:3]] == [5, 1, 3] and len(rule.blocks) > 3
    assert all(gained <= b.length * b.steps for b in rule.blocks for gained in b.gained)


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


@pytest.mark.parametrize("family", [one.name for one in families()])
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
        engine = Engine(target, None, REFERENCE, strategy, sampling, batch=3, copy=copy)
        if len(engine.lengths) > 1:
            engine.chosen = Coin(engine.lengths, seed)
        vars(engine)["model"] = model
        tiny.start(engine, seed)
        return engine.run().tokens

    with torch.inference_mode():
        for temperature in (0.0, 1.0):
            want = drawn(None, 4, temperature)
            for window in (0, 3):
                tree = self_drafted((1, 2, 5), "int4", window)
                assert torch.equal(drawn(tree, 4, temperature), want)


# --- what is wrong is seen -------------------------------------------------------------------------


def test_keys_that_the_copy_leaves_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the check of a step that follows drafts writes nothing."""
    target, _ = tiny_models(0, dim=64)
    copy = rounded_copy(target, REFERENCE, rounding("int4"))
    ops, sampling = target.ops, Sampling(top_k=0, top_p=0.95, cfg_scale=2.0)
    strategy = Strategy(drafts=self_drafted((1, 3, 5), "int4"))
    rule = Walk(5, 1, 3)
    engine = moving(target, strategy, sampling, copy=copy, ops=ops, batch=2, rule=rule)
    want = run(Engine(target, None, ops, Strategy(), sampling, batch=2)).tokens
    assert torch.equal(run(engine).tokens, want)
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
    assert not torch.equal(run(engine).tokens, want)


def test_rounding_that_reaches_the_target_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what is rounded for the copy replaces the target's own weights."""
    sampling, ops = Sampling(top_k=0, cfg_scale=2.0), TensorOps()
    strategy = Strategy(drafts=self_drafted((1, 3, 5), "int4"))
    target, _ = tiny_models(0, dim=64)
    want = run(Engine(target, None, ops, Strategy(), sampling, batch=2)).tokens

    def decoded() -> Tensor:
        copy = rounded_copy(target, REFERENCE, rounding("int4"))
        return run(Engine(target, None, ops, strategy, sampling, batch=2, copy=copy)).tokens

    assert torch.equal(decoded(), want)
    rounded = rounding_module.rounded

    def planted(weight: Tensor, *how: Any) -> Rounded:
        made = rounded(weight, *how)
        weight.copy_(made.dense(weight.dtype))
        return made

    monkeypatch.setattr(rounding_module, "rounded", planted)
    assert not torch.equal(decoded(), want)


def test_a_copy_of_other_weights_costs_steps_alone() -> None:
    """No law of the copy enters a test, so that none of a wrong copy can: it agrees less often."""
    sampling, ops = Sampling(top_k=20, cfg_scale=2.0), TensorOps()
    target, _ = tiny_models(0, dim=64)
    other, _ = tiny_models(9, dim=64)
    strategy = Strategy(drafts=self_drafted((1, 3, 5)))
    plain = run(Engine(target, None, ops, Strategy(), sampling, batch=2))
    own, wrong = (
        moving(target, strategy, sampling, copy=copy, ops=ops, batch=2, rule=Walk(5))
        for copy in (rounded_copy(target, REFERENCE, rounding("int8")), other)
    )
    near, far = run(own), run(wrong)
    assert torch.equal(near.tokens, plain.tokens) and torch.equal(far.tokens, plain.tokens)
    assert near.steps.sum() < far.steps.sum()


# --- buffers and values ----------------------------------------------------------------------------


def test_the_copy_is_one_and_its_settings_follow() -> None:
    engine = engine_of(2, lengths=(1, 2, 3, 4))
    assert len({id(one.source.copy) for n, one in engine.by_length.items() if n > 1}) == 1
    assert engine.lengths == [1, 2, 3, 4]
    assert engine.changes["source.state.tokens"] is engine.source.copy.session.state.tokens
    warmer = SAMPLING.model_copy(update={"temperature": 0.5})
    engine.configure(engine.strategy, warmer)
    assert float(engine.source.copy.session.runtime_params.temperature) == 0.5
    assert len(projections(engine.source.copy.verifying.target)) > 0


def test_tokens_are_counted_and_lengths_timed() -> None:
    engine = engine_of(3, sampling=Sampling(temperature=0, cfg_scale=2.0), weights="int8")
    run(engine)
    condition, mask = captions(engine.verifying.target, 3)
    condition = torch.cat((condition, engine.verifying.target.unconditional(3)))
    with torch.inference_mode():
        engine.start(condition, mask, engine.randomness(5, [0, 1, 2]))
        gained, steps = count(engine, 2, 1)
    assert steps == 3 and 3 <= gained <= 6


def test_shorter_drafts_take_their_share_of_passes() -> None:
    drafts = SelfDrafts(length=8, window=4, passes=4)
    assert [drafts.of_length(n + 1).copy_passes for n in (1, 2, 4, 8)] == [1, 1, 2, 4]
    assert [self_drafted((1, 9)).of_length(n + 1).copy_passes for n in (1, 8)] == [1, 8]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"length": 4, "draft_lengths": (DraftLength(length=1), DraftLength(length=4))},
            "do not rise to 5",
        ),
        ({"length": 4, "window": 6}, "longer than the 4 drafts"),
    ],
)
def test_drafts_that_cannot_be_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SelfDrafts(**values)
