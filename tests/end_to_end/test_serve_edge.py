"""The service as programs, proxies and pages around it see it."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

from support.janus import write_janus  # noqa: E402
from support.server import Held, Served, serving  # noqa: E402

from lantern_accel.cli import main  # noqa: E402
from lantern_accel.cli.serve import _origin, _root_path  # noqa: E402
from lantern_accel.errors import RequestError  # noqa: E402, after importorskip
from lantern_accel.serving.queue import STAGES  # noqa: E402
from lantern_accel.serving.studio import ServerSettings  # noqa: E402

PATH = "/v1/images/generations"
BODY = {"prompt": "red heart", "seed": 7, "strategy": "vanilla"}
PAGE = "https://pages.example"


@pytest.fixture(scope="module")
def served(tiny_model, tmp_path_factory) -> Iterator[Served]:
    patch = pytest.MonkeyPatch()
    patch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path_factory.mktemp("cache")))
    settings = ServerSettings(slots=2, keys=("key",), origins=(PAGE,), root_path="/draw")
    with serving(tiny_model, settings) as running:
        yield running
    patch.undo()


def ask(served: Served, path: str = PATH, **body: Any) -> Any:
    key = {"Authorization": "Bearer key"}
    return httpx.post(served.url + path, json={**BODY, **body}, headers=key, timeout=60)


def ended(served: Served, outcome: str) -> float:
    """Return how many requests ended so."""
    found: Any = served.studio.metrics.registry.get_sample_value(
        "lantern_request_seconds_count", {"outcome": outcome}
    )
    return float(found)


# --- how a request ended ---------------------------------------------------------------------------


def test_requests_are_counted_by_how_they_ended_streamed_ones_too(served):
    before = {name: ended(served, name) for name in ("ok", "refused", "cancelled", "failed")}
    assert ask(served).status_code == 200
    assert "image_generation.completed" in ask(served, stream=True).text
    assert ask(served, n=99).status_code == 400
    assert httpx.post(served.url + PATH, json=BODY).status_code == 401
    streamed = ask(served, stream=True, negative_prompt="a blue fish in the sea").text
    assert "as many tokens" in streamed
    # A request is counted when its answer has been sent, which a client may see earlier.
    expected = {"ok": 2, "refused": 3, "cancelled": 0, "failed": 0}
    assert served.counted("failed_requests_total") == 0
    served.until(lambda: {name: ended(served, name) - before[name] for name in before} == expected)


@pytest.mark.parametrize("prefix", ["", "/draw"])
def test_what_is_refused_by_its_head_is_counted_under_its_route(served, prefix):
    def counted(path: str, status: int) -> float:
        labels = {"path": path, "status": str(status)}
        registry: Any = served.studio.metrics.registry
        return float(registry.get_sample_value("lantern_requests_total", labels) or 0)

    long = b" " * (1 << 21)
    for path, route in ((PATH, PATH), ("/v1/models/a", "/v1/models/{name:path}"), ("/no", "other")):
        before = counted(route, 413), counted(route, 401)
        method = "GET" if "models" in path else "POST"
        assert httpx.request(method, served.url + prefix + path, content=long).status_code == 413
        assert httpx.request(method, served.url + prefix + path).status_code == 401
        assert (counted(route, 413), counted(route, 401)) == (before[0] + 1, before[1] + 1)


@pytest.mark.parametrize("stream", [False, True])
def test_what_was_cancelled_and_what_failed(tiny_model, monkeypatch, stream):
    hold = Held(monkeypatch)
    with serving(tiny_model, ServerSettings(slots=1, deadline=1.0, grace=30)) as served:
        body = {**BODY, "stream": stream}
        if stream:
            with httpx.stream("POST", served.url + PATH, json=body):
                assert hold.inside.wait(20)
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(served.url + PATH, json=body, timeout=0.3)
        served.until(lambda: ended(served, "cancelled") == 1)
        late = threading.Thread(target=lambda: httpx.post(served.url + PATH, json=body, timeout=60))
        late.start()
        served.until(lambda: served.counted("queue_images") == 1)
        time.sleep(1.1)  # its deadline
        hold.go.set()
        late.join(30)
        served.until(lambda: ended(served, "failed") == 1)
        assert served.counted("failed_requests_total") == 1
        assert ended(served, "ok") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_finished_within_the_grace_is_refused(tiny_model, monkeypatch, stream):
    hold, answers = Held(monkeypatch), []
    with serving(tiny_model, ServerSettings(slots=1, grace=0.2)) as served:
        body = {**BODY, "n": 2, "stream": stream}  # the second image waits
        asking = threading.Thread(
            target=lambda: answers.append(httpx.post(served.url + PATH, json=body, timeout=60))
        )
        asking.start()
        assert hold.inside.wait(20)
        served.server.should_exit = True
        asking.join(20)
        hold.go.set()
    (answer,) = answers
    assert answer.status_code == (200 if stream else 503)
    text = answer.text.partition("event: error\ndata: ")[2] if stream else answer.text
    assert json.loads(text)["error"]["code"] == "shutting_down"


def test_a_request_is_one_line_in_the_log_and_a_watcher_is_none(served, caplog):
    with caplog.at_level(logging.INFO, "lantern_accel.serving"):
        answer = ask(served)
        ask(served, "/v1/nothing%0Ahere")
        httpx.get(f"{served.url}/health")
        served.until(lambda: len(caplog.messages) >= 2)
    lines = [m for r, m in zip(caplog.records, caplog.messages, strict=True) if "serving" in r.name]
    assert len(lines) == 2
    assert answer.headers["x-request-id"] in lines[0] and f"POST {PATH}: 200 ok" in lines[0]
    assert "red heart" not in lines[0] and "key" not in lines[0]
    assert "nothing%0Ahere: 404 refused" in lines[1]


# --- connections on which nothing moves ---------------------------------------------------------------


@contextmanager
def proxied(port: int, silence: float) -> Iterator[str]:
    """A proxy on loopback that cuts a connection on which its server says nothing for ``silence``."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve(client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", port)) as server:
            server.settimeout(silence)
            asked = b""
            while b"\r\n\r\n" not in asked:
                asked += client.recv(65536)
            head, _, body = asked.partition(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            while len(body) < length:
                body += client.recv(65536)
            server.sendall(head + b"\r\nconnection: close\r\n\r\n" + body)
            try:
                while part := server.recv(65536):
                    client.sendall(part)
            except OSError:  # it said nothing for too long, or the client has left
                return

    def run() -> None:
        while True:
            try:
                client, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(client,), daemon=True).start()

    threading.Thread(target=run, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.close()


@pytest.mark.long
@pytest.mark.parametrize("silence", [0.15, 60.0])
def test_a_stream_behind_others_outlives_a_proxy_that_cuts_silence(
    tiny_model, monkeypatch, silence
):
    hold = Held(monkeypatch)
    with serving(tiny_model, ServerSettings(slots=1, grace=30, silence=silence)) as served:
        ahead = threading.Thread(
            target=lambda: httpx.post(served.url + PATH, json=BODY, timeout=60), daemon=True
        )
        ahead.start()
        assert hold.inside.wait(20)
        with proxied(served.port, 1.0) as address:
            client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
            served.clients.append(client)
            own = {"seed": 7, "strategy": "vanilla"}
            given = {"prompt": "red heart", "extra_body": own, "stream": True}
            if silence > 1:  # the comments are what saves it
                with pytest.raises((openai.APIError, httpx.HTTPError)):
                    list(client.images.generate(**given))
                hold.go.set()
                return
            threading.Timer(2.5, hold.go.set).start()
            began = time.monotonic()
            events = list(client.images.generate(**given))
            assert time.monotonic() - began > 1.5  # it waited longer than the proxy has patience
        assert [one.type for one in events] == ["image_generation.completed"]
        ahead.join(30)
        again = httpx.post(served.url + PATH, json=BODY, timeout=60).json()
        assert again["data"][0]["b64_json"] == events[0].b64_json


# --- pages and proxies --------------------------------------------------------------------------------


def preflight(url: str, origin: str) -> Any:
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "authorization, content-type, x-stainless-os"
    return httpx.options(url + PATH, headers=asked)


def test_a_page_of_a_named_origin_may_ask(served, tiny_model):
    allowed = preflight(served.url, PAGE)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == PAGE
    assert "x-stainless-os" in allowed.headers["access-control-allow-headers"]
    other = preflight(served.url, "https://other.example")
    assert other.status_code == 400 and "access-control-allow-origin" not in other.headers
    for key, status in (("key", 200), ("wrong", 401)):  # an error is to be read too
        head = {"Origin": PAGE, "Authorization": f"Bearer {key}"}
        answer = httpx.post(served.url + PATH, json=BODY, headers=head)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, PAGE)
        assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
    with serving(tiny_model, ServerSettings(slots=1, keys=("key",))) as closed:
        assert (
            preflight(closed.url, PAGE).status_code == 405
        )  # no origin may, and no key is asked for
        assert "access-control-allow-origin" not in httpx.get(f"{closed.url}/health").headers


