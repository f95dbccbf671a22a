"""Windows that change their length: the law stays the target's, whatever decides."""

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
    begin,
    by_acceptance,
    each_its_own,
    misfit_of,
    moving,
)
from support.tiny import captions, tiny_models
from torch import Tensor

from lantern_accel.decoding.engine import Engine
from lantern_accel.device.operations import TensorOps
from lantern_accel.strategy.values import Sampling, Strategy, adaptive_window

#: A sound sampler misses by more than this once in a million tests.
SOUND = 4.9


def engine_of(images: int, sampling: Sampling = SAMPLING, **more: Any) -> Engine:
    target, _ = tiny_models(2, vocab=VOCAB, grid=2, prefix=2, dim=8, sharpness=1.0)
    strategy = Strategy(drafts=adaptive_window((1, 2, 4)))
    return moving(target, strategy, sampling, batch=images, **more)


def looks_at_drafts(gains: Tensor, state: Any) -> Tensor:
    """What no rule is given: throws the drafts away whose next token is code 1."""
    following = state.tokens.gather(1, (state.length + 1).clamp(max=TOKENS).unsqueeze(1))[:, 0]
    return torch.where(following == 1, 1, 4)


@pytest.mark.parametrize(
    "decide",
    [at_random, *(pytest.param(d, marks=pytest.mark.long) for d in (by_acceptance, against))],
)
def test_images_follow_the_target_whatever_counts_decide(decide: Decide) -> None:
    assert misfit_of(engine_of(IMAGES), decide) < SOUND


@pytest.mark.long
def test_where_noise_decides_even_a_rule_that_reads_drafts_changes_nothing() -> None:
    engine = engine_of(IMAGES)
    with torch.inference_mode():
        assert torch.equal(
            each_its_own(engine, looks_at_drafts), each_its_own(engine, by_acceptance)
        )
    assert misfit_of(engine, looks_at_drafts) < SOUND


@pytest.mark.parametrize("lengths", [(1,), (4,), (1, 4), (4, 1, 2), (2, 3, 4, 1)])
def test_greedily_every_rule_gives_the_plain_tokens(lengths: tuple[int, ...]) -> None:
    sampling = Sampling(temperature=0, cfg_scale=2.0)
    with torch.inference_mode():
        said = []
        for rule in (Walk(*lengths), Walk(1)):
            target, _ = tiny_models(0, grid=4)
            strategy = Strategy(drafts=adaptive_window((1, 2, 3, 4)))
            engine = moving(target, strategy, sampling, batch=2, rule=rule)
            begin(engine)
            said.append(engine.run().tokens)
    assert torch.equal(*said)


def test_a_rule_hears_counts_and_what_is_left() -> None:
    rule = Walk(4, 2, 1)
    engine = engine_of(3, rule=rule)
    with torch.inference_mode():
        begin(engine)
        done = engine.run()
    assert int(done.steps.max()) >= len(rule.blocks)
    assert all(b.steps == 1 and max(b.gained) <= b.length for b in rule.blocks)
    # An image that is complete gains nothing.
    counts = [one for b in rule.blocks for one in zip(b.gained, b.left, strict=True)]
    assert all(gained >= 1 or not left for gained, left in counts)
    assert [b.length for b in rule.blocks] == [(4, 2, 1)[i % 3] for i in range(len(rule.blocks))]


def test_one_length_decodes_as_the_window_alone() -> None:
    target, _ = tiny_models(1)
    sampling = Sampling(top_k=20, cfg_scale=2.0)
    strategy = Strategy(drafts=adaptive_window((1, 6)))
    adaptive = moving(target, strategy, sampling, batch=2, rule=Walk(6))
    window = adaptive_window((1, 6)).model_copy(update={"draft_lengths": ()})
    alone = Engine(target, None, TensorOps(), Strategy(drafts=window), sampling, batch=2)
    features, mask = captions(target, 2)
    condition = torch.cat((features, target.unconditional(2)))
    with torch.inference_mode():
        for engine in (adaptive, alone):
            engine.start(condition, mask, engine.randomness(5, [0, 1]))
        assert torch.equal(adaptive.run().tokens, alone.run().tokens)


def test_moving_up_draws_what_the_longer_window_needs() -> None:
    engine = engine_of(2)
    with torch.inference_mode():
        begin(engine)
        engine.now = 2
        engine.step()
        engine.state.tokens[:, 3:] = 77  # nothing may be read that was not drawn
        engine.move(4)
    assert engine.now == 4
    known = engine.state.newest
    for row, newest in zip(engine.state.tokens, known.tolist(), strict=True):
        assert (row[newest + 1 : TOKENS] < VOCAB).all()
