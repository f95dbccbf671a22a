"""Guards every request: number, key, size of its body, and time to read its answer."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from lantern_accel.serving.metrics import Metrics
from lantern_accel.serving.refusals import Refusal, refusal_of
from lantern_accel.serving.studio import ServerSettings

log = logging.getLogger("lantern_accel.serving")

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]

#: Answered without a key: load balancers ask for the one, and the other is the page that asks for a key.
OPEN = ("/", "/health")


class TooLong(Exception):
    """A body that was longer than is read."""


def refused(scope: Any, keys: Collection[str], most_body: int) -> Refusal | None:
    """Return why a request is not let in, by what its head says; None where it is."""
    headers = {name.lower(): value for name, value in scope["headers"]}
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length[:18]) > most_body:
        return too_long(most_body)
    if not keys or scope["path"] in OPEN:
        return None
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    fits = [hmac.compare_digest(given.strip(), key.encode()) for key in keys]
    if scheme.lower() == b"bearer" and any(fits):
        return None
    text = "this server asks for an API key; send it as 'Authorization: Bearer KEY'"
    if given:
        text = "the API key is not one of this server's; ask its owner for one"
    return Refusal(401, text, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def too_long(most_body: int) -> Refusal:
    """Return the refusal of a body that is longer than is read."""
    return Refusal(
        413,
        f"the body is longer than {most_body} bytes, the most that this server reads",
        code="body_too_long",
    )


class Gate:
    """ASGI middleware around the whole application.

    Of the ``keys`` a request must bring one (``Authorization: Bearer KEY``); without any everybody may.
    """

    def __init__(self, app: Any, metrics: Metrics, limits: ServerSettings) -> None:
        self.app, self.metrics, self.limits = app, metrics, limits

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        number = f"req_{secrets.token_hex(12)}"
        begun = False

        async def told(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                pairs = list(message.get("headers", []))
                message["headers"] = [*pairs, (b"x-request-id", number.encode())]
                # The path of the route, so that there are as many labels as routes.
                path = getattr(scope.get("route"), "path", "other")
                self.metrics.requests.labels(path, str(message["status"])).inc()
            await asyncio.wait_for(send(message), self.limits.write_seconds)

        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.limits.most_body:
                raise TooLong
            return message

        refusal = refused(scope, self.limits.keys, self.limits.most_body)
        try:
            if refusal is not None:
                await refusal.response()(scope, receive, told)
                return
            await self.app(scope, counted, told)
        except TooLong:
            if not begun:
                await too_long(self.limits.most_body).response()(scope, receive, told)
        except asyncio.TimeoutError:
            log.info("%s: the client did not read its answer and was let go", number)
        except Exception as error:
            log.error("%s failed", number, exc_info=error)
            if not begun:
                await refusal_of(error).response()(scope, receive, told)
