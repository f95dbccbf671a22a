"""The image service with OpenAI's own client, over a real socket."""

from __future__ import annotations

import concurrent.futures
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")

from support.server import Held, Served, pixels, same, serving  # noqa: E402

from lantern_accel.device.backend import MemoryUse  # noqa: E402, after importorskip
from lantern_accel.serving.scheduler import ServerSettings, usual_slots  # noqa: E402, after importorskip


@pytest.fixture(scope="module")
def served(tiny_model, tmp_path_factory) -> Iterator[Served]:
    patch = pytest.MonkeyPatch()
    patch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path_factory.mktemp("cache")))
    with serving(tiny_model, ServerSettings(slots=2)) as running:
        yield running
    patch.undo()


def draw(client: Any, prompt: str = "red heart", **more: Any) -> Any:
    own = {"seed": 7, "strategy": "vanilla", **more.pop("own", {})}
    return client.images.generate(prompt=prompt, extra_body=own, **more)


@pytest.fixture(scope="module")
def alone(tiny_model):
    """Draw with the library what the server should draw."""
    import lantern_accel

    with lantern_accel.load(tiny_model, device="cpu", dtype="float32") as pipeline:
        yield lambda prompt, **more: pipeline.generate(
            prompt, **{"seed": 7, "strategy": "vanilla", **more}
        )


def test_the_client_gets_the_library_s_image_and_reads_our_keys(served, alone):
    answer = draw(served.client(), own={"return_stage_metrics": True})
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
    answer = draw(served.client(), n=3)
    for one, image in zip(answer.data, alone("red heart", num_images=3).images, strict=True):
        assert same(one.b64_json, image)
    seeds = draw(served.client(), n=2, own={"seed": [7, 9]})
    assert same(seeds.data[1].b64_json, alone("red heart", seed=9).images[0])


@pytest.mark.parametrize("strategy", ["eagle", "lantern++", "scd", "auto"])
def test_drafts_are_counted_in_vllm_s_form(served, strategy):
    answer = draw(served.client(), own={"strategy": strategy})
    figures = answer.model_extra
    if strategy == "auto" and not figures["metrics"]:
        return  # auto chose plain decoding
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
    stream = draw(served.client(), stream=True, partial_images=3)
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


def test_no_partials_are_one_completed_event(served):
    assert [e.type for e in draw(served.client(), stream=True)] == ["image_generation.completed"]
    events = list(draw(served.client(), stream=True, n=2))
    assert sorted(e.model_extra["image_index"] for e in events) == [0, 1]


@pytest.mark.parametrize(
    ("given", "param", "says"),
    [
        ({"own": {"sede": 7}}, "sede", "did you mean seed?"),
        ({"own": {"guidence_scale": 2}}, "guidence_scale", "did you mean guidance_scale?"),
        ({"size": "300x200"}, "size", "8x8 pixels only"),
        ({"size": "huge"}, "size", "WIDTHxHEIGHT"),
        ({"n": 11}, "n", "1 to 10"),
        ({"prompt": "  "}, "prompt", "empty"),
        ({"prompt": "x" * 5000}, "prompt", "5000 characters"),
        ({"partial_images": 4, "stream": True}, "partial_images", "0 to 3"),
        ({"response_format": "url"}, "response_format", "b64_json"),
        ({"background": "transparent"}, "background", "no transparency"),
        ({"own": {"strategy": "eagel"}}, "strategy", "eagle"),
        ({"n": 2, "own": {"seed": [1]}}, "seed", "one for each"),
        ({"own": {"strategy": "lantern++", "relaxed": False}}, "strategy", "relaxed"),
    ],
)
def test_what_is_wrong_is_the_client_s_own_error_with_all_four_keys(served, given, param, says):
    with pytest.raises(openai.BadRequestError, match="400") as caught:
        draw(served.client(), **given)
    assert caught.value.param == param and says in caught.value.message
    assert set(caught.value.body) == {"message", "type", "param", "code"}


def test_other_wrong_requests_have_classes_of_their_own(served):
    with pytest.raises(openai.NotFoundError) as caught:
        draw(served.client(), model="dall-e-2")
    assert caught.value.code == "model_not_found" and "tiny" in caught.value.message
    assert served.client().models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        served.client().models.retrieve("large")
    for answer in (
        httpx.post(f"{served.url}/v1/images/generations", content=b"{"),
        httpx.post(f"{served.url}/v1/images/generations", content=b"[1]"),
        httpx.post(f"{served.url}/v1/images/generations", content=b"{}"),
        httpx.get(f"{served.url}/v1/image/generations"),
        httpx.get(f"{served.url}/v1/images/generations"),
        httpx.post(f"{served.url}/v1/images/generations", content=b" " * (1 << 21)),
        httpx.post(f"{served.url}/v1/images/generations", content=iter([b" " * 4096] * 300)),
    ):
        assert 400 <= answer.status_code < 500
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.headers["x-request-id"].startswith("req_")
    assert answer.status_code == 413


