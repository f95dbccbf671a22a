"""Chains that change their length: the law stays the target's, plain decoding is not left."""

from __future__ import annotations

import pytest
import torch
from support.engines import engine_of, finish
from support.moving import (
    IMAGES,
    SAMPLING,
    TOKENS,
    Decide,
    Walk,
    against,
    at_random,
    by_acceptance,
    law_models,
    misfit_of,
)
from support.tiny import tiny_models
from torch import Tensor

from lantern_accel.errors import StrategyError
from lantern_accel.strategy.sources import DraftLength
from lantern_accel.strategy.values import (
    ChainTree,
    Sampling,
    Strategy,
)

#: A sound sampler misses by more than this once in a million tests.
SOUND = 4.9


CHAIN = ChainTree.over((1, 2, 4))


@pytest.mark.parametrize(
    "decide",
    [at_random, *(pytest.param(one, marks=pytest.mark.long) for one in (by_acceptance, against))],
)
def test_images_follow_the_target_whatever_counts_decide(decide: Decide) -> None:
    strategy = Strategy(drafts=CHAIN, coupling="maximal")
    assert misfit_of(engine_of(law_models(), strategy, SAMPLING, IMAGES), decide) < SOUND


@pytest.mark.parametrize("lengths", [(1,), (4,), (2, 3), (4, 2, 3, 1)])
def test_greedily_every_rule_gives_the_plain_tokens(lengths: tuple[int, ...]) -> None:
    sampling = Sampling(temperature=0, cfg_scale=2.0)
    said: list[Tensor] = []
    for rule in (Walk(*lengths), Walk(1)):
        strategy = Strategy(drafts=ChainTree.over((1, 2, 3, 4)))
        engine = engine_of(tiny_models(0, grid=4), strategy, sampling, 2, rule=rule)
        said.append(finish(engine).tokens)
    assert torch.equal(*said)


@pytest.mark.parametrize("taps", [(), (1,)])
@pytest.mark.parametrize("length", [2, 4])
def test_one_length_decodes_as_its_drafts_alone(length: int, taps: tuple[int, ...]) -> None:
    sampling = Sampling(top_k=20, cfg_scale=2.0)
    models = tiny_models(1, taps=taps)
    engine = engine_of(models, Strategy(drafts=CHAIN), sampling, 2, rule=Walk(length))
    alone = engine_of(models, Strategy(drafts=CHAIN.of_length(length)), sampling, 2)
    one, other = finish(engine), finish(alone)
    assert torch.equal(one.tokens, other.tokens) and torch.equal(one.steps, other.steps)


def test_plain_decoding_is_not_left() -> None:
    rule = Walk(4, 1, 4, 4)
    strategy = Strategy(drafts=CHAIN, coupling="maximal")
    sampling = Sampling(top_k=2, cfg_scale=2.0)
    done = finish(engine_of(law_models(), strategy, sampling, 2, rule=rule))
    assert [block.length for block in rule.blocks][:1] == [4]
    assert len(rule.blocks) == 1  # nothing is asked of a rule that has no say
    assert int(done.steps.max()) >= TOKENS - 4


def test_a_rule_hears_counts_and_what_is_left() -> None:
    rule = Walk(4, 2, 3)
    strategy, sampling = Strategy(drafts=ChainTree.over((1, 2, 3, 4))), Sampling(top_k=20)
    done = finish(engine_of(tiny_models(0, grid=4), strategy, sampling, 3, rule=rule))
    assert all(b.steps == 1 and all(0 <= g <= b.length for g in b.gained) for b in rule.blocks)
    assert 0 < max(rule.blocks[-1].left) <= 4  # the last one completes every image
    assert done.histogram.shape[1] == 4


def test_it_is_the_engine_of_a_chain_with_paces() -> None:
    models = tiny_models(0)
    with_paces = engine_of(models, Strategy(drafts=ChainTree.over((1, 3))), SAMPLING)
    without = engine_of(models, Strategy(drafts=ChainTree(length=2)), SAMPLING)
    assert len(with_paces.lengths) > 1 == len(without.lengths)
    with pytest.raises(StrategyError, match="no drafter"):
        engine_of((models[0], None), Strategy(drafts=ChainTree.over((1, 3))), SAMPLING)


@pytest.mark.parametrize("lengths", [(1, 2), (2, 1, 4), (4, 4)])
def test_paces_rise_to_the_chain(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="do not rise to 4"):
        ChainTree(length=3, draft_lengths=tuple(DraftLength(length=n) for n in lengths))
