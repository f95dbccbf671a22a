"""The service as programs, proxies and pages around it see it."""

from __future__ import annotations

import asyncio
import gzip
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
uvicorn = pytest.importorskip("uvicorn")

from support.janus import write_janus  # noqa: E402
from support.server import Held, Served, serving  # noqa: E402

import lantern_accel  # noqa: E402, after importorskip
from lantern_accel.cli import main  # noqa: E402
from lantern_accel.cli.serve import _origin, _root_path  # noqa: E402
from lantern_accel.errors import RequestError  # noqa: E402, after importorskip
from lantern_accel.serving.app import make_app  # noqa: E402
from lantern_accel.serving.queue import STAGES  # noqa: E402
from lantern_accel.serving.scheduler import ServerSettings  # noqa: E402, after importorskip

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
    found: Any = served.scheduler.metrics.registry.get_sample_value(
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
        registry: Any = served.scheduler.metrics.registry
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


# --- what does not come whole, or not in time ----------------------------------------------------------

KEY = b"authorization: Bearer key\r\n"
HEAD = b"POST /v1/images/generations HTTP/1.1\r\nhost: a\r\ncontent-length: 99\r\n"
WHOLE = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
HALVES = {
    "nothing": b"",
    "half a head": HEAD,
    "half a body": HEAD + KEY + b"\r\n{",
    "half a body without a key": HEAD + b"\r\n{",
    "half a body in chunks": HEAD[:-20] + b"transfer-encoding: chunked\r\n" + KEY + b"\r\nfff\r\n{",
    "half a head after an answer": WHOLE + HEAD,
    "half a head after a refusal": WHOLE.replace(b"health", b"metrics") + HEAD,
}


def sent(served: Served, name: str) -> socket.socket:
    found = socket.create_connection(("127.0.0.1", served.port), 20)
    found.sendall(HALVES[name])
    return found


def test_a_request_that_does_not_come_whole_is_closed_though_bytes_come(tiny_model, caplog):
    """A client that reads slowly is not one that sends slowly."""
    answers: dict[str, bytes] = {}

    def drip(name: str) -> None:
        with sent(served, name) as client:
            client.settimeout(0.1)
            answers[name] = b""
            while True:
                try:
                    part = client.recv(65536)
                    answers[name] += part
                    if not part:
                        return
                except TimeoutError:
                    if name != "nothing":
                        client.sendall(b"a")
                except ConnectionError:
                    return

    with serving(tiny_model, ServerSettings(read_seconds=0.5, keys=("key",))) as served:
        threads = [threading.Thread(target=drip, args=(name,)) for name in HALVES]
        with caplog.at_level(logging.INFO, "lantern_accel.serving"):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(10)
        assert not any(thread.is_alive() for thread in threads), answers
        failed = ended(served, "failed")
    for name, answer in answers.items():
        wanted = b"HTTP/1.1 401" if "without" in name else b"HTTP/1.1 408"
        assert wanted in answer, (name, answer)
        if wanted.endswith(b"408"):
            assert b"connection: close" in answer.lower()
            error = json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]
            assert error["code"] == "request_timeout" and set(error) >= {"message", "type", "param"}
    assert not failed and not any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_may_take_longer_than_a_request(tiny_model, monkeypatch, stream):
    hold = Held(monkeypatch)
    with serving(tiny_model, ServerSettings(read_seconds=0.2, grace=30)) as served:
        threading.Timer(0.6, hold.go.set).start()
        with httpx.Client() as client:
            for _ in range(2):  # and the connection goes on
                answer = client.post(served.url + PATH, json={**BODY, "stream": stream}, timeout=60)
                assert answer.status_code == 200 and "error" not in answer.text


def test_a_client_that_waits_to_be_asked_is_answered(served):
    """Expect: 100-continue, as curl sends it with long bodies."""
    body = json.dumps(BODY).encode()
    head = HEAD.replace(b"99", b"%d" % len(body)) + KEY + b"expect: 100-continue\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port), 20) as client:
        client.sendall(head)
        assert client.recv(1024).startswith(b"HTTP/1.1 100")
        client.sendall(body)
        assert client.recv(1024).startswith(b"HTTP/1.1 200")


def test_a_client_that_leaves_its_request_half_sent_fails_nothing(served, caplog):
    before = ended(served, "cancelled"), ended(served, "failed")
    with caplog.at_level(logging.INFO):
        sent(served, "half a body").close()
        served.until(lambda: ended(served, "cancelled") == before[0] + 1)
    assert ended(served, "failed") == before[1]
    assert not any(record.exc_info or "cancelled" in record.message for record in caplog.records)


def test_many_halves_hinder_nobody_and_a_stop_with_them_is_one_line(tiny_model, caplog):
    logged = caplog.at_level(logging.INFO, "lantern_accel.serving")
    with logged, serving(tiny_model, ServerSettings(grace=30)) as served:
        ask(served)
        halves = [sent(served, name) for name in list(HALVES)[:2] * 10]
        halves += [sent(served, "half a body") for _ in range(10)]
        assert ask(served).status_code == 200
        served.until(lambda: len(served.server.server_state.tasks) == 10)
        caplog.clear()
        began = time.monotonic()
        served.server.should_exit = True
        for half in halves:
            with half:
                assert half.recv(1) == b""
        assert time.monotonic() - began < 10
    lines = [record for record in caplog.records if "serving" in record.name]
    assert [one.getMessage()[:14] for one in lines] == ["20 connections"]
    assert not any(record.exc_info for record in caplog.records)