def test_open_webui_s_request_works_as_it_is(served):
    body = {"model": "tiny", "prompt": "red heart", "n": 1, "size": "512x512"}
    body["response_format"] = "b64_json"
    answer = httpx.post(f"{served.url}/v1/images/generations", json=body).json()
    assert answer["data"][0]["b64_json"].startswith("iVBORw0KGgo")  # it takes all for PNG
    assert answer["size"] == "8x8" and "512x512" in answer["notes"][0]


@pytest.mark.parametrize("streaming", [False, True])
def test_aiperf_s_requests_work_as_they_are(served, streaming):
    body = {"prompt": "red heart", "model": "tiny", "response_format": "b64_json", "n": 1}
    body |= {"size": "8x8", "seed": 7} | ({"stream": True} if streaming else {})
    answer = httpx.post(f"{served.url}/v1/images/generations", json=body)
    assert answer.status_code == 200
    if streaming:
        lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
        assert json.loads(lines[-1][6:])["usage"]["output_tokens"] == 16
    else:
        assert answer.json()["usage"]["output_tokens"] == 16
    page = httpx.get(f"{served.url}/metrics").text
    assert "lantern_images_total" in page
    assert "lantern_energy" not in page  # this device has no meter, which is not 0 joules


def test_a_negative_prompt_takes_the_unconditional_branch_s_place(served, alone):
    plain = draw(served.client()).data[0].b64_json
    same_length = draw(served.client(), own={"negative_prompt": "red heart"})
    # Guidance against itself is no guidance.
    assert same(same_length.data[0].b64_json, alone("red heart", cfg_scale=1).images[0])
    assert same_length.data[0].b64_json != plain
    with pytest.raises(openai.BadRequestError, match="as many tokens"):
        draw(served.client(), own={"negative_prompt": "a blue fish in the sea"})
    with pytest.raises(openai.BadRequestError, match="guidance_scale above 1"):
        draw(served.client(), own={"negative_prompt": "dog face", "guidance_scale": 1})


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
            pool.map(
                lambda j: draw(served.client(), j[0], own={"seed": j[1], "strategy": j[2]}), jobs
            )
        )
    for (prompt, seed, strategy), answer in zip(jobs, answers, strict=True):
        expected = alone(prompt, seed=seed, strategy=strategy).images[0]
        assert same(answer.data[0].b64_json, expected), (prompt, seed, strategy)


def test_health_and_models_say_what_is_served(served):
    health = httpx.get(f"{served.url}/health").json()
    assert (health["status"], health["model"], health["slots"]) == ("ok", "tiny", 2)
    card = served.client().models.list().data[0]
    assert card.id == "tiny" and card.model_extra["size"] == "8x8"


def test_weights_in_fewer_bits_say_their_price(tiny_model):
    with serving(tiny_model, ServerSettings(slots=1), weights="int4") as running:
        ours = draw(running.client()).model_extra
    assert not ours["exact"] and not ours["relaxed"]
    assert ours["statistics"]["total_variation_per_token"] > 0


# --- what happens under load ----------------------------------------------------------------------


@pytest.fixture
def held(tiny_model, monkeypatch) -> Iterator[tuple[Served, Held]]:
    """A server with one row and room for two more images, whose steps wait for the test."""
    hold = Held(monkeypatch)
    with serving(tiny_model, ServerSettings(slots=1, queue=2, grace=30)) as running:
        try:
            yield running, hold
        finally:
            hold.go.set()


