"""A draft head's guesses in native calls, against the same guesses by operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import native
from support.engines import GREEDY, SAMPLED
from support.tiny import tiny_models
from unit.backends.cpu import test_native_steps as steps

from lantern_accel.decoding.sources.head import HeadWindow
from lantern_accel.nn.draft_head import DraftHead, DraftHeadConfig
from lantern_accel.strategy.values import Sampling, SelfDrafts, Strategy, Window

pytestmark = native.needs_native


def headed(seed: int = 0, **changes: Any) -> Any:
    """Return tiny models whose target has a random draft head."""
    target, drafter = tiny_models(seed, **changes)
    torch.manual_seed(2)
    config = DraftHeadConfig(dim=32, hidden=21, rank=7, vocab_size=64, grid=6)
    target.draft_head = DraftHead(config).requires_grad_(False)
    return target, drafter


@pytest.mark.parametrize(
    ("given", "batch"),
    [
        (SAMPLED, 1),
        (GREEDY, 2),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in ((SAMPLED, 3), (steps.UNGUIDED, 2))
        ),
    ],
)
def test_guesses_and_tokens_are_those_of_the_operators(
    given: Sampling, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "tiny_models", headed)
    moving = Window(length=5, fresh="head", draft_lengths=steps.LENGTHS)
    for tree in (Window(length=4, fresh="head"), Window(length=8, fresh="head", passes=0), moving):
        steps.compare(Strategy(name="scd", drafts=tree), given, batch)


@pytest.mark.parametrize(("given", "batch"), [(SAMPLED, 1), (SAMPLED, 3), (GREEDY, 2)])
def test_a_copys_own_windows_are_guessed_by_the_head(
    given: Sampling, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever way it is done, the tokens are plain decoding's, and the copy steps in one call."""
    monkeypatch.setattr(steps, "tiny_models", headed)
    drafts = SelfDrafts.over((1, 4, 6), weights="int8", window=4, passes=3)
    engine = steps.same_images(Strategy(name="self", drafts=drafts), given, batch)
    assert isinstance(engine.source.copy.source, HeadWindow)


def test_guesses_in_bfloat16_are_nearly_all_those_of_the_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steps, "tiny_models", headed)
    strategy = Strategy(name="scd", drafts=Window(length=6, fresh="head", passes=0))
    same, every = 0, 0
    with steps.both() as (whole, pieces), torch.inference_mode():
        got, want = (
            steps.made(ops, strategy, SAMPLED, 3, torch.bfloat16) for ops in (whole, pieces)
        )
        assert got.source.fused is not None
        for _ in range(got.geometry.tokens):
            got.step()
            want.step()
            if not torch.equal(got.state.length, want.state.length):
                break
            for image, length in enumerate(got.state.length.tolist()):
                drafts = slice(length + 1, min(length + 6, got.geometry.tokens))
                equal = got.state.tokens[image, drafts] == want.state.tokens[image, drafts]
                same, every = same + int(equal.sum()), every + equal.numel()
    assert every > 100
    assert same > 0.8 * every, (same, every)
