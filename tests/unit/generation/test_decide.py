"""A request's decision is one value: recorded in the result, kept as JSON, and given back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import write_tiny_model

import lantern_accel
from lantern_accel.errors import RequestError
from lantern_accel.generation.decision import Decision
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.strategy.values import NoTree


@pytest.fixture
def pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipeline]:
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path / "cache"))
    folder = write_tiny_model(tmp_path / "tiny")
    with lantern_accel.load(folder, device="cpu", dtype="float32") as loaded:
        yield loaded


def test_a_decision_is_given_back(pipeline: Pipeline) -> None:
    asked: dict[str, Any] = {"seed": 3, "num_images": 3, "strategy": "scd", "window": 4}
    drawn = pipeline.generate("red heart", batch_size=2, **asked)
    decision = drawn.stats.decision
    assert [(one.images, one.rows) for one in decision.parts] == [(2, 2), (1, 1)]
    assert (
        decision.strategy == drawn.stats.strategy and decision.batch == drawn.stats.batch_size == 2
    )
    assert decision.parts[0].memory > 0
    kept = Decision.model_validate_json(decision.model_dump_json())
    assert kept == decision
    again = pipeline.generate("red heart", seed=3, num_images=3, decision=kept)
    assert again.stats.decision == decision and torch.equal(again.tokens, drawn.tokens)
    # One that was made for more images serves fewer.
    first = pipeline.generate("red heart", seed=3, only=[0], num_images=3, decision=kept)
    assert torch.equal(first.tokens, drawn.tokens[:1])


def test_nothing_is_timed_where_a_decision_is_given(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = pipeline.generate("red heart", seed=3)
    plain = drawn.stats.decision.model_copy(
        update={
            "parts": tuple(
                one.model_copy(update={"strategy": one.strategy.with_drafts(NoTree())})
                for one in drawn.stats.decision.parts
            )
        }
    )
    monkeypatch.setattr(pipeline.auto, "choose", None)
    again = pipeline.generate("red heart", seed=3, decision=plain)
    assert isinstance(again.stats.strategy.drafts, NoTree)
    assert torch.equal(again.tokens, drawn.tokens)


@pytest.mark.parametrize(
    ("made", "settings", "named"),
    [
        ({"weights_hash": "other"}, {}, "the weights 'other'"),
        ({"dtype": "bfloat16"}, {}, "the dtype"),
        ({"device": "another card"}, {}, "the device"),
        ({}, {"strategy": "eagle"}, "the strategy 'vanilla'"),
        ({}, {"cfg_scale": 1.0}, "guidance"),
        ({}, {"temperature": 0.0}, "guidance or filters"),
        ({}, {"batch_size": 5}, "batch_size"),
    ],
)
def test_a_decision_that_does_not_fit_is_refused(
    pipeline: Pipeline, made: dict[str, str], settings: dict[str, Any], named: str
) -> None:
    decision = pipeline.generate("red heart", seed=3, strategy="vanilla").stats.decision
    with pytest.raises(RequestError, match=named):
        pipeline.generate("red heart", decision=decision.model_copy(update=made), **settings)


def test_a_stream_records_one_too(pipeline: Pipeline) -> None:
    stream = pipeline.stream("red heart", seed=3, strategy="vanilla")
    assert [one.done for one in stream][-1]
    assert stream.result.stats.decision.asked == "vanilla"
