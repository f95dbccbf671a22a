"""Windows that change their length: the law stays the target's, whatever decides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.engines import engine_of, finish
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
    law_models,
    misfit_of,
)
from support.tiny import tiny_models
from torch import Tensor

from lantern_accel.strategy.values import Sampling, Strategy, Window

#: A sound sampler misses by more than this once in a million tests.
SOUND = 4.9


WINDOW = Strategy(drafts=Window.over((1, 2, 4)))


def looks_at_drafts(gains: Tensor, state: Any) -> Tensor:
    """What no rule is given: throws the drafts away whose next token is code 1."""
    following = state.tokens.gather(1, (state.length + 1).clamp(max=TOKENS).unsqueeze(1))[:, 0]
    return torch.where(following == 1, 1, 4)


@pytest.mark.long
@pytest.mark.parametrize("decide", [at_random, by_acceptance, against])
def test_images_follow_the_target_whatever_counts_decide(decide: Decide) -> None:
    assert misfit_of(engine_of(law_models(), WINDOW, SAMPLING, IMAGES), decide) < SOUND


@pytest.mark.long
def test_where_noise_decides_even_a_rule_that_reads_drafts_changes_nothing() -> None:
    engine = engine_of(law_models(), WINDOW, SAMPLING, IMAGES)
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
            strategy = Strategy(drafts=Window.over((1, 2, 3, 4)))
            engine = engine_of(tiny_models(0, grid=4), strategy, sampling, 2, rule=rule)
            begin(engine)
            said.append(engine.run().tokens)
    assert torch.equal(*said)


def test_a_rule_hears_counts_and_what_is_left() -> None:
    rule = Walk(4, 2, 1)
    engine = engine_of(law_models(), WINDOW, SAMPLING, 3, rule=rule)
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
    small, sampling = tiny_models(1), Sampling(top_k=20, cfg_scale=2.0)
    strategy = Strategy(drafts=Window.over((1, 6)))
    adaptive = engine_of(small, strategy, sampling, 2, rule=Walk(6))
    window = Window.over((1, 6)).model_copy(update={"draft_lengths": ()})
    alone = engine_of(small, Strategy(drafts=window), sampling, 2)
    assert torch.equal(finish(adaptive).tokens, finish(alone).tokens)


def test_moving_up_draws_what_the_longer_window_needs() -> None:
    engine = engine_of(law_models(), WINDOW, SAMPLING, 2)
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
