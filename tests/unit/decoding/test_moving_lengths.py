"""Drafts whose number changes from step to step: the law stays the target's, whatever decides."""

from __future__ import annotations

from itertools import cycle, islice
from typing import Any

import pytest
import torch
from support.engines import engine_of, finish, start
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

from lantern_accel.decoding.host_loop import SyncSchedule
from lantern_accel.decoding.sources.copy import CopyDrafts
from lantern_accel.generation.calibrate import count
from lantern_accel.nn import rounding as rounding_module
from lantern_accel.nn.rounding import Rounded
from lantern_accel.nn.transformer import projections
from lantern_accel.strategy.length_policy import CHAIN_GAIN, GAIN
from lantern_accel.strategy.lengths import usual_tokens_per_step
from lantern_accel.strategy.values import ChainTree, Sampling, SelfDrafts, Strategy, Window

#: A sound sampler misses by more than this once in a million tests.
SOUND = 4.9


def own_weights(*lengths: int, window: int = 0, weights: str = "int4") -> Strategy:
    return Strategy(drafts=SelfDrafts.over(lengths, weights=weights, window=window))


SOURCES = {
    "window": Strategy(drafts=Window.over((1, 2, 4))),
    "chain": Strategy(drafts=ChainTree.over((1, 2, 4)), coupling="maximal"),
    "self": own_weights(1, 2, 4),
    "self, windows of its own": own_weights(1, 2, 4, window=2),
}
QUICK = (("chain", at_random), ("self", at_random))


@pytest.mark.parametrize(
    ("name", "decide"),
    [
        pytest.param(name, decide, marks=() if (name, decide) in QUICK else pytest.mark.long)
        for name in SOURCES
        for decide in (at_random, by_acceptance, against)
    ],
)
def test_images_follow_the_enumerated_law_whatever_counts_decide(name: str, decide: Decide) -> None:
    engine = engine_of(law_models(), SOURCES[name], SAMPLING, IMAGES)
    assert misfit_of(engine, decide) < SOUND


@pytest.mark.long
@pytest.mark.parametrize("name", ["window", "self"])
def test_where_noise_decides_even_a_rule_that_reads_drafts_changes_nothing(name: str) -> None:
    def looks_at_drafts(gains: Tensor, state: Any) -> Tensor:
        """What no rule is given: throws the drafts away whose next token is code 1."""
        following = state.tokens.gather(1, (state.length + 1).clamp(max=TOKENS).unsqueeze(1))[:, 0]
        return torch.where(following == 1, 1, 4)

    engine = engine_of(law_models(), SOURCES[name], SAMPLING, IMAGES)
    with torch.inference_mode():
        assert torch.equal(
            each_its_own(engine, looks_at_drafts), each_its_own(engine, by_acceptance)
        )


@pytest.mark.parametrize(("name", "lengths"), [("window", (4, 2, 1)), ("chain", (4, 2))])
def test_a_rule_hears_counts_and_what_is_left(name: str, lengths: tuple[int, ...]) -> None:
    rule, sampling = Walk(*lengths), Sampling(top_k=20)
    done = finish(engine_of(tiny_models(0, grid=4), SOURCES[name], sampling, 3, rule=rule))
    assert int(done.steps.max()) >= len(rule.blocks) and done.histogram.shape[1] == 4
    left = [15] * 3  # all but the first token; of the last step no rule hears
    for block in rule.blocks:
        assert max(block.gained) <= block.steps * block.length
        assert all(
            gained >= min(block.steps, n) for n, gained in zip(left, block.gained, strict=True)
        )
        left = [n - gained for n, gained in zip(left, block.gained, strict=True)]
        assert [*block.left] == left and any(left)
    assert [b.length for b in rule.blocks] == [*islice(cycle(lengths), len(rule.blocks))]


def test_moving_up_draws_what_the_longer_window_needs() -> None:
    engine = engine_of(law_models(), SOURCES["window"], SAMPLING, 2)
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


@pytest.mark.parametrize(("name", "gain"), [("window", GAIN), ("chain", CHAIN_GAIN)])
def test_the_lengths_that_were_timed_are_those_to_choose_among(name: str, gain: float) -> None:
    engine = engine_of(law_models(), SOURCES[name], SAMPLING, 2)
    start(engine)
    for timed, lengths in (((), [1, 2, 4]), ((1, 2), [1, 2])):
        known = [
            one.model_copy(update={"cost": 1.0 if one.length in timed else None})
            for one in SOURCES[name].lengths
        ]
        engine.configure(SOURCES[name].with_drafts(draft_lengths=tuple(known)), SAMPLING)
        engine.begin(SyncSchedule())
        policy = engine.course.policy
        assert policy is not None and (policy.gain, policy.images) == (gain, 2)
        found = {one.length: one.tokens_per_step for one in policy.draft_lengths}
        usual = usual_tokens_per_step if name == "window" else float
        assert found == {n: usual(n) for n in lengths}


# --- a copy of the target ----------------------------------------------------------------------------


def test_keys_that_the_copy_leaves_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the check of a step that follows drafts writes nothing."""
    small = tiny_models(0, dim=64)
    ops, sampling = small[0].ops, Sampling(top_k=0, top_p=0.95, cfg_scale=2.0)
    engine = engine_of(small, own_weights(1, 3, 5), sampling, 2, ops=ops, rule=Walk(5, 1, 3))
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
    rounded = rounding_module.round_weight

    def planted(weight: Tensor, *how: Any) -> Rounded:
        made = rounded(weight, *how)
        weight.copy_(made.dense(weight.dtype))
        return made

    monkeypatch.setattr(rounding_module, "round_weight", planted)
    assert not torch.equal(finish(engine_of(small, own_weights(1, 3, 5), sampling, 2)).tokens, want)


def test_the_copy_is_one_and_its_settings_follow() -> None:
    engine = engine_of(law_models(), own_weights(1, 2, 3, 4), SAMPLING, 2)
    assert len({id(one.source.copy) for n, one in engine.by_length.items() if n > 1}) == 1
    assert engine.lengths == [1, 2, 3, 4]
    assert engine.changes["source.state.tokens"] is engine.source.copy.session.state.tokens
    warmer = SAMPLING.model_copy(update={"temperature": 0.5})
    engine.configure(engine.strategy, warmer)
    assert float(engine.source.copy.session.runtime_params.temperature) == 0.5
    assert len(projections(engine.source.copy.verifying.target)) > 0


def test_tokens_are_counted_and_lengths_timed() -> None:
    sampling = Sampling(temperature=0, cfg_scale=2.0)
    engine = engine_of(law_models(), own_weights(1, 2, 4, weights="int8"), sampling, 3)
    start(engine)
    with torch.inference_mode():
        gained, steps = count(engine, 2, 1)
    assert steps == 3 and 3 <= gained <= 6


def test_shorter_drafts_take_their_share_of_passes() -> None:
    drafts = SelfDrafts(length=8, window=4, passes=4)
    assert [drafts.of_length(n + 1).copy_passes for n in (1, 2, 4, 8)] == [1, 1, 2, 4]
    assert [SelfDrafts.over((1, 9)).of_length(n + 1).copy_passes for n in (1, 8)] == [1, 8]