@pytest.mark.parametrize("prefix", ["", "/draw"])
def test_a_prefix_is_taken_off_or_was_and_the_page_asks_below_it(served, prefix):
    for path in ("/health", "/"):
        assert httpx.get(f"{served.url}{prefix}{path}").status_code == 200  # without a key
        head = httpx.head(f"{served.url}{prefix}{path}")
        assert head.status_code == 200 and not head.content
    assert httpx.get(f"{served.url}{prefix}/metrics").status_code == 401
    if prefix:  # as people write it into the address line
        assert httpx.get(f"{served.url}{prefix}", follow_redirects=True).status_code == 200
    before = ended(served, "ok")
    assert ask(served, prefix + PATH).status_code == 200
    served.until(lambda: ended(served, "ok") == before + 1)
    page = httpx.get(f"{served.url}{prefix}/").text
    assert 'fetch("/' not in page and "fetch(base + " in page
    assert 'src="/' not in page and 'href="/' not in page


def test_origins_and_paths_are_read_before_a_model_is_loaded(capsys):
    assert [_origin(text) for text in ("*", "HTTPS://A.example/", "http://a:81")] == [
        "*",
        "https://a.example",
        "http://a:81",
    ]
    assert [_root_path(text) for text in ("", "/", "a/b/", "/a")] == ["", "", "/a/b", "/a"]
    for words in (["--cors", "a.example"], ["--cors", "https://a.example/x"]):
        assert main(["serve", "--port", "0", *words]) == 2
        assert "such as https://example.org" in capsys.readouterr().err
    assert main(["serve", "--port", "0", "--root-path", "http://a"]) == 2
    assert "a path such as /images" in capsys.readouterr().err


