"""Windows whose drafts a draft head guesses: any guess gives the tokens of plain decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.engines import GREEDY, SAMPLED, engine_of, finish
from support.moving import Walk
from support.tiny import tiny_models
from torch import Tensor

from lantern_accel.decoding.sources.head import HeadWindow
from lantern_accel.nn.draft_head import DraftHead, DraftHeadConfig
from lantern_accel.strategy.sources import DraftLength
from lantern_accel.strategy.values import Sampling, Strategy, Window

UNGUIDED = Sampling(temperature=0.8, top_k=0, top_p=0.9, cfg_scale=1.0)


def models(head: bool = True) -> Any:
    """Return tiny models whose target has a random draft head."""
    target, drafter = tiny_models(0)
    if head:
        torch.manual_seed(1)
        config = DraftHeadConfig(dim=32, hidden=8, rank=6, vocab_size=64, grid=6)
        target.draft_head = DraftHead(config).requires_grad_(False)
    return target, drafter


def plain(small: Any, sampling: Sampling, batch: int) -> Any:
    return finish(engine_of(small, Strategy(), sampling, batch=batch))


@pytest.mark.parametrize(
    ("length", "passes", "moves"),
    [(2, 0, ()), (4, 4, ()), (9, 4, ()), (8, 4, (1, 2, 4, 8)), (8, 4, (4, 8, 1, 8, 2))],
)
@pytest.mark.parametrize(("sampling", "batch"), [(SAMPLED, 3), (GREEDY, 1), (UNGUIDED, 1)])
def test_guesses_change_no_token(
    sampling: Sampling, batch: int, length: int, passes: int, moves: tuple[int, ...]
) -> None:
    """``moves``: the lengths of the steps, where they change."""
    small = models()
    lengths = tuple(DraftLength(length=n) for n in (1, 2, 4, 8)) if moves else ()
    window = Window(length=length, fresh="head", passes=passes, draft_lengths=lengths)
    engine = engine_of(small, Strategy(drafts=window), sampling, batch)
    engine.chosen = Walk(*moves) if moves else None
    assert torch.equal(finish(engine).tokens, plain(small, sampling, batch).tokens)


def test_a_head_that_is_always_right_fills_every_window(monkeypatch: pytest.MonkeyPatch) -> None:
    small = models()
    want = plain(small, SAMPLED, 2).tokens

    def right(self: HeadWindow, *given: Any) -> Tensor:
        place: Tensor = given[4]
        at = place.clamp(max=want.shape[1] - 1).unsqueeze(1)
        return want.gather(1, at).squeeze(1)

    monkeypatch.setattr(HeadWindow, "_guess", right)
    found = finish(engine_of(small, Strategy(drafts=Window(length=4, fresh="head")), SAMPLED, 2))
    assert torch.equal(found.tokens, want)
    assert found.steps.tolist() == [9, 9], "35 tokens, four a step"


def test_tokens_differ_where_guesses_were_kept_untested(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: a window that keeps whatever was guessed is found out."""
    small = models()

    def kept(same: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.full((len(same),), same.shape[1], dtype=dtype)

    monkeypatch.setattr("lantern_accel.decoding.sources.window.leading", kept)

    def known(self: Any, state: Any, window: Tensor, logits: Tensor) -> Any:
        made = judge(self, state, window, logits)
        tokens = torch.cat((window[:, 1:], made.tokens[:, -1:]), dim=1)
        return type(made)(tokens, made.count)

    judge = HeadWindow.judge
    monkeypatch.setattr(HeadWindow, "judge", known)
    found = finish(engine_of(small, Strategy(drafts=Window(length=4, fresh="head")), SAMPLED, 2))
    assert not torch.equal(found.tokens, plain(small, SAMPLED, 2).tokens)
