"""A server on the loopback device in a thread of the test's own process."""

from __future__ import annotations

import base64
import io
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lantern_accel
from lantern_accel.serving.app import Server, make_app
from lantern_accel.serving.scheduler import ServerSettings

PATH = "/v1/images/generations"
BODY = {"prompt": "red heart", "seed": 7, "strategy": "vanilla"}


class Served:
    """A running server: its address, its scheduler and its pipeline."""

    def __init__(self, server: Server, app: Any, pipeline: Any, clients: Any) -> None:
        self.server, self.app, self.pipeline = server, app, pipeline
        self.scheduler = app.state.scheduler
        self.clients: list[Any] = clients
        self.port = server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def client(self, key: str = "none", **more: Any) -> Any:
        """Return OpenAI's client of this server, closed with it; it does not try again."""
        import openai

        made = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **{"max_retries": 0, **more})
        self.clients.append(made)
        return made

    def counted(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        found = 0.0
        for family in self.scheduler.metrics.registry.collect():
            for sample in family.samples:
                if sample.name == f"lantern_{name}":
                    found += sample.value
        return found

    def until(self, condition: Any, seconds: float = 20.0) -> None:
        """Wait until a condition holds."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it took too long"
            time.sleep(0.005)


def ask(served: Any, path: str = PATH, **body: Any) -> Any:
    """Post a body to a server, or to an application at its ``url``; return the answer."""
    import httpx

    key = {"Authorization": "Bearer key"}
    return httpx.post(served.url + path, json={**BODY, **body}, headers=key, timeout=60)


def draw(served: Served, prompt: str = "red heart", key: str = "none", **more: Any) -> Any:
    """Generate with OpenAI's client; ``own``: fields that are not OpenAI's."""
    own = {"seed": 7, "strategy": "vanilla", **more.pop("own", {})}
    return served.client(key).images.generate(prompt=prompt, extra_body=own, **more)


@contextmanager
def serving(model: Path, settings: ServerSettings, **load: Any) -> Iterator[Served]:
    """Serve a model until the end of the block."""
    with lantern_accel.load(model, device="cpu", dtype="float32", **load) as pipeline:
        app = make_app(pipeline, settings)
        server = Server(app, grace=settings.grace, host="127.0.0.1", port=0)
        thread = threading.Thread(target=server.run)
        thread.start()
        clients: list[Any] = []
        try:
            while not server.started:
                assert thread.is_alive(), "the server did not start"
                time.sleep(0.005)
            served = Served(server, app, pipeline, clients)
            yield served
        finally:
            for client in clients:
                client.close()
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


def pixels(b64: str) -> tuple[tuple[int, int], bytes]:
    """Return the size and the bytes of a picture in base64."""
    from PIL import Image

    image = Image.open(io.BytesIO(base64.b64decode(b64))).convert("RGB")
    return image.size, image.tobytes()


def same(b64: str, image: Any) -> bool:
    """Return whether a picture in base64 is this one, to the last bit."""
    return pixels(b64) == (image.size, image.convert("RGB").tobytes())


class Held:
    """Holds a scheduler's steps back until it is let go, so that a test can look at what waits."""

    def __init__(self, monkeypatch: Any) -> None:
        from lantern_accel.generation.batch import Batch

        self.go, self.inside = threading.Event(), threading.Event()
        advance = Batch.advance

        def held(slots: Batch, *_: object) -> object:
            self.inside.set()
            assert self.go.wait(30)
            return advance(slots, *_)

        monkeypatch.setattr(Batch, "advance", held)
