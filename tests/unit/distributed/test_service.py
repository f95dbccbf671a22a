"""The router between kinds of devices, and what a replica passes on; no cluster is started."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("ray")
service = pytest.importorskip("lantern_accel.distributed.service")


class Stream:
    """A replica's messages; notes when it was told to stop."""

    def __init__(self, messages: list[Any]) -> None:
        self.messages, self.cancelled = iter(messages), False

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Any:
        one = next(self.messages, None)
        if one is None:
            raise StopAsyncIteration
        if isinstance(one, Exception):
            raise one
        return one

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """Stands for Ray's handle of a deployment."""

    def __init__(self, rows: int, *messages: Any) -> None:
        async def count() -> int:
            return rows

        self.streams: list[Stream] = []
        self.asked: list[Any] = []
        self.messages = messages
        self.rows = SimpleNamespace(remote=count)
        self.answer = SimpleNamespace(remote=self._answer)

    def options(self, stream: bool) -> Handle:
        return self

    def _answer(self, scope: Any, body: bytes) -> Stream:
        self.asked.append((scope["path"], body))
        self.streams.append(Stream(list(self.messages)))
        return self.streams[-1]


def start(status: int) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": [(b"x-one", b"1")]}


def part(text: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text}


def asked(router: Any, body: bytes = b"{}", key: str = "") -> tuple[int, dict[str, str], bytes]:
    """Send one request through the router."""
    from starlette.requests import Request

    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    scope = {"type": "http", "method": "POST", "path": "/v1/images/generations",
             "headers": headers, "query_string": b"", "http_version": "1.1"}  # fmt: skip

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def go() -> tuple[int, dict[str, str], bytes]:
        answer = await router(Request(scope, receive))
        parts = getattr(answer, "body_iterator", None)
        text = answer.body if parts is None else b"".join([p async for p in parts])
        return answer.status_code, dict(answer.headers), text

    return asyncio.run(go())


def test_the_kind_with_most_rows_to_spare_answers():
    slow, fast = (
        Handle(1, start(200), part(b"slow")),
        Handle(8, start(200), part(b"fa"), part(b"st")),
    )
    router = service.Router((), 100, {"slow": 2, "fast": 1}, slow, fast)
    status, headers, text = asked(router)
    assert (status, text, headers["x-one"], headers["x-device-kind"]) == (200, b"slow", "1", "slow")
    router.busy["slow"] = 1
    assert asked(router)[2] == b"fast"
    assert router.rows == {"slow": 2, "fast": 8}
    assert router.busy == {"slow": 1, "fast": 0} and fast.streams[0].cancelled
    assert fast.asked == [("/v1/images/generations", b"{}")]


@pytest.mark.parametrize(
    "first", [[start(429), part(b"full")], [start(503)], [RuntimeError("gone")]]
)
def test_the_next_kind_is_asked_where_one_is_full_or_gone(first):
    full, other = Handle(1, *first), Handle(1, start(200), part(b"drawn"))
    router = service.Router((), 100, {"full": 1, "other": 1}, full, other)
    assert asked(router)[2] == b"drawn"
    assert router.busy == {"full": 0, "other": 0}


def test_the_last_kind_s_refusal_is_the_answer_and_no_device_is_an_error_object():
    both = [Handle(1, start(429), part(b"full")) for _ in range(2)]
    router = service.Router((), 100, {"a": 1, "b": 1}, *both)
    assert asked(router)[::2] == (429, b"full")
    gone = [Handle(1, RuntimeError("gone")) for _ in range(2)]
    status, headers, text = asked(service.Router((), 100, {"a": 1, "b": 1}, *gone))
    assert status == 502 and headers["x-should-retry"] == "false"
    assert set(json.loads(text)["error"]) == {"message", "type", "param", "code"}


def test_keys_and_sizes_are_looked_at_before_any_device_is_asked():
    one = Handle(1, start(200), part(b"drawn"))
    router = service.Router(("secret",), 4, {"one": 1}, one)
    assert asked(router)[0] == 401
    assert asked(router, b"12345", key="secret")[0] == 413
    assert not one.asked
    assert asked(router, b"1234", key="secret")[0] == 200


def test_a_replica_passes_messages_on_and_hears_that_the_client_has_left():
    heard: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        heard.append((await receive())["body"].decode())
        await send(start(200))
        await send(part(b"first"))
        heard.append((await receive())["type"])

    artist = service.Artist.__new__(service.Artist)
    artist.app = app  # type: ignore[assignment]

    async def go() -> list[Any]:
        messages = artist.answer({"type": "http"}, b"body")
        found = [await anext(messages), await anext(messages)]
        await messages.aclose()
        return found

    assert asyncio.run(go()) == [start(200), part(b"first")]
    assert heard == ["body", "http.disconnect"]
    del artist.app
