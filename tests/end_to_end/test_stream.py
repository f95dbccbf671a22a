"""Images while they are drawn, and results in notebooks."""

from __future__ import annotations

import asyncio
import sys
import threading
import types

import pytest
import torch

import lantern_accel
from lantern_accel.errors import RequestError
from lantern_accel.generation.batch import Batch
from lantern_accel.generation.notebook import notebook_bar


@pytest.mark.parametrize("strategy", ["vanilla", "eagle", "lantern++", "eagle2", "scd", "sjd"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_stream_draws_what_generate_draws(pipeline, strategy, batch):
    asked = {"seed": 5, "strategy": strategy, "num_images": 2, "batch_size": batch}
    prompts = ["red heart", "dog face"]
    whole = pipeline.generate(prompts, **asked)
    stream = pipeline.stream(prompts, **asked)
    seen: dict[int, torch.Tensor] = {}
    for event in stream:
        before = seen.get(event.index, torch.empty(0, dtype=torch.int64))
        assert event.known >= len(before) and torch.equal(event.tokens[: len(before)], before)
        seen[event.index] = event.tokens
        if event.done:
            assert event.image.tobytes() == whole.images[event.index].tobytes()
    assert torch.equal(torch.stack([seen[i] for i in range(4)]), whole.tokens)
    assert torch.equal(stream.result.tokens, whole.tokens)
    assert stream.result.stats.tokens_sha256 == whole.stats.tokens_sha256
    assert stream.result.stats.accepted_histogram == whole.stats.accepted_histogram


def test_partial_pictures_hold_the_finished_rows(pipeline):
    events = list(pipeline.stream("red heart", seed=5, strategy="vanilla", partials=4))
    partial = [e for e in events if e.image is not None and not e.done]
    final = events[-1]
    assert partial and final.done and final.rows == final.image.height
    for event in partial:
        assert event.rows == event.known // 4 * 2
        below = event.image.crop((0, event.rows, event.image.width, event.image.height))
        assert set(below.tobytes()) == {0xF0}
        assert event._repr_png_().startswith(b"\x89PNG")
    assert "16 tokens" in repr(partial[0]) and "done" in repr(final)


def test_a_stream_that_is_left_gives_the_pipeline_back(pipeline):
    whole = pipeline.generate("red heart", seed=5).tokens
    with pipeline.stream("red heart", seed=5, strategy="vanilla") as stream:
        next(stream)
        with pytest.raises(RequestError, match="has not ended yet"):
            _ = stream.result
        assert torch.equal(pipeline.generate("red heart", seed=5).tokens, whole)
        assert not torch.is_inference_mode_enabled()  # which is the thread's, not the stream's
    assert list(stream) == []
    assert torch.equal(pipeline.generate("red heart", seed=5).tokens, whole)


def in_other_thread(call, seconds=60):
    """Return what ``call`` returns in a thread that has never used the pipeline; fails if it waits."""
    found: list = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "the other thread waits"
    return found[0]


@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt, GeneratorExit, SystemExit])
def test_an_error_in_a_streams_loop_is_the_one_that_the_user_sees(tiny_model, kind):
    kept = None
    try:
        with lantern_accel.load(tiny_model, device="cpu", dtype="float32") as own:
            for _ in own.stream("red heart", seed=5, strategy="vanilla"):
                raise kind("the user's own")
    except BaseException as error:  # which keeps the frame, and so the stream, alive
        kept = error
    assert type(kept) is kind and kept.args == ("the user's own",)
    with pytest.raises(RequestError, match="closed"):
        own.generate("red heart")


@pytest.mark.parametrize("how", ["break", "an error", "an interrupt in a step", "not begun"])
def test_a_loop_that_is_left_locks_no_thread_out(pipeline, monkeypatch, how):
    def again() -> torch.Tensor:
        return pipeline.generate("red heart", seed=5).tokens

    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    whole, kept = again(), None
    stream = pipeline.stream("red heart", seed=5, strategy="vanilla")
    with monkeypatch.context() as patch:
        try:
            for _ in stream if how != "not begun" else ():
                if how == "break":
                    break
                if how == "an error":
                    raise KeyError("the user's own")
                patch.setattr(Batch, "advance", interrupted)
        except (KeyError, KeyboardInterrupt) as error:  # which keeps the frame, and so the stream
            kept = error
    assert (kept is not None) == how.startswith("an ")
    assert torch.equal(again(), whole) and torch.equal(in_other_thread(again), whole)


