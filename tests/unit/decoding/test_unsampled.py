"""A head that has ids which are no codes: filters count them, and nothing draws them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lantern_accel.decoding.logits import Filters, distribution
from lantern_accel.decoding.rows import Cut
from lantern_accel.device.plan import Filter
from lantern_accel.device.plugins import open_backend
from lantern_accel.nn.transformer import REFERENCE
from lantern_accel.strategy.values import Sampling
from lantern_accel.testing import tiny

BACKENDS = [REFERENCE, open_backend("cpu")]
SHARES = torch.tensor([0.50, 0.24, 0.20, 0.06])  # the last is of an id that is no code


def law(logits: torch.Tensor, given: Filter, ops: object, temperature: float = 1.0) -> torch.Tensor:
    cut = Cut(logits.shape[-1] - 1, given, ops)  # type: ignore[arg-type]
    return distribution(cut(logits), Filters.of(Sampling(temperature=temperature)))


@pytest.mark.parametrize("ops", BACKENDS)
def test_they_are_taken_out_after_top_p(ops: object) -> None:
    found = law(SHARES.log().expand(2, 3, -1), Filter(1.0, top_p=0.75), ops)
    want = torch.tensor([0.50, 0.24, 0.20]) / 0.94
    assert torch.allclose(found, want.expand(2, 3, -1), atol=1e-6)
    warm = law(SHARES.log().expand(1, 1, -1) * 0.9, Filter(0.9, top_p=0.75), ops, 0.9)
    assert torch.allclose(warm[0, 0], want, atol=1e-6)


@pytest.mark.parametrize("ops", BACKENDS)
@pytest.mark.parametrize("given", [Filter(top_k=2), Filter(top_k=2, top_p=0.9)])
def test_they_take_a_place_of_top_k(ops: object, given: Filter) -> None:
    logits = SHARES.flip(0).log().expand(1, 1, -1)  # the likeliest id is no code
    assert torch.allclose(law(logits, given, ops)[0, 0], torch.tensor([0.0, 0.0, 1.0]))


@pytest.mark.parametrize("ops", BACKENDS)
def test_the_likeliest_code_stays_where_none_was_kept(ops: object) -> None:
    logits = torch.tensor([[[0.0, 2.0, 1.0, 9.0]]])
    assert law(logits, Filter(1.0, top_p=0.5), ops).tolist() == [[[0.0, 1.0, 0.0]]]


@pytest.mark.parametrize("ops", BACKENDS)
def test_a_number_that_is_none_is_seen(ops: object) -> None:
    for place in (0, 3):
        logits = SHARES.log().expand(1, 1, -1).clone()
        logits[..., place] = float("nan")
        assert law(logits, Filter(1.0, top_p=0.75), ops).isnan().any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_tiny_model_never_draws_them(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny.tiny_engine(
        open_backend("cpu"), "vanilla", batch=4, temperature=temperature, family="glm_image"
    )
    target: Any = engine.verifying.target
    own, codes = target.all_logits, target.config.vocab_size
    more = torch.tensor([0.0] * codes + [4.0] * target.unsampled)
    monkeypatch.setattr(target, "all_logits", lambda features: own(features) + more)
    assert target.unsampled and int(tiny.decode_tokens(engine, 3).max()) < codes
