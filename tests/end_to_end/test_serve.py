"""The image service's answers and refusals, over a real socket: to OpenAI's own client, and to others."""

from __future__ import annotations

import concurrent.futures
import gzip
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")

from support.janus import write_janus  # noqa: E402, after importorskip
from support.server import (  # noqa: E402, after importorskip
    BODY,
    PATH,
    Served,
    ask,
    draw,
    pixels,
    same,
    serving,
)

import lantern_accel  # noqa: E402, after importorskip
from lantern_accel.errors import RequestError  # noqa: E402, after importorskip
from lantern_accel.serving.queue import STAGES  # noqa: E402, after importorskip
from lantern_accel.serving.scheduler import ServerSettings  # noqa: E402, after importorskip


@pytest.fixture(scope="module")
def served(tiny_model, tmp_path_factory) -> Iterator[Served]:
    patch = pytest.MonkeyPatch()
    patch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path_factory.mktemp("cache")))
    with serving(tiny_model, ServerSettings(slots=2)) as running:
        yield running
    patch.undo()


def last_event(answer: Any) -> Any:
    """Return the object of a stream's last event."""
    return json.loads(answer.text.rpartition("data: ")[2])


@pytest.fixture(scope="module")
def alone(tiny_model):
    """Draw with the library what the server should draw."""
    with lantern_accel.load(tiny_model, device="cpu", dtype="float32") as pipeline:
        yield lambda prompt, **more: pipeline.generate(
            prompt, **{"seed": 7, "strategy": "vanilla", **more}
        )


def test_the_client_gets_the_library_s_image_and_reads_our_keys(served, alone):
    answer = draw(served, own={"return_stage_metrics": True})
    expected = alone("red heart")
    assert same(answer.data[0].b64_json, expected.images[0])
    assert (answer.size, answer.output_format, answer.background) == ("8x8", "png", "opaque")
    assert answer.usage.output_tokens == 16 == answer.usage.output_tokens_details.image_tokens
    assert answer.usage.total_tokens == answer.usage.input_tokens + 16
    ours = answer.model_extra
    assert ours["seed"] == 7 and ours["strategy"] == "vanilla" and not ours["relaxed"]
    assert ours["exact"] and ours["statistics"]["total_variation_per_token"] == 0
    assert ours["ignored"] == ["return_stage_metrics"]
    assert ours["statistics"]["tokens_per_step"] == expected.stats.step_compression == 1.0
    assert ours["metrics"] == {}  # nothing was drafted


def test_several_images_are_those_of_one_call_of_generate(served, alone):
    answer = draw(served, n=3)
    for one, image in zip(answer.data, alone("red heart", num_images=3).images, strict=True):
        assert same(one.b64_json, image)
    seeds = draw(served, n=2, own={"seed": [7, 9]})
    assert same(seeds.data[1].b64_json, alone("red heart", seed=9).images[0])


@pytest.mark.parametrize("strategy", ["eagle", "lantern++", "scd"])
def test_drafts_are_counted_in_vllm_s_form(served, strategy):
    figures = draw(served, own={"strategy": strategy}).model_extra
    counts = figures["metrics"]["speculative_decoding"]
    histogram, steps = counts["acceptance_histogram"], figures["statistics"]["steps"]
    assert sum(histogram) == counts["num_spec_steps"] == steps
    assert len(histogram) == counts["num_spec_tokens"] + 1
    accepted = sum(n * times for n, times in enumerate(histogram))
    assert accepted == counts["num_accepted_draft_tokens"] == 15 - steps
    assert counts["num_draft_tokens"] >= accepted
    assert counts["mean_acceptance_length"] == pytest.approx(15 / steps)
    assert figures["relaxed"] == (strategy == "lantern++")


def test_partial_images_show_finished_rows_and_end_in_the_picture(served, alone):
    stream = draw(served, stream=True, partial_images=3)
    *partials, last = list(stream)
    assert [one.type for one in partials] == ["image_generation.partial_image"] * len(partials)
    assert [one.partial_image_index for one in partials] == list(range(len(partials)))
    assert 1 <= len(partials) <= 3 and last.type == "image_generation.completed"
    assert same(last.b64_json, alone("red heart").images[0])
    assert last.usage.output_tokens == 16 and last.model_extra["seed"] == 7
    known = [one.model_extra["known_tokens"] for one in partials]
    assert known == sorted(known) and known[0] >= 4
    for one in partials:
        size, data = pixels(one.b64_json)
        rows = one.model_extra["known_tokens"] // 4 * 2  # four tokens make two rows of pixels
        empty = data[rows * 3 * size[0] :]
        assert set(empty) == {0xF0} and set(data[: rows * 3 * size[0]]) != {0xF0}


