"""Guards every request: number, key, size and time of its body, and time to read its answer."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import Awaitable, Collection

from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lantern_accel.serving.metrics import Metrics
from lantern_accel.serving.queue import Job
from lantern_accel.serving.refusals import Refusal, not_whole, refusal_of, server_closing
from lantern_accel.serving.scheduler import ServerSettings

log = logging.getLogger("lantern_accel.serving")

#: Answered without a key: load balancers ask for health, the rest is the page and what it describes.
OPEN = ("/", "/health", "/openapi.json")
#: Asked again and again by watchers: these have no line in the log.
WATCHED = ("/health", "/metrics")
#: Where images are asked for.
IMAGES_PATH = "/v1/images/generations"
#: Where a scope keeps how its request ended, one of :data:`~.metrics.OUTCOMES`.
OUTCOME = "lantern_accel.outcome"
#: Where a scope keeps the job that answers it.
JOB = "lantern_accel.job"
#: Seconds in which a server that stops sends the last answers, after its ``grace``.
LAST_ANSWERS = 5


def route_path(scope: Scope) -> str:
    """Return a request's path without the one below which the application is served."""
    return str(scope["path"]).removeprefix(scope.get("root_path") or "") or "/"


def check_head(scope: Scope, keys: Collection[str], most_body: int) -> None:
    """Raise :class:`Refusal` for a request that is not let in, by what its head says."""
    headers = {name.lower(): value for name, value in scope["headers"]}
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length[:18]) > most_body:
        raise too_long(most_body)
    # A browser that asks what a page may ask sends no key with that.
    preflight = scope.get("method") == "OPTIONS" and b"access-control-request-method" in headers
    if not keys or route_path(scope) in OPEN or preflight:
        return
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    fits = [hmac.compare_digest(given.strip(), key.encode()) for key in keys]
    if scheme.lower() == b"bearer" and any(fits):
        return
    text = "this server asks for an API key; send it as 'Authorization: Bearer KEY'"
    if given:
        text = "the API key is not one of this server's; ask its owner for one"
    raise Refusal(401, text, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def too_long(most_body: int) -> Refusal:
    """Return the refusal of a body that is longer than is read."""
    return Refusal(
        413,
        f"the body is longer than {most_body} bytes, the most that this server reads",
        code="body_too_long",
    )


class Guard:
    """ASGI middleware around the whole application: one number, one count and one log line per request.

    Of the ``keys`` a request must have one (``Authorization: Bearer KEY``); without any everybody may.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        limits: ServerSettings,
        answers: set[asyncio.Future[None]],
    ) -> None:
        """``answers``: gets the answers that are under way."""
        self.app, self.metrics, self.limits, self.answers = app, metrics, limits, answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self.limits.root_path and not scope.get("root_path"):
            scope["root_path"] = self.limits.root_path
        number, began = f"req_{secrets.token_hex(12)}", time.monotonic()
        status, read, more = 0, 0, True

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                pairs = list(message.get("headers", []))
                message["headers"] = [*pairs, (b"x-request-id", number.encode())]
                route = scope.get("route")  # as many labels as routes, whatever is asked for
                label = route.path if isinstance(route, Route) else "other"
                self.metrics.requests.labels(label, str(status)).inc()
            await asyncio.wait_for(send(message), self.limits.write_seconds)

        async def receive_counted() -> Message:
            nonlocal read, more
            left = began + self.limits.read_seconds - time.monotonic() if more else None
            try:
                message = await asyncio.wait_for(receive(), left)
            except asyncio.TimeoutError:
                raise not_whole(self.limits.read_seconds) from None
            more = message.get("more_body", False)
            read += len(message.get("body", b""))
            if read > self.limits.most_body:
                raise too_long(self.limits.most_body)
            return message

        try:
            check_head(scope, self.limits.keys, self.limits.most_body)
            await self._outlive(scope, self.app(scope, receive_counted, send_counted))
            usual = "failed" if status >= 500 else "refused" if status >= 400 else "ok"
            scope.setdefault(OUTCOME, usual)
        except asyncio.TimeoutError:
            scope[OUTCOME] = "cancelled"
            log.info("%s: the client did not read its answer and was let go", number)
        except ClientDisconnect:
            scope[OUTCOME] = "cancelled"
        except Exception as error:
            refusal = refusal_of(error)
            scope[OUTCOME] = refusal.outcome
            if not isinstance(error, Refusal):
                scope[OUTCOME] = "failed"
                log.error("%s failed", number, exc_info=error)
            if not status:
                await refusal.response()(scope, receive, send_counted)
        finally:
            self._over(scope, number, status, time.monotonic() - began)

    async def _outlive(self, scope: Scope, answer: Awaitable[None]) -> None:
        """Answer a request; one that the server around cancels gets an error that clients retry."""
        work = asyncio.ensure_future(answer)
        self.answers.add(work)
        work.add_done_callback(self.answers.discard)
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            job: Job | None = scope.get(JOB)
            if job is None:
                raise server_closing() from None
            job.end(server_closing())
            await asyncio.wait({work}, timeout=LAST_ANSWERS)
        finally:
            work.cancel()
        await work

    def _over(self, scope: Scope, number: str, status: int, seconds: float) -> None:
        """Count a request that is over, and write its line into the log."""
        # Cancelled from outside, it has said nothing of its end.
        outcome = scope.get(OUTCOME, "cancelled")
        method, path = scope.get("method", ""), route_path(scope)
        if method == "POST" and path == IMAGES_PATH:
            self.metrics.seconds.labels(outcome).observe(seconds)
        quiet = path in WATCHED and method in ("GET", "HEAD") and status == 200
        quiet |= not status and outcome == "cancelled"  # its client left before it was asked for
        client = ":".join(map(str, scope.get("client") or ("-",)))
        # As it came, in percent signs: a path may hold the end of a line.
        raw = scope.get("raw_path") or path.encode()
        words = (number, client, method, raw.decode("ascii", "replace")[:200], status, outcome)
        log.log(
            logging.DEBUG if quiet else logging.INFO, "%s %s %s %s: %s %s, %.3f s", *words, seconds
        )
