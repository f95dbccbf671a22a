"""Continuous batching: an image that joins a running batch is the image that it would have been alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.batches import batch_of
from support.batches import join as joined
from support.preferring import prefer

import lantern_accel
from lantern_accel.decoding.engine import Engine
from lantern_accel.device.capture import Replay
from lantern_accel.device.operations import TensorOps
from lantern_accel.errors import BackendError, NotFiniteError
from lantern_accel.generation.batch import Batch, Done, Failure
from lantern_accel.generation.request import ImageJob

PROMPTS = ["red heart", "dog face", "a blue fish", "heart", "dog", "fish", "red face", "blue dog"]
EXACT = ["vanilla", "eagle", "eagle2", "scd", "sjd", "self", "auto"]


def opened(pipeline: Any, strategy: str, size: int, **sampling: Any) -> tuple[Batch[ImageJob], Any]:
    """Return a batch, and a function that lets an image of a prompt join."""
    request = pipeline.request(PROMPTS[0], strategy=strategy, batch_size=size, **sampling)
    with pipeline.backend.inference():
        first = pipeline.conditions(PROMPTS[:1])
        batch = batch_of(pipeline, request.strategy, request.sampling, size, first)
    return batch, partial(joined, pipeline, batch)


def staggered(
    batch: Batch[ImageJob], join: Any, jobs: list[tuple[str, int]], every: int
) -> dict[int, Done[ImageJob]]:
    """Draw jobs that join one by one, a new one every so many looks or when a row is free."""
    waiting, looks = list(enumerate(jobs)), 0
    found: dict[int, Done[ImageJob]] = {}
    while waiting or batch.images:
        if waiting and batch.joinable and (looks % every == 0 or not batch.images):
            number, (prompt, seed) = waiting.pop(0)
            join(prompt, seed, number)
        looks += 1
        found |= {one.images[0].index: one for one in batch.advance() if isinstance(one, Done)}
    return found


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("strategy", EXACT)
def test_who_joins_a_running_batch_gets_the_image_of_his_own(pipeline, strategy, size):
    jobs = [(prompt, 40 + n) for n, prompt in enumerate(PROMPTS)]
    batch, join = opened(pipeline, strategy, size)
    together: list[int] = []
    advance = batch.advance

    def counted() -> Any:
        together.append(len({len(batch.so_far(one)) for one in batch.images}))
        return advance()

    batch.advance = counted  # type: ignore[method-assign]  # counts this batch alone
    found = staggered(batch, join, jobs, every=1)
    assert max(together) > 1, "rows of different lengths never ran together"
    for number, (prompt, seed) in enumerate(jobs):
        # A seed decides every token of an exact strategy, so plain decoding is the reference for all.
        alone = pipeline.generate(prompt, seed=seed, strategy="vanilla")
        assert torch.equal(found[number].decoded.tokens, alone.tokens), (strategy, number)
        steps, histogram = found[number].decoded.steps, found[number].decoded.histogram
        assert int(histogram.sum()) == int(steps) <= 15
        assert int((histogram * torch.arange(histogram.shape[1])).sum()) == 15 - int(steps)


@pytest.mark.parametrize("images", [1, 2], ids=["of one image", "of all rows"])
@pytest.mark.parametrize(
    "strategy", ["scd", *(pytest.param(s, marks=pytest.mark.long) for s in ("vanilla", "eagle2"))]
)
def test_rows_that_look_noise_up_join_alike(tiny_model, strategy, images, monkeypatch):
    """A row's table is its image's; where that of all rows would be too large, their steps make noise."""
    from lantern_accel_cpu.native.backend import NativeCpu

    monkeypatch.setattr(NativeCpu, "fused_step", TensorOps.fused_step)
    monkeypatch.setattr(NativeCpu, "accept_invariant", TensorOps.accept_invariant)
    jobs = [(prompt, 40 + n) for n, prompt in enumerate(PROMPTS[:5])]
    with lantern_accel.load(tiny_model, device="cpu", dtype="float32") as plain:
        alone = [plain.generate(p, seed=seed, strategy="vanilla").tokens for p, seed in jobs]
        target = plain.model.target.config
    size = 4 * target.num_tokens * target.vocab_size
    prefer(monkeypatch, NativeCpu, noise_bytes=images * size)
    with lantern_accel.load(tiny_model, device="cpu", dtype="float32") as tabled:
        batch, join = opened(tabled, strategy, 2)
        assert batch.single.engine.session.choices.table is not None
        assert (batch.engine.session.choices.table is not None) == (images == 2)
        found = staggered(batch, join, jobs, every=1)
    for number, tokens in enumerate(alone):
        assert torch.equal(found[number].decoded.tokens, tokens)


def test_no_function_is_captured_for_an_image_that_joins(pipeline):
    batch, join = opened(pipeline, "eagle", 2)
    assert "step" in batch.engine.functions and isinstance(batch.engine.functions["step"], Replay)
    assert not batch.single.replays, "an engine of prompts alone needs no step"
    kept = [id(one) for one in pipeline.engines.ready]
    staggered(batch, join, [(p, 3) for p in PROMPTS], every=1)
    assert [id(one) for one in pipeline.engines.ready] == kept


def test_an_image_that_leaves_changes_no_other(pipeline):
    batch, join = opened(pipeline, "vanilla", 2)
    red = join("red heart", 7, 5)
    other = join("dog face", 7, 6)
    batch.advance()
    batch.leave(other)
    assert batch.images == [red] and batch.joinable
    found = staggered(batch, join, [("a blue fish", 7)], every=1)
    for image, prompt in ((5, "red heart"), (0, "a blue fish")):
        expected = pipeline.generate(prompt, seed=7, strategy="vanilla").tokens
        assert torch.equal(found[image].decoded.tokens, expected)
    assert batch.images == []


def test_a_row_whose_numbers_are_not_finite_fails_alone(pipeline, monkeypatch):
    batch, join = opened(pipeline, "vanilla", 2)
    good, bad = join("red heart", 7, 0), join("dog face", 7, 1)
    progress = batch.engine.session.progress
    read = progress.read

    def ill():
        # What the device counts for a row whose logits were no numbers from its second pass on.
        found = read().clone()
        found[1, bad.index] = 1
        return found

    monkeypatch.setattr(progress, "read", ill)
    (failed,) = [one for one in batch.advance() if isinstance(one, Failure)]
    assert failed.images == (bad,) and isinstance(failed.error, NotFiniteError)
    assert batch.images == [good]
    done = staggered(batch, join, [], every=1)[0]
    expected = pipeline.generate("red heart", seed=7, strategy="vanilla").tokens
    assert torch.equal(done.decoded.tokens, expected)


def test_steps_that_bring_nothing_are_noticed(pipeline, monkeypatch):
    batch, join = opened(pipeline, "vanilla", 2)
    join("red heart", 7, 0)
    batch.engine.course.step = lambda: None
    with pytest.raises(BackendError, match="has no effect"):
        batch.advance()


def test_relaxed_images_come_with_their_price(pipeline):
    batch, join = opened(pipeline, "lantern++", 2, k=5, lam=8)
    found = staggered(batch, join, [(p, 3) for p in PROMPTS], every=1)
    assert len(found) == len(PROMPTS)
    assert sum(float(one.decoded.quality_loss.sum()) for one in found.values()) > 0


@pytest.mark.parametrize("strategy", ["vanilla", "scd"])
@pytest.mark.parametrize("known", [1, 5, 16])
def test_an_image_that_joins_goes_on_from_its_tokens(pipeline, strategy, known):
    whole = pipeline.generate("dog face", seed=7, strategy="vanilla").tokens
    batch, join = opened(pipeline, strategy, 2)
    join("red heart", 3, 1)
    batch.advance()
    join("dog face", 7, 0, known=whole[:, :known])
    assert torch.equal(batch.snapshot()[0], whole[0, :known])
    found = staggered(batch, lambda *_: None, [], every=1)
    assert torch.equal(found[0].decoded.tokens, whole)
    assert int(found[0].decoded.steps) <= 16 - known
    other = pipeline.generate("red heart", seed=3, strategy="vanilla").tokens
    assert torch.equal(found[1].decoded.tokens, other)


@pytest.mark.parametrize("strategy", ["vanilla", "scd", "auto"])
def test_a_batch_stops_before_any_step_and_goes_on(pipeline, strategy):
    whole = pipeline.generate("dog face", seed=7, strategy="vanilla").tokens
    batch, join = opened(pipeline, strategy, 2)
    join("dog face", 7, 0)
    calls, found = 0, []
    while batch.images:
        asked, before = iter([False, True]), batch.engine.course.index
        found += [one for one in batch.advance(partial(next, asked)) if isinstance(one, Done)]
        assert batch.engine.course.index - before <= 1
        calls += 1
        assert calls < 20
    assert torch.equal(found[0].decoded.tokens, whole)


@pytest.mark.parametrize("strategy", ["vanilla", "scd"])
def test_generate_stops_after_the_step_in_which_it_is_told(pipeline, strategy, monkeypatch):
    """As a cancelled task of asyncio does it: a flag that ``on_progress`` reads."""
    told, steps, honest = [False], [0], Engine.step

    def step(self: Engine, *given: Any) -> None:
        steps[0] += 1
        told[0] = told[0] or steps[0] == 2
        honest(self, *given)

    def check(known: int, total: int) -> None:
        if told[0]:
            raise InterruptedError

    whole = pipeline.generate("red heart", seed=7, strategy=strategy).tokens
    monkeypatch.setattr(Engine, "step", step)
    with pytest.raises(InterruptedError):
        pipeline.generate("red heart", seed=7, strategy=strategy, on_progress=check)
    assert steps[0] == 2
    assert torch.equal(pipeline.generate("red heart", seed=7, strategy=strategy).tokens, whole)
