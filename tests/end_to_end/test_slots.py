"""Continuous batching: an image that joins a running batch is the image that it would have been alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.preferring import prefer
from support.slots import slots_of

import lantern_accel
from lantern_accel.device.operations import TensorOps
from lantern_accel.errors import BackendError
from lantern_accel.generation.slots import Drawn, Slots

PROMPTS = ["red heart", "dog face", "a blue fish", "heart", "dog", "fish", "red face", "blue dog"]
EXACT = ["vanilla", "eagle", "eagle2", "scd", "sjd", "auto"]


@pytest.fixture(scope="module")
def pipeline(tiny_model, tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path_factory.mktemp("cache")))
    with lantern_accel.load(tiny_model, device="cpu", dtype="float32") as opened:
        yield opened
    patch.undo()


def opened(pipeline: Any, strategy: str, size: int, **sampling: Any) -> tuple[Slots[Any], Any]:
    """Return slots, and a function that lets an image of a prompt join."""
    request = pipeline.request(PROMPTS[0], strategy=strategy, batch_size=size, **sampling)
    with pipeline.backend.inference():
        first = pipeline.conditions(PROMPTS[:1])
        slots = slots_of(pipeline, request.strategy, request.sampling, size, first)

        def join(prompt: str, seed: int, image: Any = None) -> int:
            with pipeline.backend.inference():
                made = pipeline.conditions([prompt])
                rows = pipeline.model.family.rows(pipeline.model, made, request.sampling)
                return slots.join(image, rows, seed, 0)

    return slots, join


def staggered(
    slots: Slots[Any], join: Any, jobs: list[tuple[str, int]], every: int
) -> dict[int, Any]:
    """Draw jobs that join one by one, a new one every so many looks or when a row is free."""
    waiting, found, looks = list(enumerate(jobs)), {}, 0
    while waiting or slots.images:
        if waiting and slots.joinable and (looks % every == 0 or not slots.images):
            number, (prompt, seed) = waiting.pop(0)
            join(prompt, seed, number)
        slots.advance()
        looks += 1
        found |= {image: one for image, one in slots.news() if isinstance(one, Drawn)}
    return found


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("strategy", EXACT)
def test_who_joins_a_running_batch_gets_the_image_of_his_own(pipeline, strategy, size):
    jobs = [(prompt, 40 + n) for n, prompt in enumerate(PROMPTS)]
    slots, join = opened(pipeline, strategy, size)
    together: list[int] = []
    advance = slots.advance

    def counted() -> None:
        together.append(len({slots.known(row) for row in slots.images}))
        advance()

    slots.advance = counted  # type: ignore[method-assign]
    found = staggered(slots, join, jobs, every=1)
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
        slots, join = opened(tabled, strategy, 2)
        assert slots.single.engine.session.choices.table is not None
        assert (slots.engine.session.choices.table is not None) == (images == 2)
        found = staggered(slots, join, jobs, every=1)
    for number, tokens in enumerate(alone):
        assert torch.equal(found[number].decoded.tokens, tokens)


def test_no_function_is_captured_for_an_image_that_joins(pipeline):
    slots, join = opened(pipeline, "eagle", 2)
    kept = [id(one) for one in pipeline.engines.ready]
    staggered(slots, join, [(p, 3) for p in PROMPTS], every=1)
    assert [id(one) for one in pipeline.engines.ready] == kept


def test_an_image_that_leaves_changes_no_other(pipeline):
    slots, join = opened(pipeline, "vanilla", 2)
    join("red heart", 7, "red heart")
    other = join("dog face", 7)
    slots.advance()
    slots.leave(other)
    assert slots.free == [other] and slots.joinable
    found = staggered(slots, join, [("a blue fish", 7)], every=1)
    for image, prompt in (("red heart", "red heart"), (0, "a blue fish")):
        expected = pipeline.generate(prompt, seed=7, strategy="vanilla").tokens
        assert torch.equal(found[image].decoded.tokens, expected)
    assert slots.images == {}


def test_a_row_whose_numbers_are_not_finite_fails_alone(pipeline, monkeypatch):
    slots, join = opened(pipeline, "vanilla", 2)
    join("red heart", 7, "good")
    bad = join("dog face", 7, "bad")
    progress = slots.engine.session.progress
    read = progress.read

    def ill():
        # What the device counts for a row whose logits were no numbers from its second pass on.
        found = read().clone()
        found[1, bad] = 1
        return found

    monkeypatch.setattr(progress, "read", ill)
    slots.advance()
    found = dict(slots.news())
    assert "not finite" in str(found["bad"]) and list(slots.images.values()) == ["good"]
    done = staggered(slots, join, [], every=1)["good"]
    expected = pipeline.generate("red heart", seed=7, strategy="vanilla").tokens
    assert torch.equal(done.decoded.tokens, expected)


def test_steps_that_bring_nothing_are_noticed(pipeline, monkeypatch):
    slots, join = opened(pipeline, "vanilla", 2)
    join("red heart", 7)
    slots.engine.course.step = lambda: None
    with pytest.raises(BackendError, match="is not the step"):
        slots.advance()


def test_relaxed_images_come_with_their_price(pipeline):
    slots, join = opened(pipeline, "lantern++", 2, k=5, lam=8)
    found = staggered(slots, join, [(p, 3) for p in PROMPTS], every=1)
    assert len(found) == len(PROMPTS)
    assert sum(float(one.decoded.price.sum()) for one in found.values()) > 0
