"""The application: OpenAI's images API, health, metrics and a page; and its run with uvicorn."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import resources
from types import FrameType

import uvicorn
from fastapi import FastAPI, Request
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.types import Scope

import lantern_accel
from lantern_accel import extensions
from lantern_accel.errors import LanternError, did_you_mean
from lantern_accel.extensions import load_extensions
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.serving import answer
from lantern_accel.serving.body import CLIENT_SIZES, Body, ImageRequest, check_text, read_body
from lantern_accel.serving.connection import Connection
from lantern_accel.serving.guard import IMAGES_PATH, JOB, LAST_ANSWERS, OUTCOME, Guard
from lantern_accel.serving.metrics import Metrics
from lantern_accel.serving.queue import Completed, Event, Finished, Job, Partial
from lantern_accel.serving.refusals import Refusal, check_model, refusal_of
from lantern_accel.serving.scheduler import Scheduler, ServerSettings
from lantern_accel.strategy.values import AUTO, STRATEGIES

#: Digits of a number in a body that are read: more than any field takes.
MOST_DIGITS = 100
#: Headers of answers that a page of another origin may read.
EXPOSED = ("x-request-id", "x-should-retry", "retry-after")
#: What is asked for, in the refusal of another path.
PATHS = (IMAGES_PATH, "/v1/models", "/health", "/run", "/metrics", "/")
#: Nothing is fetched from elsewhere, and images come as data.
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'"
)


class Inbox:
    """Carries a job's events from the scheduler's thread into the loop of its request."""

    def __init__(self, request: ImageRequest) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self.job = Job(request, self._take)

    def _take(self, event: Event) -> None:
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the loop is closed: nobody listens any more
            self.job.cancel()

    async def next(self, seconds: float | None = None) -> Partial | Finished | Completed | None:
        """Return the next event, None after ``seconds`` without; raises what the job failed with."""
        try:
            event = await asyncio.wait_for(self._events.get(), seconds)
        except asyncio.TimeoutError:
            return None
        if isinstance(event, Exception):
            raise event
        return event


def make_app(pipeline: Pipeline, settings: ServerSettings | None = None) -> FastAPI:
    """Return the application, which serves from its start-up to its shutdown.

    The pipeline stays the caller's, who closes it; while the application runs nobody else may use it.
    An application around it runs its lifespan: ``async with app.router.lifespan_context(app)``.
    """
    limits = settings or ServerSettings()
    metrics = Metrics(pipeline.backend, limits.slots)
    scheduler = Scheduler(pipeline, limits, metrics)
    answers = set[asyncio.Future[None]]()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        scheduler.start()
        yield
        await asyncio.to_thread(scheduler.stop, limits.grace)
        if answers:
            await asyncio.wait(answers, timeout=LAST_ANSWERS)

    app = FastAPI(
        title="lantern_accel", version=lantern_accel.__version__, lifespan=lifespan, docs_url=None,
        redoc_url=None,
    )  # fmt: skip
    app.state.scheduler = scheduler
    app.add_middleware(Guard, metrics=metrics, limits=limits, answers=answers)
    if limits.origins:  # outside the guard: a preflight has no key, and errors are read too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=limits.origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=EXPOSED,
        )
    _add_errors(app)
    _add_routes(app, scheduler)
    return app


def _add_errors(app: FastAPI) -> None:
    """Answer every error with an object of all four keys: the clients show no other text."""

    def refuse(request: Request, error: Exception) -> Response:
        found = refusal_of(error)
        if isinstance(error, HTTPException):
            text = f"{request.method} {request.url.path[:80]}: {error.detail}"
            if error.status_code == 404:
                text += did_you_mean(request.url.path, PATHS)
            found = Refusal(error.status_code, text, headers=dict(error.headers or {}))
        request.scope[OUTCOME] = found.outcome
        return found.response()

    for kind in (HTTPException, Refusal, LanternError):
        app.add_exception_handler(kind, refuse)


async def _json(request: Request) -> object:
    """Return the body; raises :class:`Refusal` for one that is not JSON, or no text."""
    try:
        # Python reads no number of thousands of digits; the field's own check refuses the first ones.
        found = json.loads(await request.body(), parse_int=lambda digits: int(digits[:MOST_DIGITS]))
        check_text(found)
        return found
    except (ValueError, RecursionError) as error:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()[:60]
        packed = request.headers.get("content-encoding", "identity").strip().lower()[:20]
        packed = "gzip" if (await request.body()).startswith(b"\x1f\x8b") else packed
        if packed != "identity" or (kind and not kind.endswith("json") and kind[:5] != "text/"):
            said = f"the body is {kind or 'JSON'}, encoded with {packed}; send JSON as it is"
            raise Refusal(415, said, code="unsupported_media_type") from None
        said = f"the body is not JSON ({str(error)[:80]})"
        raise Refusal(400, f'{said}; send an object such as {{"prompt": "red heart"}}') from None


async def _wait_for_disconnect(request: Request) -> None:
    """Return when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _add_routes(app: FastAPI, scheduler: Scheduler) -> None:
    pipeline, settings, metrics = scheduler.pipeline, scheduler.limits, scheduler.metrics
    manifest = pipeline.manifest
    model, created = str(manifest.name), int(time.time())
    fields = {"application/json": {"schema": Body.model_json_schema()}}

    @app.post(IMAGES_PATH, openapi_extra={"requestBody": {"content": fields, "required": True}})
    async def generations(request: Request) -> Response:
        """Generate images: as JSON, or as a stream of events."""
        asked = read_body(await _json(request), pipeline.model, settings.most_prompt)
        inbox = Inbox(asked)
        scheduler.submit(inbox.job)
        request.scope[JOB] = inbox.job
        if asked.body.stream:
            headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
            events = _events(inbox, asked, model, settings.silence, request.scope)
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)
        return await _answer_whole(request, inbox, asked, model)

    @app.head("/v1/models", include_in_schema=False)
    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        """List the model, its size and its strategies."""
        return {"object": "list", "data": [card()]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, object]:
        """Describe the model; 404 for another name."""
        check_model(name, model)
        return card()

    def card() -> dict[str, object]:
        width, height = pipeline.model.family.image_size(manifest, None)
        return {
            "id": model,
            "object": "model",
            "created": created,
            "owned_by": "lantern_accel",
            "size": f"{width}x{height}",
            "mapped_sizes": list(CLIENT_SIZES),
            "strategies": [
                name
                for name in (AUTO, *STRATEGIES)
                if pipeline.model.drafter is not None or not pipeline.strategy(name).needs_drafter
            ],
        }

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        """Answer 200 while it serves, and 503 after the device was lost."""
        body = {
            "status": scheduler.state,
            "model": model,
            "device": str(pipeline.backend.device),
            "device_name": pipeline.backend.facts().name,
            "dtype": str(pipeline.dtype).removeprefix("torch."),
            "slots": settings.slots,
            "lantern_accel": lantern_accel.__version__,
        }
        if scheduler.queue.broken is not None:
            body["error"] = scheduler.queue.broken
        return JSONResponse(body, 200 if scheduler.state == "ok" else 503)

    @app.head("/metrics", include_in_schema=False)
    @app.get("/metrics")
    async def figures() -> Response:
        """Return metrics for Prometheus."""
        return Response(
            generate_latest(metrics.registry), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    for _, add_route in load_extensions(extensions.ROUTES):
        add_route(app, pipeline)

    page = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")

    @app.head("/", include_in_schema=False)
    @app.get("/")
    async def home() -> Response:
        """Show this page."""
        return HTMLResponse(page, headers={"Content-Security-Policy": PAGE_POLICY})


async def _answer_whole(
    request: Request, inbox: Inbox, asked: ImageRequest, model: str
) -> Response:
    """Answer with what is generated, and stop where the client leaves before."""

    async def wait_for_images() -> dict[str, object]:
        done: list[Finished] = []
        while not isinstance(event := await inbox.next(), Completed):
            if isinstance(event, Finished):
                done.append(event)
        return await asyncio.to_thread(answer.whole_answer, asked, model, done, event)

    work = asyncio.ensure_future(wait_for_images())
    leaving = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            request.scope[OUTCOME] = "cancelled"
            # Nobody reads this; 499 is what others log for a client that has left.
            return Response(status_code=499)
        return JSONResponse(work.result())
    finally:
        inbox.job.cancel()
        work.cancel()
        leaving.cancel()


async def _events(
    inbox: Inbox, asked: ImageRequest, model: str, silence: float, scope: Scope
) -> AsyncIterator[str]:
    """Write the events of a streamed request: it always ends in completed ones, or in an error.

    A client takes a stream that breaks off for one that is complete. Where there is no event for
    ``silence`` seconds, a comment is written: proxies cut connections on which nothing moves.
    """
    done: list[Finished] = []
    scope[OUTCOME] = "cancelled"  # unless it comes to its end
    try:
        while not isinstance(event := await inbox.next(silence), Completed):
            if event is None:
                yield answer.COMMENT
            elif isinstance(event, Finished):
                done.append(event)
            else:
                yield answer.sse(await asyncio.to_thread(answer.partial_event, asked, event))
        for one in done:
            made = await asyncio.to_thread(answer.completed_event, asked, model, one, event)
            yield answer.sse(made)
        scope[OUTCOME] = "ok"
    except Exception as error:
        refusal = refusal_of(error)
        scope[OUTCOME] = refusal.outcome
        yield answer.sse(refusal.body())
    finally:
        inbox.job.cancel()


class Server(uvicorn.Server):
    """Stops in order: what waits is refused at once, what runs is finished within ``grace``."""

    def __init__(self, app: FastAPI, *, grace: float, host: str, port: int) -> None:
        scheduler: Scheduler = app.state.scheduler
        logs = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
        logs["loggers"]["lantern_accel.serving"] = {"handlers": ["default"], "level": "INFO"}
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            log_level="info",
            access_log=False,  # the guard writes a line per request
            log_config=logs,
            timeout_graceful_shutdown=math.ceil(grace),  # the guard answers what is left then
            server_header=False,
            http=type("Bounded", (Connection,), {"seconds": scheduler.limits.read_seconds}),
        )
        super().__init__(config)
        self._scheduler = scheduler

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse what waits before what runs is waited for."""
        self._scheduler.drain()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop on a signal; a second Ctrl-C does not wait for what runs.

        uvicorn would raise the signal again once all is answered, and the device would not be closed.
        """
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True
