"""Clients of OpenAI's images API: one request each, and what came of it."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from lantern_accel_profiles.load.options import Options

PATH = "/v1/images/generations"


@dataclass
class Reply:
    """What one client saw. Times are seconds since the load began; None where it never came to that.

    ``outcome``: ok, busy (429 to the end) or failed.
    """

    prompt: str
    seed: int
    began: float = 0.0
    first: float | None = None
    ended: float | None = None
    status: int | None = None
    outcome: str = "failed"
    error: str | None = None
    retries: int = 0
    statistics: dict[str, Any] = field(default_factory=dict)


class Clients:
    """Clients of one service, which share a clock; close them with ``async with self.http``."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.http = httpx.AsyncClient(
            base_url=options.url,
            headers={"Authorization": f"Bearer {options.key}"} if options.key else {},
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=options.concurrency
            ),
            timeout=options.timeout,
        )
        self.zero = time.perf_counter()
        #: What the last answer said of how it was made.
        self.strategy, self.relaxed = "unknown", False

    def now(self) -> float:
        """Return the seconds since the load began."""
        return time.perf_counter() - self.zero

    def body(self, sample: Reply) -> dict[str, object]:
        """Return the JSON of a request."""
        o = self.options
        given = {"strategy": o.strategy, "size": o.size, "model": o.model}
        body: dict[str, object] = {"prompt": sample.prompt, "seed": sample.seed, "n": 1}
        body |= {name: value for name, value in given.items() if value is not None}
        if o.partials:
            body |= {"stream": True, "partial_images": o.partials}
        return body

    async def record_times(self, sample: Reply) -> None:
        """Let one client :meth:`ask`, and note its times and what failed."""
        sample.began = self.now()
        try:
            await self.ask(sample)
        except (httpx.HTTPError, OSError, ValueError, KeyError) as error:
            sample.error = f"{type(error).__name__}: {error}"[:300]
        sample.ended = self.now()

    async def ask(self, sample: Reply) -> None:
        """Send a request, again where the service is busy, and read the answer."""
        while True:
            async with self.http.stream("POST", PATH, json=self.body(sample)) as answer:
                sample.status = answer.status_code
                if answer.status_code == 200:
                    found = await self._read(sample, answer)
                    break
                if answer.status_code != 429 or sample.retries >= self.options.retries:
                    sample.error = str(json.loads(await answer.aread())["error"]["message"])
                    sample.outcome = "busy" if answer.status_code == 429 else "failed"
                    return
            sample.retries += 1
            await asyncio.sleep(float(answer.headers.get("Retry-After", 1)))
        image = (found["data"][0] if "data" in found else found)["b64_json"]
        sample.outcome = "ok" if image else "failed"
        sample.statistics = found.get("statistics", {})
        self.strategy = found.get("strategy", "unknown")
        self.relaxed = found.get("relaxed", False)

    async def _read(self, sample: Reply, answer: httpx.Response) -> dict[str, Any]:
        """Return an answer, or the completed event of a stream, whose first partial image is noted."""
        if not self.options.partials:
            return dict(json.loads(await answer.aread()))
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            found = json.loads(line[6:])
            if "error" in found:
                raise ValueError(found["error"]["message"])
            if found["type"].endswith("partial_image") and sample.first is None:
                sample.first = self.now()
            if found["type"].endswith("completed"):
                return dict(found)
        raise ValueError("the stream broke off before it was completed")

    async def energy(self) -> tuple[str, float] | None:
        """Return the meter's name and its joules, from the service's metrics; None without a meter."""
        try:
            text = (await self.http.get("/metrics")).text
        except httpx.HTTPError:
            return None
        for line in text.splitlines():
            if line.startswith("lantern_energy_joules_total"):
                return line.split('meter="')[1].split('"')[0], float(line.split()[-1])
        return None