# --- fields ---------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("given", "param", "says"),
    [
        ({"num_images": 99}, "num_images", "num_images cannot be 99"),
        ({"cfg_scale": 2, "guidance_scale": 3}, "cfg_scale", "leave one out"),
        ({"num_images": 2, "num_images_per_prompt": 3}, "num_images_per_prompt", "num_images is"),
        ({"cfg_scale": 99999}, "cfg_scale", "cfg_scale must be 1000 or less"),
        ({"guidance_scale": 99999}, "guidance_scale", "guidance_scale must be 1000 or less"),
        ({"top_p": 2}, "top_p", "top_p must be"),
        ({"top_p": True}, "top_p", "top_p cannot be true"),
        ({"temperature": "0.5"}, "temperature", 'temperature cannot be "0.5"'),
        ({"top_k": "all"}, "top_k", 'top_k cannot be "all"'),
        ({"num_image": 2}, "num_image", "did you mean num_images"),
        ({"width": 8}, "height", "height is missing"),
        ({"width": 300, "height": 200}, "width", "8x8 pixels only"),
        ({"seed": "abc"}, "seed", 'seed cannot be "abc"'),
        ({"seed": [-2]}, "seed", "-1 for a random one"),
        ({"output_format": "gif"}, "output_format", '"png", "webp" or "jpeg"'),
        ({"temperature": 99999}, "temperature", "100 or less"),
        ({"prompt": 5}, "prompt", "the prompt 5 is a number"),
        ({"negative_prompt": "a blue fish"}, "negative_prompt", "as many tokens"),
    ],
)
def test_a_field_is_refused_with_the_right_name(served, given, param, says):
    answer = ask(served, **given)
    error = answer.json()["error"]
    assert answer.status_code == 400 and says in error["message"], error
    assert error["param"] == param


@pytest.mark.parametrize("sent", ["cfg_scale", "guidance_scale"])
def test_a_field_that_the_model_refuses_later_is_named_as_it_was_sent(served, monkeypatch, sent):
    def refuse(*given: Any) -> None:
        raise RequestError("too small for this model", field="cfg_scale")

    monkeypatch.setattr(served.pipeline.runtime, "rows", refuse)
    assert ask(served, **{sent: 2.0}).json()["error"]["param"] == sent


def test_a_body_that_is_none_is_shown_as_json(served):
    key = {"Authorization": "Bearer key"}
    said = httpx.post(served.url + PATH, content=b"[]", headers=key).json()["error"]["message"]
    assert '{"prompt": "red heart"}' in said and "'" not in said


