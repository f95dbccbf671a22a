"""Calls of one pipeline: one at a time, none from within, none after it was closed."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import lantern_accel
from lantern_accel.device.backend import Support
from lantern_accel.errors import RequestError
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.memory.limits import bucket


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"decision": {"strategy": "vanilla"}}, "is not a decision; give an earlier result's"),
        ({"on_images": "x"}, "'x' cannot be called"),
        ({"on_progress": 5}, "5 cannot be called"),
        ({"unfinished": 5}, "5 is not a file's path"),
        ({"unfinished": "."}, ". is a folder; name a file in it"),
    ],
)
def test_what_is_not_a_setting_is_checked_before_any_work(
    pipeline: Pipeline, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(says)):
        pipeline.generate("red heart", **given)


def test_tokens_so_far_may_be_named_by_text(pipeline: Pipeline, tmp_path: Path) -> None:
    path: Any = str(tmp_path / "u.tokens")
    assert pipeline.generate("red heart", strategy="vanilla", seed=3, unfinished=path).images


def by_eight_threads(draw: Callable[[int], Any]) -> list[Any]:
    """Return what threads draw of seeds 0 to 7, all at once."""
    begin = threading.Barrier(8)
    with ThreadPoolExecutor(8) as threads:
        return [*threads.map(lambda seed: begin.wait() is None or draw(seed), range(8))]


def test_eight_threads_draw_what_one_draws(pipeline: Pipeline) -> None:
    def draw(seed: int) -> torch.Tensor:
        return pipeline.generate("red heart", strategy="lantern++", k=3, seed=seed).tokens

    alone = [draw(seed) for seed in range(8)]
    assert all(map(torch.equal, by_eight_threads(draw), alone))


@pytest.mark.long
def test_eight_threads_on_eight_pipelines_draw_what_one_draws(
    pipeline: Pipeline, tiny_model: Path
) -> None:
    names = ("vanilla", "eagle", "lantern++", "scd")

    def draw(seed: int, own: Pipeline = pipeline) -> torch.Tensor:
        return own.generate("red heart", strategy=names[seed % 4], seed=seed).tokens

    def loaded(seed: int) -> torch.Tensor:
        with lantern_accel.load(tiny_model, device="cpu", dtype="float32") as own:
            return draw(seed, own)

    alone = [draw(seed) for seed in range(8)]
    assert all(map(torch.equal, by_eight_threads(loaded), alone))


@pytest.mark.parametrize("again", ["generate", "close"])
def test_a_call_from_within_is_refused_and_harms_nothing(pipeline: Pipeline, again: str) -> None:
    asked: dict[str, Any] = {"strategy": "lantern++", "k": 3, "seed": 3}
    want = pipeline.generate("dog face", **asked).tokens

    def progress(known: int, total: int) -> None:
        pipeline.close() if again == "close" else pipeline.generate("dog face", seed=4)

    with pytest.raises(RequestError, match="was called again from within"):
        pipeline.generate("dog face", **asked, on_progress=progress)
    assert torch.equal(pipeline.generate("dog face", **asked).tokens, want)


def test_a_closed_pipeline_refuses_to_draw(tiny_model: Path) -> None:
    closed = lantern_accel.load(tiny_model, device="cpu", dtype="float32")
    closed.close()
    closed.close()
    with pytest.raises(RequestError, match="this pipeline is closed; load the model again"):
        closed.generate("red heart")
    with pytest.raises(RequestError, match="closed"):
        closed.decode_only(["dog face"], closed.strategy(), closed.sampling(), 1)


def test_each_batch_is_handed_over_when_it_is_done_and_a_part_is_the_same_images(
    pipeline: Pipeline,
) -> None:
    words, handed = ["red heart", "dog face"], list[tuple[int, int]]()
    asked: dict[str, Any] = {"strategy": "lantern++", "k": 3, "num_images": 2, "seed": 5}
    asked["batch_size"] = 1
    whole = pipeline.generate(
        words, **asked, on_images=lambda first, images: handed.append((first, len(images)))
    )
    assert handed == [(0, 1), (1, 1), (2, 1), (3, 1)]
    part = pipeline.generate(words, **asked, only=[3, 1])
    assert torch.equal(part.tokens, whole.tokens[[1, 3]])
    for wrong in ([4], [-1], []):
        with pytest.raises(RequestError, match="does not name images of this request"):
            pipeline.generate(words, **asked, only=wrong)


def test_batches_are_padded_to_buckets_with_finished_rows(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many rows they have: tests/unit/memory/test_limits.py."""
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, 16]
    asked = {"strategy": "lantern++", "k": 3, "seed": 6, "num_images": 3, "batch_size": 3}
    want = pipeline.generate("dog face", **asked)
    pipeline.release_engines()
    monkeypatch.setattr(pipeline.backend, "support", lambda capability: Support(True))
    drawn = pipeline.generate("dog face", **asked)
    assert [r.engine.geometry.batch for r in pipeline.engines.ready] == [4]
    state = pipeline.engines.ready[0].engine.state
    assert int(state.steps[3]) == 0, "the row that fills the batch took no step"
    assert torch.equal(drawn.tokens, want.tokens)
    assert drawn.stats.steps == want.stats.steps


def test_a_result_is_short_in_words_and_a_picture_in_a_notebook(pipeline: Pipeline) -> None:
    drawn = pipeline.generate(
        ["dog face", "red heart"], strategy="lantern++", k=3, num_images=2, seed=1
    )
    assert repr(drawn).startswith("<GenerationResult: 4 images, tiny, lantern++, seed 1, ")
    assert drawn._repr_png_().startswith(b"\x89PNG")
    width, height = drawn.images[0].size
    assert drawn.grid().size == (2 * width, 2 * height)
    assert drawn.grid(columns=3).size == (3 * width, 2 * height)


def test_an_observer_sees_the_steps_of_its_own_call_alone(pipeline: Pipeline) -> None:
    asked: Any = (["dog face"], pipeline.strategy("eagle"), pipeline.sampling(), 3)
    seen: list[Any] = []

    def watch(step: Any, drafted: Any, features: Any, logits: Any, judged: Any) -> Any:
        seen.append(judged)
        return judged

    done, seconds = pipeline.decode_only(*asked, observer=watch)
    assert len(seen) >= int(done.steps.max()) and seconds > 0
    count = len(seen)
    again = pipeline.generate("dog face", strategy=asked[1], seed=3)
    assert torch.equal(again.tokens, done.tokens) and len(seen) == count


def test_steps_are_timed_as_often_as_asked(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def calibrate(engine: Any, watch: object, rounds: int) -> tuple[int, int]:
        return engine.geometry.batch, rounds

    monkeypatch.setattr("lantern_accel.generation.pipeline.calibrate", calibrate)
    prompts = ["red heart", "dog face"]
    found: Any = pipeline.step_times(prompts, pipeline.strategy("scd"), pipeline.sampling(), 7)
    assert found == (2, 7)
