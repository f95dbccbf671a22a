"""Settings that are data change without another engine; settings that are shapes are refused."""

from __future__ import annotations

import pytest
import torch
from support.engines import NAMED, SAMPLED, Models, engine_of, finish
from support.tiny import tiny_models

from lantern_accel.errors import StrategyError
from lantern_accel.strategy.rules import Exact
from lantern_accel.strategy.values import Sampling, Strategy

HOT = Sampling(temperature=1.7, top_k=40, top_p=0.5, cfg_scale=3.5, cfg_interval=9)
LOOSE = {"lantern": {"delta": 0.9}, "lantern++": {"lam": 30.0}}


@pytest.fixture(scope="module")
def models() -> Models:
    return tiny_models(0)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("vanilla", "lantern++") else pytest.param(name, marks=pytest.mark.long)
        for name in NAMED
    ],
)
def test_new_values_decode_as_a_new_engine_does(models: Models, name: str) -> None:
    strategy = NAMED[name].override(**LOOSE.get(name, {}))
    engine = engine_of(models, NAMED[name], SAMPLED, batch=2)
    first = finish(engine)
    engine.configure(strategy, HOT)
    changed = finish(engine)
    fresh = finish(engine_of(models, strategy, HOT, batch=2))
    assert torch.equal(changed.tokens, fresh.tokens)
    assert torch.equal(changed.quality_loss, fresh.quality_loss)
    assert not torch.equal(changed.tokens, first.tokens)
    engine.configure(NAMED[name], SAMPLED)
    assert torch.equal(finish(engine).tokens, first.tokens)


@pytest.mark.parametrize(
    ("strategy", "sampling"),
    [
        (NAMED["lantern++"].override(k=4), SAMPLED),
        (
            NAMED["lantern++"].model_copy(update={"acceptance": Exact()}),
            SAMPLED,
        ),
        (NAMED["lantern++"].override(tv_budget=0.1), SAMPLED),
        (NAMED["lantern++"], SAMPLED.model_copy(update={"top_k": 12})),
        (NAMED["lantern++"], SAMPLED.model_copy(update={"temperature": 0.0})),
        (NAMED["lantern++"], SAMPLED.model_copy(update={"cfg_scale": 1.0})),
    ],
    ids=["k", "rule", "budget", "top-k", "greedy", "guidance"],
)
def test_another_shape_is_refused(models: Models, strategy: Strategy, sampling: Sampling) -> None:
    engine = engine_of(models, NAMED["lantern++"], SAMPLED)
    with pytest.raises(StrategyError, match="their shapes differ"):
        engine.configure(strategy, sampling)


def test_a_budget_keeps_the_price_of_an_image_below_it(models: Models) -> None:
    loose = NAMED["lantern"].override(delta=0.9)
    free = finish(engine_of(models, loose, SAMPLED, batch=8))
    thrifty = finish(engine_of(models, loose.override(tv_budget=0.02), SAMPLED, batch=8))
    exact = loose.model_copy(update={"acceptance": Exact(), "coupling": "maximal"})
    strict = finish(engine_of(models, exact, SAMPLED, batch=8))
    per_token = thrifty.quality_loss / thrifty.tokens.shape[1]
    assert (free.quality_loss / free.tokens.shape[1]).mean() > 0.05
    assert 0 < per_token.mean() <= 0.02
    assert free.step_compression > thrifty.step_compression >= strict.step_compression
