"""What becomes of a service's requests: by load, stops, clients that leave, proxies and pages."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
uvicorn = pytest.importorskip("uvicorn")

from fastapi import FastAPI  # noqa: E402, after importorskip
from support.server import (  # noqa: E402, after importorskip
    BODY,
    PATH,
    Held,
    Served,
    ask,
    draw,
    serving,
)

import lantern_accel  # noqa: E402, after importorskip
from lantern_accel.cli.serve import _origin, _root_path  # noqa: E402, after importorskip
from lantern_accel.device.backend import MemoryUse  # noqa: E402, after importorskip
from lantern_accel.errors import DeviceLostError, RequestError  # noqa: E402, after importorskip
from lantern_accel.generation.batch import Batch  # noqa: E402, after importorskip
from lantern_accel.serving.app import make_app  # noqa: E402, after importorskip
from lantern_accel.serving.guard import Guard  # noqa: E402, after importorskip
from lantern_accel.serving.scheduler import ServerSettings, usual_slots  # noqa: E402, after importorskip

PAGE = "https://pages.example"


@pytest.fixture(scope="module")
def served(tiny_model, tmp_path_factory) -> Iterator[Served]:
    patch = pytest.MonkeyPatch()
    patch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path_factory.mktemp("cache")))
    settings = ServerSettings(slots=2, keys=("key", "other"), origins=(PAGE,), root_path="/draw")
    with serving(tiny_model, settings) as running:
        yield running
    patch.undo()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for requests that wait; they end with the server, which a test's own fixtures end."""
    with ThreadPoolExecutor() as threads:
        yield threads


@pytest.fixture
def held(pool, tiny_model, monkeypatch) -> Iterator[tuple[Served, Held]]:
    """A server with one row and room for two more images, whose steps wait for the test."""
    hold = Held(monkeypatch)
    settings = ServerSettings(slots=1, queue=2, grace=30, silence=0.05)
    with serving(tiny_model, settings) as running:
        try:
            yield running, hold
        finally:
            hold.go.set()


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


def test_answers_are_counted_by_route_and_status(served):
    """As many labels as routes: what is refused by its head, or asks for nothing, is under one."""

    def counted(path: str, status: int) -> float:
        labels = {"path": path, "status": str(status)}
        registry: Any = served.scheduler.metrics.registry
        return float(registry.get_sample_value("lantern_requests_total", labels) or 0)

    before = counted("other", 413)
    assert httpx.post(served.url + PATH, content=b" " * (1 << 21)).status_code == 413
    assert counted("other", 413) == before + 1
    assert ask(served, n=99).status_code == 400 and counted(PATH, 400)


# --- what happens under load, and at a stop -----------------------------------------------------


def test_a_full_queue_says_when_to_come_back_and_a_retry_is_allowed(held, pool):
    served, hold = held
    running = pool.submit(draw, served)
    assert hold.inside.wait(20)
    with pytest.raises(openai.BadRequestError, match="n cannot be 3: this server keeps 2"):
        draw(served, n=3)  # no retry would help
    waiting = pool.submit(draw, served, n=2)
    served.until(lambda: served.counted("queue_images") == 2)
    with pytest.raises(openai.RateLimitError) as caught:
        draw(served)
    headers = caught.value.response.headers
    assert int(headers["Retry-After"]) >= 1 and "x-should-retry" not in headers
    assert caught.value.code == "queue_full"
    hold.go.set()
    assert running.result(20).data and len(waiting.result(20).data) == 2


def test_a_stream_that_waits_sends_comments_which_clients_pass_over(held, pool):
    """Proxies cut connections on which nothing moves."""
    served, hold = held
    streamed = pool.submit(draw, served, stream=True)
    assert hold.inside.wait(20)
    body = {**BODY, "stream": True}
    with httpx.stream("POST", served.url + PATH, json=body, timeout=20) as behind:
        lines = behind.iter_lines()
        assert [next(lines) for _ in range(3)] == [": waiting", "", ": waiting"]
        hold.go.set()
        assert "event: image_generation.completed" in lines
    assert [one.type for one in streamed.result(20)] == ["image_generation.completed"]