@pytest.mark.parametrize(
    ("text", "param"),
    [
        (r'{"prompt": "red heart", "\ud800": 1}', None),
        (r'{"prompt": "red heart", "se\udc00ed": 1}', None),
        (r'{"prompt": "red heart", "lora": {"\ud800": [1]}}', "lora"),
        (r'{"prompt": "red \ud83d heart"}', "prompt"),
        (r'{"prompt": "red heart", "model": "\udfff"}', "model"),
        (r'{"prompt": "red heart", "user": ["\ud800"]}', "user"),
    ],
)
def test_half_a_surrogate_pair_has_its_own_sentence(served, text, param):
    key = {"Authorization": "Bearer key"}
    answer = httpx.post(served.url + PATH, content=text.encode(), headers=key)
    error = answer.json()["error"]
    assert answer.status_code == 400 and "half a surrogate pair" in error["message"]
    assert error["param"] == param
    whole = json.dumps({**BODY, "\U0001f600": 1}).encode()  # both halves are text
    assert httpx.post(served.url + PATH, content=whole, headers=key).status_code == 200


@pytest.mark.parametrize("field", ["seed", "n", "guidance_scale"])
def test_a_number_of_thousands_of_digits_is_refused_by_its_field(served, field):
    text = json.dumps({**BODY, field: 0}).replace(f'"{field}": 0', f'"{field}": {"9" * 5000}')
    key = {"Authorization": "Bearer key"}
    error = httpx.post(served.url + PATH, content=text, headers=key).json()["error"]
    assert error["param"] == field and f"{field} " in error["message"]
    assert "not JSON" not in error["message"] and len(error["message"]) < 250


def test_minus_one_draws_a_seed_and_says_which(served):
    drawn = ask(served, seed=-1).json()
    assert drawn["seed"] >= 0
    again = ask(served, seed=drawn["seed"]).json()
    assert again["data"] == drawn["data"]
    several = ask(served, seed=[7, -1], n=2).json()
    assert several["seed"][0] == 7 and several["seed"][1] >= 0
    second = ask(served, seed=several["seed"][1]).json()
    assert second["data"][0] == several["data"][1]
    streamed = [
        json.loads(line[6:])
        for line in ask(served, seed=-1, stream=True).text.splitlines()
        if line.startswith("data: ")
    ]
    assert (
        ask(served, seed=streamed[-1]["seed"]).json()["data"][0]["b64_json"]
        == (streamed[-1]["b64_json"])
    )


def test_stages_and_peak_memory_stand_in_the_answer(served):
    for stream in (False, True):
        answer = ask(served, n=2, stream=stream)
        if stream:
            found = [line for line in answer.text.splitlines() if line.startswith("data: ")]
            told = json.loads(found[-1][6:])["statistics"]
        else:
            told = answer.json()["statistics"]
        assert tuple(told["stages"]) == STAGES
        assert all(told["stages"][name] > 0 for name in ("text", "prefill", "decode", "pixels"))
        assert told["seconds_waited"] == pytest.approx(told["stages"]["waiting"], abs=1e-3)
        whole = told["seconds"] + told["seconds_waited"]
        assert sum(told["stages"].values()) <= whole + 0.01
        assert told["peak_memory_bytes"] > 2**20
        assert told["seconds_per_image"] == pytest.approx(told["seconds"] / 2, abs=1e-4)
        tokens = told["tokens"] * (2 if stream else 1)  # an event has one image of the two
        steps = told["stages"]["prefill"] + told["stages"]["decode"]
        assert told["tokens_per_second"] == pytest.approx(tokens / steps, rel=0.2)


def test_control_strings_are_refused_at_the_door(tmp_path, monkeypatch):
    hold = Held(monkeypatch)
    folder = write_janus(tmp_path / "Janus-Pro")
    with serving(folder, ServerSettings(slots=1, grace=30)) as served:
        first = threading.Thread(
            target=lambda: httpx.post(
                served.url + PATH, json={"prompt": "a fox", "strategy": "vanilla"}, timeout=60
            )
        )
        first.start()
        assert hold.inside.wait(20)
        for name in ("prompt", "negative_prompt"):  # nothing waits for the image that is drawn
            for stream in (False, True):
                body = {"prompt": "a fox", "stream": stream, name: "a <begin_of_image> cat"}
                answer = httpx.post(served.url + PATH, json=body, timeout=5)
                error = answer.json()["error"]
                assert answer.status_code == 400 and error["param"] == name
                assert "<begin_of_image>" in error["message"]
        hold.go.set()
        first.join(30)
        body = {"prompt": "a < begin_of_image> cat", "strategy": "vanilla"}
        assert httpx.post(served.url + PATH, json=body, timeout=60).status_code == 200
