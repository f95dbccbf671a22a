"""Continuous batching: an image that joins a running batch is the image that it would have been alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lantern_accel
from lantern_accel.errors import BackendError
from lantern_accel.generation.slots import Slots

PROMPTS = ["red heart", "dog face", "a blue fish", "heart", "dog", "fish", "red face", "blue dog"]
EXACT = ["vanilla", "eagle", "eagle2", "scd", "sjd", "scd-gumbel", "sjd-pac", "auto"]


@pytest.fixture(scope="module")
def pipeline(tiny_model, tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path_factory.mktemp("cache")))
    with lantern_accel.load(tiny_model, device="cpu", dtype="float32") as opened:
        yield opened
    patch.undo()


def opened(pipeline: Any, strategy: str, size: int, **sampling: Any) -> tuple[Slots, Any]:
    """Return slots, and a function that lets image ``index`` of a prompt join."""
    request = pipeline.request(PROMPTS[0], strategy=strategy, batch_size=size, **sampling)
    with pipeline.backend.inference():
        first = pipeline.conditions(PROMPTS[:1])
        slots = Slots(pipeline, request.strategy, request.sampling, size, first)

        def join(prompt: str, seed: int, index: int) -> int:
            with pipeline.backend.inference():
                made = pipeline.conditions([prompt])
                rows = pipeline.model.family.rows(pipeline.model, made, request.sampling)
                return slots.join(rows, seed, index)

    return slots, join


def staggered(slots: Slots, join: Any, jobs: list[tuple[str, int]], every: int) -> dict[int, Any]:
    """Draw jobs that join one by one, a new one every so many looks or when a row is free."""
    waiting, at, found, looks = list(enumerate(jobs)), {}, {}, 0
    while waiting or at:
        if waiting and slots.joinable and (looks % every == 0 or not at):
            number, (prompt, seed) = waiting.pop(0)
            at[join(prompt, seed, 0)] = number
        slots.advance()
        looks += 1
        for row in slots.complete:
            found[at.pop(row)] = slots.take(row)
    return found


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("strategy", EXACT)
def test_who_joins_a_running_batch_gets_the_image_of_his_own(pipeline, strategy, size):
    jobs = [(prompt, 40 + n) for n, prompt in enumerate(PROMPTS)]
    slots, join = opened(pipeline, strategy, size)
    together: list[int] = []
    advance = slots.advance

    def counted() -> None:
        together.append(len({slots.known(row) for row in slots.busy}))
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


def test_no_function_is_captured_for_an_image_that_joins(pipeline):
    slots, join = opened(pipeline, "eagle", 2)
    kept = [id(one) for one in pipeline.engines.ready]
    staggered(slots, join, [(p, 3) for p in PROMPTS], every=1)
    assert [id(one) for one in pipeline.engines.ready] == kept


def test_an_image_that_leaves_changes_no_other(pipeline):
    slots, join = opened(pipeline, "vanilla", 2)
    kept = join("red heart", 7, 0)
    other = join("dog face", 7, 0)
    slots.advance()
    assert slots.leave(other) is None and slots.free == [other]
    again = join("a blue fish", 7, 0) if slots.joinable else None
    while kept not in slots.complete:
        slots.advance()
    expected = pipeline.generate("red heart", seed=7, strategy="vanilla").tokens
    assert torch.equal(slots.take(kept).decoded.tokens, expected)
    if again is not None:
        while again not in slots.complete:
            slots.advance()
        expected = pipeline.generate("a blue fish", seed=7, strategy="vanilla").tokens
        assert torch.equal(slots.take(again).decoded.tokens, expected)
    assert slots.busy == []


def test_a_row_whose_numbers_are_not_finite_fails_alone(pipeline, monkeypatch):
    slots, join = opened(pipeline, "vanilla", 2)
    good, bad = join("red heart", 7, 0), join("dog face", 7, 0)
    look = slots._look

    def ill(lengths: list[int], finite: list[int], *more: int) -> None:
        # What the device counts for a row whose logits were no numbers from its second pass on.
        look(lengths, [1 if row == bad else n for row, n in enumerate(finite)], *more)

    monkeypatch.setattr(slots, "_look", ill)
    slots.advance()
    assert slots.unsound == [bad]
    error = slots.leave(bad)
    assert error is not None and "not finite" in str(error)
    while good not in slots.complete:
        slots.advance()
    expected = pipeline.generate("red heart", seed=7, strategy="vanilla").tokens
    assert torch.equal(slots.take(good).decoded.tokens, expected)


def test_steps_that_bring_nothing_are_noticed(pipeline, monkeypatch):
    slots, join = opened(pipeline, "vanilla", 2)
    join("red heart", 7, 0)
    idle = {size: lambda: None for size in slots.ready.steps}
    monkeypatch.setattr(slots, "ready", type(slots.ready)(
        slots.ready.engine, slots.ready.prefill, slots.ready.step, idle
    ))  # fmt: skip
    with pytest.raises(BackendError, match="is not the step"):
        slots.advance()


@pytest.mark.parametrize("strategy", ["lantern++", "lantern++-jacobi"])
def test_relaxed_images_come_with_their_price(pipeline, strategy):
    slots, join = opened(pipeline, strategy, 2, k=5, lam=8)
    found = staggered(slots, join, [(p, 3) for p in PROMPTS], every=1)
    assert len(found) == len(PROMPTS)
    assert sum(float(one.decoded.price.sum()) for one in found.values()) > 0