def test_a_client_that_leaves_takes_its_image_along(held):
    served, hold = held
    with httpx.Client() as client:
        body = {**BODY, "stream": True, "partial_images": 3}
        request = client.build_request("POST", f"{served.url}{PATH}", json=body)
        streamed = client.send(request, stream=True)
        assert hold.inside.wait(20)
        with pytest.raises(httpx.ReadTimeout):  # one that is not streamed, and waits
            client.post(f"{served.url}{PATH}", json=body | {"stream": False}, timeout=0.3)
        streamed.close()
    served.until(lambda: served.scheduler.running[0].job.over)
    hold.go.set()
    served.until(lambda: served.counted("cancelled_images_total") == 2)
    served.until(lambda: ended(served, "cancelled") == 2)
    assert served.counted("images_total") == 0 == ended(served, "ok")
    assert draw(served).data and served.counted("images_total") == 1


def test_the_deadline_ends_a_request_and_no_retry_computes_it_again(tiny_model, monkeypatch, pool):
    hold = Held(monkeypatch)
    with serving(tiny_model, ServerSettings(slots=1, deadline=0.2, grace=30)) as served:
        asked = [pool.submit(draw, served), pool.submit(draw, served, stream=True)]
        assert hold.inside.wait(20)
        time.sleep(0.4)
        hold.go.set()
        failures = []
        for one in asked:
            with pytest.raises(openai.APIError) as caught:
                list(one.result(20))
            failures.append(caught.value)
        assert {one.code for one in failures} == {"deadline_exceeded"}
        assert failures[0].response.headers["x-should-retry"] == "false"
        assert isinstance(failures[0], openai.InternalServerError)
        served.until(lambda: ended(served, "failed") == 2)
        assert served.counted("failed_requests_total") == 2


def test_a_stop_finishes_what_runs_and_sends_away_what_waits(held, pool):
    served, hold = held
    running = pool.submit(draw, served)
    assert hold.inside.wait(20)
    waiting = pool.submit(draw, served)
    served.until(lambda: served.counted("queue_images") == 1)
    served.server.should_exit = True
    with pytest.raises(openai.InternalServerError) as caught:
        waiting.result(20)
    assert caught.value.status_code == 503 and caught.value.code == "shutting_down"
    hold.go.set()
    assert running.result(20).data


def test_a_batch_that_fails_fails_alone(tiny_model, monkeypatch):
    with serving(tiny_model, ServerSettings(slots=1, grace=30)) as served:
        advance, failing = Batch.advance, iter([True])

        def broken(slots: Batch, *_: object) -> object:
            if next(failing, False):
                raise RuntimeError("a wire came loose")
            return advance(slots, *_)

        monkeypatch.setattr(Batch, "advance", broken)
        with pytest.raises(openai.InternalServerError) as caught:
            draw(served)
        assert caught.value.response.headers["x-should-retry"] == "false"
        assert "wire" not in caught.value.message  # a stranger learns nothing of our insides
        assert draw(served).data


def test_a_lost_device_ends_what_runs_and_waits_and_is_told_at_the_door(held, pool, monkeypatch):
    served, hold = held
    running = pool.submit(draw, served)
    assert hold.inside.wait(20)
    waiting = pool.submit(draw, served)
    served.until(lambda: served.counted("queue_images") == 1)

    def gone(slots: Batch, *_: object) -> object:
        raise DeviceLostError("the card fell off the bus")

    monkeypatch.setattr(Batch, "advance", gone)
    hold.go.set()
    for one in (running, waiting):
        with pytest.raises(openai.InternalServerError, match="fell off the bus"):
            one.result(20)
    with pytest.raises(openai.InternalServerError) as caught:
        draw(served)
    assert caught.value.code == "device_lost" and caught.value.status_code == 503
    assert caught.value.response.headers["x-should-retry"] == "false"
    health = httpx.get(f"{served.url}/health")
    assert health.status_code == 503 and health.json()["status"] == "failed"


@contextmanager
def mounted(model: Any, grace: float, started: bool = True) -> Iterator[Any]:
    """Run the application within another one, on uvicorn's own server; gives that and its address."""
    with lantern_accel.load(model, device="cpu", dtype="float32") as pipeline:
        inner = make_app(pipeline, ServerSettings(slots=1, grace=grace))
        life = inner.router.lifespan_context
        outer = FastAPI(lifespan=(lambda app: life(inner)) if started else None)
        outer.mount("/draw", inner)
        config = uvicorn.Config(outer, port=0, timeout_graceful_shutdown=1, log_level="error")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            while not server.started:
                time.sleep(0.005)
            port = server.servers[0].sockets[0].getsockname()[1]
            yield SimpleNamespace(server=server, url=f"http://127.0.0.1:{port}/draw")
        finally:
            server.should_exit = True
            thread.join(30)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("own_server", [False, True])