def test_no_partials_are_one_completed_event_an_image(served):
    events = list(draw(served, stream=True, n=2))
    assert {e.type for e in events} == {"image_generation.completed"}
    assert sorted(e.model_extra["image_index"] for e in events) == [0, 1]


def test_open_webui_s_request_works_as_it_is(served):
    body = {"model": "tiny", "prompt": "red heart", "n": 1, "size": "512x512"}
    body["response_format"] = "b64_json"
    answer = httpx.post(f"{served.url}{PATH}", json=body).json()
    assert answer["data"][0]["b64_json"].startswith("iVBORw0KGgo")  # it takes all for PNG
    assert answer["size"] == "8x8" and "512x512" in answer["notes"][0]


def test_a_negative_prompt_takes_the_unconditional_branch_s_place(served, alone):
    plain = draw(served).data[0].b64_json
    same_length = draw(served, own={"negative_prompt": "red heart"})
    # Guidance against itself is no guidance.
    assert same(same_length.data[0].b64_json, alone("red heart", cfg_scale=1).images[0])
    assert same_length.data[0].b64_json != plain


@pytest.mark.long
def test_clients_at_once_each_get_their_own_image(served, alone):
    jobs = [
        (p, seed, s)
        for s in ("vanilla", "eagle")
        for p in ("red heart", "dog face")
        for seed in range(4)
    ]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(lambda j: draw(served, j[0], own={"seed": j[1], "strategy": j[2]}), jobs)
        )
    for (prompt, seed, strategy), answer in zip(jobs, answers, strict=True):
        expected = alone(prompt, seed=seed, strategy=strategy).images[0]
        assert same(answer.data[0].b64_json, expected), (prompt, seed, strategy)


def test_health_models_and_metrics_say_what_is_served(served):
    health = httpx.get(f"{served.url}/health").json()
    assert (health["status"], health["model"], health["slots"]) == ("ok", "tiny", 2)
    card = served.client().models.list().data[0]
    assert card.id == "tiny" and card.model_extra["size"] == "8x8"
    assert served.client().models.retrieve("tiny").id == "tiny"
    page = httpx.get(f"{served.url}/metrics").text
    assert "lantern_images_total" in page
    assert "lantern_energy" not in page  # this device has no meter, which is not 0 joules


def test_weights_in_fewer_bits_say_their_price(tiny_model):
    with serving(tiny_model, ServerSettings(slots=1), weights="int4") as running:
        ours = draw(running).model_extra
    assert not ours["exact"] and not ours["relaxed"]
    assert ours["statistics"]["total_variation_per_token"] > 0


def test_minus_one_draws_a_seed_and_says_which(served):
    several = ask(served, seed=[7, -1], n=2).json()
    assert several["seed"][0] == 7 and several["seed"][1] >= 0
    second = ask(served, seed=several["seed"][1]).json()
    assert second["data"][0] == several["data"][1]
    streamed = last_event(ask(served, seed=-1, stream=True))
    again = ask(served, seed=streamed["seed"]).json()
    assert again["data"][0]["b64_json"] == streamed["b64_json"]


@pytest.mark.parametrize("stream", [False, True])
def test_stages_and_peak_memory_stand_in_the_answer(served, stream):
    began = time.monotonic()
    answer = ask(served, n=2, stream=stream)
    took = time.monotonic() - began
    told = (last_event(answer) if stream else answer.json())["statistics"]
    assert tuple(told["stages"]) == STAGES
    assert all(told["stages"][name] > 0 for name in ("text", "prefill", "decode", "pixels"))
    assert told["seconds_waited"] == pytest.approx(told["stages"]["waiting"], abs=1e-3)
    whole = told["seconds"] + told["seconds_waited"]
    assert sum(told["stages"].values()) <= whole + 0.01 and whole <= took
    assert told["peak_memory_bytes"] > 2**20
    assert told["seconds_per_image"] == pytest.approx(told["seconds"] / 2, abs=1e-4)
    tokens = told["tokens"] * (2 if stream else 1)  # an event has one image of the two
    steps = told["stages"]["prefill"] + told["stages"]["decode"]
    assert told["tokens_per_second"] == pytest.approx(tokens / steps, rel=0.2)


