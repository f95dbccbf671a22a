"""Chains that change their length: the law stays the target's, and plain decoding is never left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.moving import (
    IMAGES,
    SAMPLING,
    TOKENS,
    VOCAB,
    Decide,
    Walk,
    against,
    at_random,
    by_acceptance,
    misfit_of,
)
from support.tiny import captions, tiny_models
from torch import Tensor

from lantern_accel.decoding.adaptive_chain import AdaptiveChain
from lantern_accel.decoding.engine import Engine
from lantern_accel.decoding.engines import engine_for
from lantern_accel.device.operations import TensorOps
from lantern_accel.errors import StrategyError
from lantern_accel.strategy.values import ChainTree, DraftLength, Sampling, Strategy, adaptive_chain

#: A sound sampler misses by more than this once in a million tests.
SOUND = 4.9


def engine_of(
    images: int, lengths: tuple[int, ...] = (1, 2, 4), sampling: Sampling = SAMPLING, **more: Any
) -> AdaptiveChain:
    models = tiny_models(2, vocab=VOCAB, grid=2, prefix=2, dim=8, sharpness=1.0)
    strategy = Strategy(tree=adaptive_chain(lengths), coupling="maximal")
    return AdaptiveChain(*models, TensorOps(), strategy, sampling, batch=images, **more)


def run(engine: Any, seed: int = 5) -> Any:
    features, mask = captions(engine.verifying.target, engine.geometry.batch)
    condition = features
    if engine.sampling.guided:
        condition = torch.cat((features, engine.verifying.target.unconditional(len(features))))
    with torch.inference_mode():
        images = list(range(engine.geometry.batch))
        engine.start(condition, mask, engine.randomness(seed, images))
        return engine.run()


@pytest.mark.parametrize("decide", [at_random, by_acceptance, against])
def test_images_follow_the_target_whatever_counts_decide(decide: Decide) -> None:
    assert misfit_of(engine_of(IMAGES), decide) < SOUND


@pytest.mark.parametrize("lengths", [(1,), (4,), (2, 3), (4, 2, 3, 1)])
def test_greedily_every_rule_gives_the_plain_tokens(lengths: tuple[int, ...]) -> None:
    sampling = Sampling(temperature=0, cfg_scale=2.0)
    said: list[Tensor] = []
    for rule in (Walk(*lengths), Walk(1)):
        models, strategy = tiny_models(0, grid=4), Strategy(tree=adaptive_chain((1, 2, 3, 4)))
        engine = AdaptiveChain(*models, TensorOps(), strategy, sampling, batch=2, rule=rule)
        said.append(run(engine).tokens)
    assert torch.equal(*said)


@pytest.mark.parametrize("taps", [(), (1,)])
def test_one_length_decodes_as_the_chain_alone(taps: tuple[int, ...]) -> None:
    sampling = Sampling(top_k=20, cfg_scale=2.0)
    models = tiny_models(1, taps=taps)
    draft_lengths = AdaptiveChain(
        *models, TensorOps(), Strategy(tree=adaptive_chain((1, 4))), sampling, batch=2, rule=Walk(4)
    )
    alone = Engine(*models, TensorOps(), Strategy(tree=ChainTree(length=3)), sampling, batch=2)
    assert torch.equal(run(draft_lengths).tokens, run(alone).tokens)


def test_plain_decoding_is_not_left() -> None:
    rule = Walk(4, 1, 4, 4)
    done = run(engine_of(2, rule=rule, sampling=Sampling(top_k=2, cfg_scale=2.0)))
    assert [block.length for block in rule.blocks][:1] == [4]
    assert len(rule.blocks) == 1  # nothing is asked of a rule that has no say
    assert int(done.steps.max()) >= TOKENS - 4


def test_a_rule_hears_counts_and_what_is_left() -> None:
    rule = Walk(4, 2, 3)
    models = tiny_models(0, grid=4)
    strategy, sampling = Strategy(tree=adaptive_chain((1, 2, 3, 4))), Sampling(top_k=20)
    engine = AdaptiveChain(*models, TensorOps(), strategy, sampling, batch=3, rule=rule)
    done = run(engine)
    assert all(b.steps == 1 and all(0 <= g <= b.length for g in b.gained) for b in rule.blocks)
    assert 0 < max(rule.blocks[-1].left) <= 4  # the last one completes every image
    assert done.histogram.shape[1] == 4


def test_it_is_the_engine_of_a_chain_with_paces() -> None:
    models, ops = tiny_models(0), TensorOps()
    with_paces = engine_for(*models, ops, Strategy(tree=adaptive_chain((1, 3))), SAMPLING)
    without = engine_for(*models, ops, Strategy(tree=ChainTree(length=2)), SAMPLING)
    assert isinstance(with_paces, AdaptiveChain) and isinstance(without, Engine)
    with pytest.raises(StrategyError, match="no drafter"):
        engine_for(models[0], None, ops, Strategy(tree=adaptive_chain((1, 3))), SAMPLING)


@pytest.mark.parametrize("lengths", [(1, 2), (2, 1, 4), (4, 4)])
def test_paces_rise_to_the_chain(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="do not rise to 4"):
        ChainTree(length=3, draft_lengths=tuple(DraftLength(length=n) for n in lengths))
