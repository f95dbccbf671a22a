"""Windows that change their length: the law stays the target's, whatever decides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.engines import engine_of
from support.moving import (
    IMAGES,
    SAMPLING,
    TOKENS,
    VOCAB,
    Decide,
    Walk,
    against,
    begin,
    by_acceptance,
    each_its_own,
    law_models,
    misfit_of,
)
from torch import Tensor

from lantern_accel.strategy.values import Strategy, Window

#: A sound sampler misses by more than this once in a million tests.
SOUND = 4.9


WINDOW = Strategy(drafts=Window.over((1, 2, 4)))


def looks_at_drafts(gains: Tensor, state: Any) -> Tensor:
    """What no rule is given: throws the drafts away whose next token is code 1."""
    following = state.tokens.gather(1, (state.length + 1).clamp(max=TOKENS).unsqueeze(1))[:, 0]
    return torch.where(following == 1, 1, 4)


@pytest.mark.long
@pytest.mark.parametrize("decide", [by_acceptance, against])
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
