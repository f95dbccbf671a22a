"""The image service on Ray Serve: one deployment per kind of device, and a router in front of them.

Each replica runs the whole application of :mod:`lantern_accel.serving`; the router passes requests on to
the kind with the most rows to spare, and to the next one where that is full. Ray starts, watches and
replaces replicas. This module imports Ray.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, MutableMapping, Sequence
from typing import Any

from ray import serve
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from lantern_accel.distributed.fleet import Kind, placement
from lantern_accel.serving.guard import refuse_head, too_long
from lantern_accel.serving.refusals import NO_RETRY, Refusal

log = logging.getLogger("ray.serve")

#: Requests that a replica may hold; its own queue is what refuses more.
ONGOING = 1024
#: Answers after which the next kind is asked: full, or going down.
ELSEWHERE = (429, 503)
#: Seconds that a replica has to finish what runs when it is stopped.
GRACE = 300.0


class Artist:
    """A replica: one device and the application of one process, asked by :class:`Router`."""

    def __init__(
        self, load: Mapping[str, Any], settings: Mapping[str, Any], slots: int | None
    ) -> None:
        import lantern_accel
        from lantern_accel.serving.app import make_app
        from lantern_accel.serving.studio import ServerSettings

        self.pipeline = lantern_accel.load(**load)
        self.slots = slots or self.pipeline.backend.preferences.default_batch
        self.app = make_app(self.pipeline, ServerSettings(self.slots, **settings))
        self.app.state.studio.start()

    def rows(self) -> int:
        """Return how many images this replica generates at once."""
        return self.slots

    def check_health(self) -> None:
        """Raise where the device was lost: Ray then starts another replica."""
        broken = self.app.state.studio.broken
        if broken is not None:
            raise RuntimeError(broken)

    def __del__(self) -> None:
        app = getattr(self, "app", None)
        if app is not None:
            app.state.studio.stop(GRACE)
            self.pipeline.close()

    async def answer(
        self, scope: MutableMapping[str, Any], body: bytes
    ) -> AsyncIterator[MutableMapping[str, Any]]:
        """Let the application answer a request; yields what it sends, as ASGI's messages."""
        sent: asyncio.Queue[MutableMapping[str, Any] | None] = asyncio.Queue()
        gone, bodies = asyncio.Event(), [body]

        async def receive() -> MutableMapping[str, Any]:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        working = asyncio.ensure_future(self.app(scope, receive, sent.put))
        working.add_done_callback(lambda done: sent.put_nowait(None))
        try:
            while (message := await sent.get()) is not None:
                yield message
        finally:  # the client may have left half-way
            gone.set()
            await asyncio.wait({working}, timeout=5)


class Router:
    """Passes every request on to a kind of device: ``replicas`` by its name, and their handles.

    ``root_path``: the path below which a proxy serves all of it.
    """

    def __init__(
        self,
        keys: Sequence[str],
        most_body: int,
        replicas: Mapping[str, int],
        *handles: Any,
        root_path: str = "",
    ) -> None:
        self.handles = dict(zip(replicas, handles, strict=True))
        self.replicas = replicas
        self.busy = dict.fromkeys(replicas, 0)
        self.rows: dict[str, int] = {}
        self.most_body, self.keys, self.root_path = most_body, keys, root_path

    async def order(self) -> list[str]:
        """Return the kinds, the one with the fewest requests per row first."""
        for name, handle in self.handles.items():
            if name not in self.rows:
                self.rows[name] = self.replicas[name] * await handle.rows.remote()
        return sorted(self.handles, key=lambda name: self.busy[name] / self.rows[name])

    async def __call__(self, request: Request) -> Response:
        """Answer with what a replica answers; ask the next kind where one is full or going down."""
        known = {**request.scope, "root_path": self.root_path}
        refusal = refuse_head(known, self.keys, self.most_body)
        if refusal is None:
            body = b""
            async for part in request.stream():
                body += part
                if len(body) > self.most_body:
                    refusal = too_long(self.most_body)
                    break
        if refusal is not None:
            return refusal.response()
        keep = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path",
                "query_string")  # fmt: skip
        scope = {name: request.scope[name] for name in keep if name in request.scope}
        scope |= {"headers": list(request.scope["headers"]), "root_path": ""}
        names = await self.order()
        for name in names:
            messages = self._messages(name, scope, body)
            try:
                start = await anext(messages)
            except Exception as error:
                log.error("the kind %s failed", name, exc_info=error)
                await messages.aclose()
                continue
            # Their length is the replica's, and stays true.
            headers = {k.decode(): v.decode() for k, v in start["headers"]}
            if start["status"] in ELSEWHERE and name != names[-1]:
                await messages.aclose()
                continue
            headers["x-device-kind"] = name
            return StreamingResponse(_bodies(messages), start["status"], headers)
        text = "no device answers; the server's log says more"
        return Refusal(502, text, code="no_device", headers=NO_RETRY).response()

    async def _messages(
        self, name: str, scope: Mapping[str, Any], body: bytes
    ) -> AsyncGenerator[Any, None]:
        """Go through a replica's messages; where the client leaves, the replica is notified."""
        stream = self.handles[name].options(stream=True).answer.remote(scope, body)
        self.busy[name] += 1
        try:
            async for message in stream:
                yield message
        finally:
            self.busy[name] -= 1
            stream.cancel()


async def _bodies(messages: AsyncGenerator[Any, None]) -> AsyncIterator[bytes]:
    try:
        async for message in messages:
            yield message.get("body", b"")
    finally:
        await messages.aclose()


def start(
    kinds: Sequence[Kind],
    load: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    host: str,
    port: int,
    slots: int | None = None,
    threads: int | None = None,
) -> None:
    """Start the service and return; ``settings``: those of :class:`~.studio.ServerSettings` by name.

    Ray must be connected. Raises what a replica raised where one cannot begin.
    """
    serve.start(http_options={"host": host, "port": port})
    given = {**settings}
    keys = given.pop("keys")
    replicas, handles = {}, []
    for kind in kinds:
        deployed = serve.deployment(
            Artist,
            name=kind.resource.lower(),
            num_replicas=kind.count,
            max_ongoing_requests=ONGOING,
            graceful_shutdown_timeout_s=given["grace"],
            ray_actor_options=placement(kind, threads),
        )
        replicas[kind.resource.lower()] = kind.count
        handles.append(deployed.bind(kind.load(load, threads), given, slots))
    router = serve.deployment(
        Router,
        name="router",
        max_ongoing_requests=ONGOING * max(1, sum(replicas.values())),
        ray_actor_options={"num_cpus": 0},
    )
    routed = router.bind(
        keys, given["most_body"], replicas, *handles, root_path=given.get("root_path", "")
    )
    serve.run(routed, name="lantern_accel")