def begin(served: Served, **more: Any) -> concurrent.futures.Future[Any]:
    """Send a request from a thread of its own."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(draw(served.client(), **more))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def test_a_full_queue_says_when_to_come_back_and_a_retry_is_allowed(held):
    served, hold = held
    running = begin(served)
    assert hold.inside.wait(20)
    with pytest.raises(openai.BadRequestError, match="n cannot be 3: this server keeps 2"):
        draw(served.client(), n=3)  # no retry would help
    waiting = begin(served, n=2)
    served.until(lambda: served.counted("queue_images") == 2)
    with pytest.raises(openai.RateLimitError) as caught:
        draw(served.client())
    headers = caught.value.response.headers
    assert int(headers["Retry-After"]) >= 1 and "x-should-retry" not in headers
    assert caught.value.code == "queue_full"
    hold.go.set()
    assert running.result(20).data and len(waiting.result(20).data) == 2


def test_a_client_that_leaves_takes_its_image_along(held):
    served, hold = held
    with httpx.Client() as client:
        body = {"prompt": "red heart", "strategy": "vanilla", "stream": True, "partial_images": 3}
        request = client.build_request("POST", f"{served.url}/v1/images/generations", json=body)
        streamed = client.send(request, stream=True)
        assert hold.inside.wait(20)
        with pytest.raises(httpx.ReadTimeout):  # one that is not streamed, and waits
            client.post(
                f"{served.url}/v1/images/generations", json=body | {"stream": False}, timeout=0.3
            )
        streamed.close()
    served.until(lambda: served.scheduler.running[0].job.over)
    hold.go.set()
    served.until(lambda: served.counted("cancelled_images_total") == 2)
    assert served.counted("images_total") == 0
    assert draw(served.client()).data and served.counted("images_total") == 1


def test_the_deadline_ends_a_request_and_no_retry_computes_it_again(tiny_model, monkeypatch):
    hold = Held(monkeypatch)
    with serving(tiny_model, ServerSettings(slots=1, deadline=0.2, grace=30)) as served:
        first, second = begin(served), begin(served, stream=True)
        assert hold.inside.wait(20)
        threading.Event().wait(0.4)
        hold.go.set()
        failures = []
        for one in (first, second):
            with pytest.raises(openai.APIError) as caught:
                list(one.result(20))
            failures.append(caught.value)
        assert {one.code for one in failures} == {"deadline_exceeded"}
        assert failures[0].response.headers["x-should-retry"] == "false"
        assert isinstance(failures[0], openai.InternalServerError)


def test_a_stop_finishes_what_runs_and_sends_away_what_waits(held):
    served, hold = held
    running = begin(served)
    assert hold.inside.wait(20)
    waiting = begin(served)
    served.until(lambda: served.counted("queue_images") == 1)
    served.server.should_exit = True
    with pytest.raises(openai.InternalServerError) as caught:
        waiting.result(20)
    assert caught.value.status_code == 503 and caught.value.code == "shutting_down"
    hold.go.set()
    assert running.result(20).data


def test_a_batch_that_fails_fails_alone(tiny_model, monkeypatch):
    from lantern_accel.generation.batch import Batch

    with serving(tiny_model, ServerSettings(slots=1, grace=30)) as served:
        advance, failing = Batch.advance, iter([True])

        def broken(slots: Batch, *_: object) -> object:
            if next(failing, False):
                raise RuntimeError("a wire came loose")
            return advance(slots, *_)

        monkeypatch.setattr(Batch, "advance", broken)
        with pytest.raises(openai.InternalServerError) as caught:
            draw(served.client())
        assert caught.value.response.headers["x-should-retry"] == "false"
        assert "wire" not in caught.value.message  # a stranger learns nothing of our insides
        assert draw(served.client()).data


def test_a_lost_device_ends_what_runs_and_waits_and_is_told_at_the_door(tiny_model, monkeypatch):
    from lantern_accel.errors import DeviceLostError
    from lantern_accel.generation.batch import Batch

    hold = Held(monkeypatch)
    with serving(tiny_model, ServerSettings(slots=1, grace=30)) as served:
        running = begin(served)
        assert hold.inside.wait(20)
        waiting = begin(served)
        served.until(lambda: served.counted("queue_images") == 1)

        def gone(slots: Batch, *_: object) -> object:
            raise DeviceLostError("the card fell off the bus")

        monkeypatch.setattr(Batch, "advance", gone)
        hold.go.set()
        for one in (running, waiting):
            with pytest.raises(openai.InternalServerError, match="fell off the bus"):
                one.result(20)
        with pytest.raises(openai.InternalServerError) as caught:
            draw(served.client())
        assert caught.value.code == "device_lost" and caught.value.status_code == 503
        assert caught.value.response.headers["x-should-retry"] == "false"
        health = httpx.get(f"{served.url}/health")
        assert health.status_code == 503 and health.json()["status"] == "failed"


def test_a_client_that_does_not_read_is_let_go():
    import asyncio
    from types import SimpleNamespace

    from lantern_accel.serving.guard import Guard

    left = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        finally:
            left.append("the application")

    async def never(message: Any) -> None:
        await asyncio.sleep(60)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    counter = SimpleNamespace(labels=lambda *more: SimpleNamespace(inc=lambda: None))
    metrics: Any = SimpleNamespace(requests=counter)  # all that a guard asks of them
    guard = Guard(app, metrics, ServerSettings(write_seconds=0.05), set())
    scope = {"type": "http", "path": "/", "headers": []}
    asyncio.run(asyncio.wait_for(guard(scope, receive, never), 10))
    assert left == ["the application"]


def test_keys_open_the_door_and_health_needs_none(tiny_model):
    with serving(tiny_model, ServerSettings(slots=1, keys=("one", "two"))) as served:
        assert draw(served.client("two")).data
        for key in ("three", ""):
            with pytest.raises(openai.AuthenticationError) as caught:
                draw(served.client(key or "x"))
            assert caught.value.code == "invalid_api_key"
        assert httpx.get(f"{served.url}/health").status_code == 200
        assert httpx.get(f"{served.url}/").status_code == 200
        assert httpx.get(f"{served.url}/metrics").status_code == 401


def test_a_service_has_four_rows_or_as_many_as_fit(tiny_model, monkeypatch):
    import lantern_accel

    with lantern_accel.load(tiny_model, device="cpu") as pipeline:
        assert usual_slots(pipeline) == 4
        capacity, defaults = pipeline.engines.capacity, pipeline.model.manifest.defaults
        need = capacity.needed(2, pipeline.strategy("auto"), defaults.sampling)
        use = MemoryUse(limit=2**34, free=need)
        monkeypatch.setattr(pipeline.backend, "memory", lambda: use)
        assert usual_slots(pipeline) < 4
