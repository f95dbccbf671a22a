"""The running batch of a service: an image that is alone has an engine of one row, and may leave it."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

pytest.importorskip("prometheus_client")

from support.models import write_tiny_model

import lantern_accel
from lantern_accel.errors import DoesNotFitError
from lantern_accel.generation.batch import Done, Failure
from lantern_accel.serving.body import read_body
from lantern_accel.serving.metrics import Metrics
from lantern_accel.serving.queue import Job, QueuedImage
from lantern_accel.serving.running import RunningBatch


@pytest.fixture
def pipeline(tmp_path):
    model = write_tiny_model(tmp_path / "tiny")
    with lantern_accel.load(model, device="cpu", dtype="float32") as found:
        yield found


def queued(pipeline, seed, **settings):
    body = {"prompt": "red heart", "seed": seed, **settings}
    request = read_body(body, pipeline.model, 400)
    return QueuedImage(0, "red heart", seed, 0, job=Job(request, lambda event: None))


def finished(batch, *events):
    events = list(events)
    while batch.images:
        events += batch.advance()
    assert not any(isinstance(event, Failure) for event in events)
    return {event.images[0].seed: event for event in events if isinstance(event, Done)}


@pytest.mark.parametrize("alone", ["vanilla", "scd"])
@pytest.mark.parametrize("strategy", ["vanilla", "scd"])
def test_an_image_that_is_alone_moves_when_another_comes(pipeline, monkeypatch, strategy, alone):
    """``alone``: what auto may choose for one row, with other numbers of drafts."""
    asked = {"strategy": strategy}
    expected = {seed: pipeline.generate("red heart", seed=seed, **asked) for seed in (1, 2)}
    known = {alone: pipeline.strategy(alone)}
    monkeypatch.setattr(
        pipeline.measurements,
        "tune_strategy",
        lambda asked, size, sampling: asked if size > 1 else known[alone],
    )
    batch = RunningBatch(pipeline, 3, Metrics(pipeline.backend, 3))
    first, second = (queued(pipeline, seed, strategy=strategy) for seed in (1, 2))
    assert batch.join(first) and batch.batch.size == 1
    events = batch.advance()
    known = len(batch.batch.so_far(first))
    assert 1 < known < batch.batch.tokens
    assert not batch.join(second) and batch.crowded
    batch.widen()
    assert batch.batch.size == 3 and batch.images == [first] and not batch.crowded
    assert len(batch.batch.so_far(first)) == known, "it goes on where it was"
    assert batch.join(second)
    done = finished(batch, *events)
    for seed in (1, 2):
        decoded = done[seed].decoded
        assert decoded.tokens.equal(expected[seed].tokens)
        steps = int(decoded.steps)
        assert steps == int(decoded.histogram.sum())
        if strategy == "vanilla" and (alone == "vanilla" or seed == 2):
            assert steps == expected[seed].stats.steps
    third = queued(pipeline, 3, strategy=strategy)
    assert batch.join(third) and batch.batch.size == 1, "the next one is alone again"


@pytest.mark.parametrize(("strategy", "others"), [("vanilla", True), ("eagle", False)])
def test_an_image_has_all_rows_at_once(pipeline, strategy, others):
    """Others wait behind it; or it cannot move, since its drafter has read the tokens before."""
    batch = RunningBatch(pipeline, 2, Metrics(pipeline.backend, 2))
    assert batch.join(queued(pipeline, 1, strategy=strategy), others=others)
    assert batch.batch.size == 2 and batch.join(queued(pipeline, 2, strategy=strategy))


def test_where_one_row_does_not_fit_beside_all_rows_these_serve_alone(pipeline, monkeypatch):
    batch = RunningBatch(pipeline, 2, Metrics(pipeline.backend, 2))
    made = RunningBatch._make

    def refuse(self, request, first, size):
        if size == 1:
            pipeline.release_engines()  # as where memory was freed in vain
            raise DoesNotFitError("no memory")
        return made(self, request, first, size)

    monkeypatch.setattr(RunningBatch, "_make", refuse)
    assert batch.join(queued(pipeline, 1, strategy="vanilla"))
    assert batch.batch.size == 2 and batch.batch.ready in pipeline.engines.ready
    assert batch.join(queued(pipeline, 2, strategy="vanilla"))
    assert {*finished(batch)} == {1, 2}


def test_an_image_that_cannot_move_is_not_lost(pipeline, monkeypatch):
    """It is still among the images that run, so its client gets the error."""
    batch = RunningBatch(pipeline, 2, Metrics(pipeline.backend, 2))
    first, second = (queued(pipeline, seed, strategy="vanilla") for seed in (1, 2))
    assert batch.join(first)
    batch.advance()
    assert not batch.join(second)
    monkeypatch.setattr(batch._whole, "join", Mock(side_effect=DoesNotFitError("no memory")))
    with pytest.raises(DoesNotFitError):
        batch.widen()
    assert batch.images == [first]