def test_what_is_not_finished_within_the_grace_is_refused(
    tiny_model, monkeypatch, pool, stream, own_server
):
    hold = Held(monkeypatch)
    settings = ServerSettings(slots=1, grace=0.2)
    # Each cancels what is left: after the grace, or before the application's own is over.
    running = serving(tiny_model, settings) if own_server else mounted(tiny_model, 30)
    with running as served:
        asked = pool.submit(ask, served, n=2, stream=stream)  # the second image waits
        assert hold.inside.wait(20)
        served.server.should_exit = True
        answer = asked.result(20)
        hold.go.set()
    assert answer.status_code == (200 if stream else 503)
    text = answer.text.partition("event: error\ndata: ")[2] if stream else answer.text
    assert json.loads(text)["error"]["code"] == "shutting_down"
    assert "x-should-retry" not in answer.headers


@pytest.mark.parametrize("cancelled", [True, False], ids=["its server cancels", "or waits"])
def test_an_application_ends_when_its_answers_are_sent(tiny_model, monkeypatch, cancelled):
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
            if cancelled:
                asking.cancel()
        assert told[0]["status"] == 503 and b"shutting_down" in told[1]["body"]
        hold.go.set()

    with lantern_accel.load(tiny_model, device="cpu", dtype="float32") as pipeline:
        asyncio.run(run(make_app(pipeline, ServerSettings(grace=0.01))))


def test_an_application_in_another_that_never_started_says_so(tiny_model):
    with mounted(tiny_model, 0.1, started=False) as served:
        error = ask(served).json()["error"]
    assert error["code"] == "not_started" and "lifespan" in error["message"]


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


def test_a_client_that_leaves_its_request_half_sent_fails_nothing(served, caplog):
    before = ended(served, "cancelled"), ended(served, "failed")
    with caplog.at_level(logging.INFO):
        sent(served, "half a body").close()
        served.until(lambda: ended(served, "cancelled") == before[0] + 1)
    assert ended(served, "failed") == before[1]
    assert not any(record.exc_info or "cancelled" in record.message for record in caplog.records)


def test_many_halves_hinder_neither_others_nor_a_stop(tiny_model, caplog):
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
    assert not any(record.exc_info or "serving" in record.name for record in caplog.records)


def test_a_client_that_does_not_read_is_let_go():
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


# --- keys, pages and proxies --------------------------------------------------------------------------


def test_keys_open_the_door(served):
    assert draw(served, key="other").data
    with pytest.raises(openai.AuthenticationError) as caught:
        draw(served, key="three")
    assert caught.value.code == "invalid_api_key"


def test_a_service_has_four_rows_or_as_many_as_fit(tiny_model, monkeypatch):
    with lantern_accel.load(tiny_model, device="cpu") as pipeline:
        assert usual_slots(pipeline) == 4
        capacity, defaults = pipeline.engines.capacity, pipeline.model.manifest.defaults
        need = capacity.count_bytes(2, pipeline.strategy("auto"), defaults.sampling)
        use = MemoryUse(limit=2**34, free=need)
        monkeypatch.setattr(pipeline.backend, "memory", lambda: use)
        assert usual_slots(pipeline) < 4


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
        # No origin may, and no key is asked for.
        assert preflight(closed.url, PAGE).status_code == 405
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


def test_origins_and_paths_are_as_browsers_and_servers_write_them():
    origins = {"*": "*", "HTTPS://A.example/": "https://a.example", "http://a:81": "http://a:81"}
    assert {text: _origin(text) for text in origins} == origins
    assert [_root_path(text) for text in ("", "/", "a/b/", "/a")] == ["", "", "/a/b", "/a"]
    with pytest.raises(RequestError, match="a scheme and a host"):
        _origin("https://a.example/x")
    with pytest.raises(RequestError, match="a path such as /images"):
        _root_path("http://a")