@pytest.mark.parametrize("strategy", ["vanilla", "eagle2", "lantern++", "sjd", "auto"])
@pytest.mark.parametrize("batch", [1, 2])
def test_streams_that_take_turns_draw_their_own_images(pipeline, strategy, batch):
    asked = {"strategy": strategy, "num_images": 3, "batch_size": batch}
    both = {"red heart": 5, "dog face": 6}
    whole = {p: pipeline.generate(p, seed=s, **asked).tokens for p, s in both.items()}
    open_ = {p: pipeline.stream(p, seed=s, **asked) for p, s in both.items()}
    left = dict(open_)
    for number in range(100):
        for prompt, stream in list(left.items()):
            if next(stream, None) is None:
                del left[prompt]
        if number == 1:  # the engines that they draw on are gone
            pipeline.release_engines()
    assert not left
    for prompt, stream in open_.items():
        assert torch.equal(stream.result.tokens, whole[prompt])


def test_a_stream_goes_on_after_other_calls_and_after_its_loop(pipeline):
    whole = pipeline.generate("red heart", seed=5, num_images=2, strategy="eagle").tokens
    stream = pipeline.stream("red heart", seed=5, num_images=2, strategy="eagle")
    for _ in stream:
        break
    for temperature in (0.0, 0.7):  # settings that are data of the same engine
        pipeline.generate("dog face", strategy="eagle", temperature=temperature)
    in_other_thread(lambda: next(stream))
    list(stream)
    assert torch.equal(stream.result.tokens, whole)


def test_tasks_of_an_event_loop_stream_at_once_and_may_be_cancelled(pipeline):
    whole = pipeline.generate("red heart", seed=5, strategy="vanilla").tokens

    async def one(seconds: float) -> torch.Tensor:
        stream = pipeline.stream("red heart", seed=5, strategy="vanilla")
        for _ in stream:
            await asyncio.sleep(seconds)
        return stream.result.tokens

    async def all_() -> list[torch.Tensor]:
        dropped = asyncio.create_task(one(3600))
        found = await asyncio.gather(one(0), one(0))
        dropped.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dropped
        return found

    for tokens in asyncio.run(all_()):
        assert torch.equal(tokens, whole)


def test_a_stream_whose_rows_cannot_be_kept_says_so_and_costs_others_nothing(pipeline, monkeypatch):
    stream = pipeline.stream("red heart", seed=5, strategy="vanilla")
    next(stream)

    def full(self: Batch, *_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Batch, "set_aside", full)
        assert pipeline.generate("dog face", seed=5).images
    with pytest.raises(RequestError, match="could not be saved"):
        list(stream)
    assert list(stream) == []


@pytest.mark.parametrize("given", [{"partials": -1}, {"partials": 1.5}, {"strategy": "eagel"}])
def test_a_wrong_stream_is_refused_before_it_begins(pipeline, given):
    with pytest.raises(lantern_accel.errors.LanternError):
        pipeline.stream("red heart", **given)


def test_a_result_shows_its_figures_in_a_notebook(pipeline):
    page = pipeline.generate("red heart", seed=5, strategy="lantern++")._repr_html_()
    assert "data:image/png;base64,iVBORw0KGgo" in page
    assert "(upper bound)" in page and "lantern++" in page
    plain = pipeline.generate("<b>red heart</b>", seed=5, strategy="vanilla")._repr_html_()
    assert "0: exact" in plain and "<b>" not in plain


def test_a_notebook_gets_a_bar_with_the_time_that_is_left(pipeline, monkeypatch, capsys):
    assert notebook_bar() is None
    kernel = types.ModuleType("IPython")
    kernel.get_ipython = lambda: types.SimpleNamespace(kernel=None)  # type: ignore[attr-defined]  # a stand-in module
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    assert notebook_bar() is None, "a terminal's shell has no kernel"
    kernel.get_ipython = lambda: types.SimpleNamespace(kernel=object())  # type: ignore[attr-defined]  # as above
    report = notebook_bar()
    assert report is not None
    for done in (10, 20, 100):
        report(done, 100)
    shown = capsys.readouterr().err
    assert "100/100" in shown and "tokens/s" in shown
    pipeline.generate("red heart", seed=5, strategy="vanilla")
    assert "16/16" in capsys.readouterr().err
    pipeline.generate("red heart", seed=5, strategy="vanilla", on_progress=lambda *far: None)
    assert not capsys.readouterr().err, "the caller's own bar is enough"