@contextmanager
def mounted(model: Any, grace: float, started: bool = True) -> Iterator[tuple[Any, str]]:
    """Run the application within another one, on uvicorn's own server; gives that and its address."""
    application = pytest.importorskip("fastapi").FastAPI
    with lantern_accel.load(model, device="cpu", dtype="float32") as pipeline:
        inner = make_app(pipeline, ServerSettings(slots=1, grace=grace))
        life = inner.router.lifespan_context
        outer = application(lifespan=(lambda app: life(inner)) if started else None)
        outer.mount("/draw", inner)
        config = uvicorn.Config(outer, port=0, timeout_graceful_shutdown=1, log_level="error")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            while not server.started:
                time.sleep(0.005)
            port = server.servers[0].sockets[0].getsockname()[1]
            yield server, f"http://127.0.0.1:{port}/draw{PATH}"
        finally:
            server.should_exit = True
            thread.join(30)


@pytest.mark.parametrize("stream", [False, True])
def test_an_application_in_another_answers_at_the_end_of_its_grace(tiny_model, monkeypatch, stream):
    hold, answers = Held(monkeypatch), []
    with mounted(tiny_model, 0.1) as (server, url):
        body = {**BODY, "n": 2, "stream": stream}
        asking = threading.Thread(
            target=lambda: answers.append(httpx.post(url, json=body, timeout=60))
        )
        asking.start()
        assert hold.inside.wait(20)
        server.should_exit = True
        asking.join(20)
        hold.go.set()
    assert answers[0].status_code == (200 if stream else 503)
    text = answers[0].text.partition("event: error\ndata: ")[2] if stream else answers[0].text
    assert json.loads(text)["error"]["code"] == "shutting_down"
    assert "x-should-retry" not in answers[0].headers


def test_an_application_ends_when_its_answers_are_sent(tiny_model, monkeypatch):
    hold, told, came = Held(monkeypatch), [], []
    scope = {"type": "http", "method": "POST", "path": PATH, "headers": [], "query_string": b""}

    async def receive() -> Any:
        if came:
            await asyncio.sleep(60)
        came.append(True)
        return {"type": "http.request", "body": json.dumps(BODY).encode()}

    async def send(message: Any) -> None:
        await asyncio.sleep(0.2)
        told.append(message)

    async def run(app: Any) -> None:
        async with app.router.lifespan_context(app):
            asking = asyncio.ensure_future(app(scope, receive, send))
            assert await asyncio.to_thread(hold.inside.wait, 20)
            asking.cancel()
        assert told[0]["status"] == 503 and b"shutting_down" in told[1]["body"]
        hold.go.set()

    with lantern_accel.load(tiny_model, device="cpu", dtype="float32") as pipeline:
        asyncio.run(run(make_app(pipeline, ServerSettings(grace=0.01))))


def test_an_application_in_another_that_never_started_says_so(tiny_model):
    with mounted(tiny_model, 0.1, started=False) as (_, url):
        error = httpx.post(url, json=BODY, timeout=10).json()["error"]
    assert error["code"] == "not_started" and "lifespan" in error["message"]


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
    ("body", "headers", "says"),
    [
        (gzip.compress(json.dumps(BODY).encode()), {"Content-Encoding": "gzip"}, "gzip"),
        (gzip.compress(json.dumps(BODY).encode()), {"Content-Type": "application/json"}, "gzip"),
        (b"\x0b\x80", {"Content-Encoding": "br"}, "br"),
        (b"prompt=red+heart", {"Content-Type": "application/x-www-form-urlencoded"}, "form-url"),
        (b"--a", {"Content-Type": "multipart/form-data; boundary=a"}, "multipart/form-data"),
        (b"<a/>", {"Content-Type": "application/xml"}, "application/xml"),
    ],
    ids=["gzip", "gzip unsaid", "br", "form", "multipart", "xml"],  # a gzip has the time in it
)
def test_a_body_of_another_kind_is_named(served, body, headers, says):
    head = {"Authorization": "Bearer key", **headers}
    answer = httpx.post(served.url + PATH, content=body, headers=head)
    error = answer.json()["error"]
    assert answer.status_code == 415 and error["code"] == "unsupported_media_type"
    assert says in error["message"]


def test_a_body_that_is_said_not_to_be_compressed_is_not_json(served):
    head = {"Authorization": "Bearer key", "Content-Encoding": "Identity"}
    answer = httpx.post(served.url + PATH, content=b"{", headers=head)
    assert answer.status_code == 400 and "not JSON" in answer.json()["error"]["message"]


def test_json_under_the_name_of_a_form_is_taken(served):
    """As curl sends it without a header."""
    head = {"Authorization": "Bearer key", "Content-Type": "application/x-www-form-urlencoded"}
    body = json.dumps(BODY).encode()
    assert httpx.post(served.url + PATH, content=body, headers=head).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["conditions", "rows"])
def test_a_prompt_that_the_model_refuses_late_is_named(served, monkeypatch, where, stream):
    def refuse(*given: Any) -> None:
        raise RequestError("too long for this model")

    monkeypatch.setattr(served.pipeline.runtime, where, refuse)
    before = ended(served, "refused")
    text = ask(served, stream=stream).text
    assert json.loads(text.partition("data: ")[2] if stream else text)["error"]["param"] == "prompt"
    served.until(lambda: ended(served, "refused") == before + 1)


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
