"""Chains that change their length: the law stays the target's, plain decoding is not left."""

from __future__ import annotations

import pytest
from support.engines import engine_of, finish
from support.moving import (
    IMAGES,
    SAMPLING,
    Decide,
    Walk,
    against,
    at_random,
    by_acceptance,
    law_models,
    misfit_of,
)
from support.tiny import tiny_models

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


def test_a_rule_hears_counts_and_what_is_left() -> None:
    rule = Walk(4, 2, 3)
    strategy, sampling = Strategy(drafts=ChainTree.over((1, 2, 3, 4))), Sampling(top_k=20)
    done = finish(engine_of(tiny_models(0, grid=4), strategy, sampling, 3, rule=rule))
    assert all(b.steps == 1 and all(0 <= g <= b.length for g in b.gained) for b in rule.blocks)
    assert 0 < max(rule.blocks[-1].left) <= 4  # the last one completes every image
    assert done.histogram.shape[1] == 4


@pytest.mark.parametrize("lengths", [(1, 2), (2, 1, 4), (4, 4)])
def test_paces_rise_to_the_chain(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="do not rise to 4"):
        ChainTree(length=3, draft_lengths=tuple(DraftLength(length=n) for n in lengths))