def test_names_of_ours_and_of_others_are_taken(served):
    plain = ask(served, guidance_scale=2.0, top_k=3, top_p=0.9, n=2).json()
    named = ask(served, cfg_scale=2.0, top_k=3, top_p=0.9, num_images=2).json()
    assert plain["data"] == named["data"] and len(named["data"]) == 2 and not named["ignored"]
    assert ask(served).json()["data"][0] != plain["data"][0]
    assert len(ask(served, num_images_per_prompt=2, n=2).json()["data"]) == 2
    sized = ask(served, width=8, height=8).json()
    assert sized["size"] == "8x8" and not sized["ignored"]
    other = ask(served, num_inference_steps=20, guidance=2, tree="chain:4", cfg=None).json()
    assert other["ignored"] == ["num_inference_steps", "guidance", "tree", "cfg"]


# --- what is refused ------------------------------------------------------------------------------

FORM = {"Content-Type": "application/x-www-form-urlencoded"}
ZIPPED = gzip.compress(json.dumps(BODY).encode(), mtime=0)

#: What is sent beside :data:`BODY`, the field that the answer names, and a fragment of its message. What
#: ``generate`` refuses is in tests/unit/test_refusals.py.
FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"sede": 7}, "sede", "did you mean seed?"),
    ({"num_image": 2}, "num_image", "did you mean num_images"),
    ({"size": "300x200"}, "size", "8x8 pixels only"),
    ({"size": "huge"}, "size", "WIDTHxHEIGHT"),
    ({"width": 8}, "height", "height is missing"),
    ({"n": 11}, "n", "1 to 10"),
    ({"num_images": 99}, "num_images", "num_images cannot be 99"),
    ({"num_images": 2, "num_images_per_prompt": 3}, "num_images_per_prompt", "num_images is"),
    ({"prompt": "  "}, "prompt", "empty"),
    ({"prompt": "x" * 5000}, "prompt", "5000 characters"),
    ({"prompt": 5}, "prompt", "the prompt 5 is a number"),
    ({"negative_prompt": "a blue fish"}, "negative_prompt", "as many tokens"),
    ({"partial_images": 4, "stream": True}, "partial_images", "0 to 3"),
    ({"response_format": "url"}, "response_format", "b64_json"),
    ({"background": "transparent"}, "background", "no transparency"),
    ({"output_format": "gif"}, "output_format", '"png", "webp" or "jpeg"'),
    ({"strategy": "eagel"}, "strategy", "eagle"),
    ({"strategy": "lantern++", "relaxed": False}, "strategy", "relaxed"),
    ({"cfg_scale": 2, "guidance_scale": 3}, "cfg_scale", "leave one out"),
    ({"cfg_scale": 99999}, "cfg_scale", "cfg_scale must be 1000 or less"),
    ({"guidance_scale": 99999}, "guidance_scale", "guidance_scale must be 1000 or less"),
    ({"top_p": True}, "top_p", "top_p cannot be true"),
    ({"top_k": "all"}, "top_k", 'top_k cannot be "all"'),
    ({"temperature": "0.5"}, "temperature", 'temperature cannot be "0.5"'),
    ({"seed": "abc"}, "seed", 'seed cannot be "abc"'),
    ({"seed": [-2]}, "seed", "-1 for a random one"),
    ({"n": 2, "seed": [1]}, "seed", "one for each"),
]

#: A whole body with its headers, and the status, the field and a fragment of the answer.
BODIES: list[tuple[str, bytes, dict[str, str], int, str | None, str]] = [
    ("none", b"{", {}, 400, None, "not JSON"),
    ("a list", b"[]", {}, 400, None, 'such as {"prompt": "red heart"}'),
    ("no prompt", b"{}", {}, 400, "prompt", "is missing"),
    ("not compressed", b"{", {"Content-Encoding": "Identity"}, 400, None, "not JSON"),
    ("gzip", ZIPPED, {"Content-Encoding": "gzip"}, 415, None, "gzip"),
    ("gzip unsaid", ZIPPED, {"Content-Type": "application/json"}, 415, None, "gzip"),
    ("br", b"\x0b\x80", {"Content-Encoding": "br"}, 415, None, "br"),
    ("form", b"prompt=red+heart", FORM, 415, None, "form-url"),
    ("multipart", b"--a", {"Content-Type": "multipart/form-data; boundary=a"}, 415, None,
     "multipart/form-data"),
    ("xml", b"<a/>", {"Content-Type": "application/xml"}, 415, None, "application/xml"),
    ("too long", b" " * (1 << 21), {}, 413, None, "bytes"),
    *((f"surrogate {at}", text.encode(), {}, 400, None, "half a surrogate pair")
      for at, text in enumerate((r'{"prompt": "red heart", "se\udc00ed": 1}',
                                 r'{"prompt": "red heart", "lora": {"\ud800": [1]}}'))),
    *((f"digits {field}", f'{{"prompt": "a", "{field}": {"9" * 5000}}}'.encode(), {}, 400, field,
       f"{field} ") for field in ("seed", "n", "guidance_scale")),
]  # fmt: skip


