"""Images while they are drawn, and results in notebooks."""

from __future__ import annotations

import sys
import types

import pytest
import torch

import lantern_accel
from lantern_accel.errors import RequestError
from lantern_accel.generation.notebook import bar


@pytest.fixture(scope="module")
def pipeline(tiny_model, tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path_factory.mktemp("cache")))
    with lantern_accel.load(tiny_model, device="cpu", dtype="float32") as opened:
        yield opened
    patch.undo()


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
    with pipeline.stream("red heart", seed=5, strategy="vanilla") as stream:
        next(stream)
        with pytest.raises(RequestError, match="not come to its end"):
            _ = stream.result
        with pytest.raises(RequestError, match="is drawing"):
            pipeline.generate("red heart")
        assert not torch.is_inference_mode_enabled()  # which is the thread's, not the stream's
    assert pipeline.generate("red heart", seed=5).images


@pytest.mark.parametrize("given", [{"partials": -1}, {"partials": 1.5}, {"strategy": "eagel"}])
def test_a_wrong_stream_is_refused_before_it_begins(pipeline, given):
    with pytest.raises(lantern_accel.errors.LanternError):
        pipeline.stream("red heart", **given)


def test_a_result_shows_its_figures_in_a_notebook(pipeline):
    page = pipeline.generate("red heart", seed=5, strategy="lantern++")._repr_html_()
    assert "data:image/png;base64,iVBORw0KGgo" in page
    assert "total variation per token" in page and "lantern++" in page
    plain = pipeline.generate("<b>red heart</b>", seed=5, strategy="vanilla")._repr_html_()
    assert "none: exact" in plain and "<b>" not in plain


class Display(types.ModuleType):
    """Stands for ``IPython.display``: keeps what is shown."""

    def __init__(self) -> None:
        super().__init__("IPython.display")
        self.shown: list[str] = []

    def HTML(self, text: str) -> str:
        return text

    def display(self, page: str, display_id: bool) -> Display:
        self.shown.append(page)
        return self

    def update(self, page: str) -> None:
        self.shown.append(page)


def test_a_notebook_gets_a_bar_with_the_time_that_is_left(pipeline, monkeypatch):
    display = Display()
    times = iter([0.0, 1.0, 2.0, 100.0])
    report = bar(display, lambda: next(times))
    for done in (10, 20, 100):
        report(done, 100)
    assert display.shown[0].endswith("10 of 100 tokens, 9.0 s left")
    assert display.shown[1].endswith("20 of 100 tokens, 8.0 s left")
    assert display.shown[2].endswith("100 of 100 tokens in 1:40 min")
    kernel = types.ModuleType("IPython")
    kernel.get_ipython = lambda: types.SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    pipeline.generate("red heart", seed=5, strategy="vanilla")
    assert "16 of 16 tokens" in display.shown[-1]
