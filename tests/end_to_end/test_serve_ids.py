"""``POST /generate`` as SGLang's head for GLM-Image sends it: ids in, ids out."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")

from support.glm_image import write_glm_image  # noqa: E402
from support.server import Served, serving  # noqa: E402

import lantern_accel  # noqa: E402
from lantern_accel.errors import LanternWarning  # noqa: E402
from lantern_accel.families.glm_image.grids import grids  # noqa: E402
from lantern_accel.serving.studio import ServerSettings  # noqa: E402

TEXT = "a red heart"
GRID = (2, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_glm_image(tmp_path_factory.mktemp("models") / "glm")


@pytest.fixture(scope="module")
def served(folder, tmp_path_factory) -> Iterator[Served]:
    patch = pytest.MonkeyPatch()
    patch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path_factory.mktemp("cache")))
    with serving(folder, ServerSettings(slots=2)) as running:
        yield running
    patch.undo()


def body(served: Served, texts: list[str], **params: Any) -> dict[str, Any]:
    """Return a request as the head makes it, of one prompt or of a list."""
    small, large = grids(*GRID)
    ids = served.pipeline.model.text.prompts(texts, *GRID)
    count = small[0] * small[1] + large[0] * large[1]
    picture = [{"image_grid_thw": [[1, *large], [1, *small]]}]
    sampling = {"temperature": 1.0, "max_new_tokens": count + 1, "ignore_eos": True, **params}
    if len(texts) == 1:
        return {"input_ids": ids[0], "image_data": picture, "sampling_params": sampling}
    many = len(texts)
    return {
        "input_ids": ids, "image_data": [picture] * many, "sampling_params": [sampling] * many,
    }  # fmt: skip


def ask(served: Served, given: Any) -> Any:
    # The head asks whether the server is well before it starts.
    assert httpx.get(f"{served.url}/health").status_code == 200
    return httpx.post(f"{served.url}/generate", json=given, timeout=60)


def test_the_ids_are_those_of_generate_and_the_seed_is_honoured(served, folder):
    answer = ask(served, body(served, [TEXT], sampling_seed=7)).json()
    size = (GRID[1] * 32, GRID[0] * 32)
    with (
        lantern_accel.load(folder, device="cpu", dtype="float32") as pipeline,
        pytest.warns(LanternWarning, match="no pictures"),
    ):
        own = pipeline.generate(TEXT, seed=7, size=size, temperature=1.0, strategy="vanilla")
    assert answer["output_ids"] == own.tokens[0].tolist()
    info = answer["meta_info"]
    assert info["completion_tokens"] == len(answer["output_ids"]) == own.tokens.shape[1]
    assert info["prompt_tokens"] == len(body(served, [TEXT])["input_ids"])
    codes = info["distribution"]["ids_below"]
    assert max(answer["output_ids"]) < codes  # ids that are no codes are masked
    assert info["distribution"]["temperature"] == 1.0 and info["distribution"]["exact"]
    assert info["distribution"]["top_p"] == own.stats.sampling.top_p  # the model's own, not sent
    again = ask(served, body(served, [TEXT], sampling_seed=7)).json()
    other = ask(served, body(served, [TEXT], sampling_seed=8)).json()
    assert again["output_ids"] == answer["output_ids"] != other["output_ids"]
    usual = ask(served, body(served, [TEXT])).json()["meta_info"]
    assert usual["sampling_seed"] == 42


def test_lists_are_answered_with_lists_in_order(served):
    texts = [TEXT, "a blue fish in the sea", "dog"]
    many = ask(served, body(served, texts, sampling_seed=3)).json()
    assert isinstance(many, list) and len(many) == 3
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        single = list(
            pool.map(lambda t: ask(served, body(served, [t], sampling_seed=3)).json(), texts)
        )
    assert [one["output_ids"] for one in many] == [one["output_ids"] for one in single]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input_ids": None}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": [10**9]}, "input_ids"),
        ({"input_ids": ["a"]}, "input_ids"),
        ({"input_ids": [[1]] * 65}, "input_ids"),
        ({"input_ids": [[1], [2]], "image_data": [1]}, "image_data"),
        ({"image_data": None}, "image_data"),
        ({"image_data": [{"image_grid_thw": []}]}, "image_data"),
        ({"image_data": [{"image_grid_thw": [[1, 9999, 1]]}]}, None),
        ({"sampling_params": {"temperature": -1}}, "sampling_params"),
        ({"sampling_params": {"sampling_seed": "x"}}, "sampling_params"),
    ],
)
def test_what_is_wrong_is_told_in_the_usual_form(served, change, param):
    answer = ask(served, {**body(served, [TEXT]), **change})
    assert answer.status_code == 400, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.json()["error"]["param"] == param


def test_a_model_whose_prompts_are_text_says_where_to_ask(tiny_model):
    with serving(tiny_model, ServerSettings(slots=1)) as served:
        answer = httpx.post(f"{served.url}/generate", json={"input_ids": [1]})
    assert answer.status_code == 400
    assert "/v1/images/generations" in answer.json()["error"]["message"]


def test_a_picture_that_this_machine_cannot_paint_is_refused_in_words(served):
    answer = httpx.post(
        f"{served.url}/v1/images/generations",
        json={"prompt": TEXT, "size": "128x64", "strategy": "vanilla"},
        timeout=60,
    )
    assert answer.status_code == 400 and "POST /generate" in answer.json()["error"]["message"]