def refused(answer: Any, status: int, param: str | None, says: str) -> dict[str, Any]:
    """Return the error of an answer that has all four keys of OpenAI's errors, and a number."""
    error: dict[str, Any] = answer.json()["error"]
    assert answer.status_code == status and says in error["message"], error
    assert set(error) == {"message", "type", "param", "code"} and error["param"] == param
    assert len(error["message"]) < 300 and answer.headers["x-request-id"].startswith("req_")
    return error


@pytest.mark.parametrize(("given", "param", "says"), FIELDS)
def test_a_field_is_refused_under_the_name_that_was_sent(served, given, param, says):
    refused(ask(served, **given), 400, param, says)


@pytest.mark.parametrize(
    ("content", "headers", "status", "param", "says"),
    [one[1:] for one in BODIES],
    ids=[one[0] for one in BODIES],
)
def test_a_body_is_refused(served, content, headers, status, param, says):
    answer = httpx.post(served.url + PATH, content=content, headers=headers)
    error = refused(answer, status, param, says)
    assert (error["code"] == "unsupported_media_type") == (status == 415)


def test_a_body_without_a_length_is_read_so_far(served):
    answer = httpx.post(served.url + PATH, content=iter([b" " * 4096] * 300))
    refused(answer, 413, None, "bytes")


def test_json_is_taken_under_the_name_of_a_form_and_with_whole_pairs(served):
    """As curl sends it without a header; both halves of a surrogate pair are text."""
    body = json.dumps({**BODY, "\U0001f600": 1}).encode()
    assert httpx.post(served.url + PATH, content=body, headers=FORM).status_code == 200


def test_the_client_has_a_class_for_each_kind_of_error(served):
    with pytest.raises(openai.BadRequestError, match="400") as caught:
        draw(served, n=11)
    assert caught.value.param == "n"
    with pytest.raises(openai.NotFoundError) as caught:
        draw(served, model="dall-e-2")
    assert caught.value.code == "model_not_found" and "tiny" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        served.client().models.retrieve("large")
    refused(httpx.get(f"{served.url}/v1/image/generations"), 404, None, "did you mean /v1/images")
    refused(httpx.get(f"{served.url}{PATH}"), 405, None, f"GET {PATH}: Method Not Allowed")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("where", "field", "sent"),
    [
        ("conditions", None, "prompt"),
        ("rows", None, "prompt"),
        ("rows", "cfg_scale", "cfg_scale"),
        ("rows", "cfg_scale", "guidance_scale"),
    ],
)
def test_what_the_model_refuses_late_is_named_as_it_was_sent(
    served, monkeypatch, where, field, sent, stream
):
    def refuse(*given: Any) -> None:
        raise RequestError("too long for this model", field=field)

    monkeypatch.setattr(served.pipeline.runtime, where, refuse)
    answer = ask(served, stream=stream, **({sent: 2.0} if field else {}))
    found = last_event(answer) if stream else answer.json()
    assert found["error"]["param"] == sent


def test_control_strings_are_refused_before_they_wait(tmp_path, monkeypatch):
    with serving(write_janus(tmp_path / "Janus-Pro"), ServerSettings(slots=1)) as served:
        with monkeypatch.context() as patch:
            patch.setattr(served.scheduler, "submit", lambda job: pytest.fail("it waits"))
            for name in ("prompt", "negative_prompt"):
                answer = ask(served, **{name: "a <begin_of_image> cat"})
                refused(answer, 400, name, "<begin_of_image>")
        assert ask(served, prompt="a < begin_of_image> cat").status_code == 200
