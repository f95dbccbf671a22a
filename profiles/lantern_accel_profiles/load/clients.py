"""Clients of OpenAI's images API: one request each, and what came of it."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx

from lantern_accel_profiles.load.options import Options
from lantern_accel_profiles.measure.record import LoadSample, is_measured, not_measured

PATH = "/v1/images/generations"
SILENT = not_measured("the service does not say")


class AnswerError(ValueError):
    """An answer without an image, and the status that it came with."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


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

    async def request(
        self, prompt: str, seed: int, *, counted: bool = False
    ) -> tuple[LoadSample, Exception | None]:
        """Send a request; return what came of it, and the reason where no image came."""
        sample = LoadSample(
            prompt=prompt,
            seed=seed,
            began=self.now(),
            first=not_measured("no partial image came"),
            ended=0.0,
            outcome="failed",
            counted=counted,
            stages=SILENT,
            total_variation_per_token=SILENT,
        )
        why: Exception | None = None
        try:
            await self._ask(sample)
        except (httpx.HTTPError, OSError, ValueError, KeyError) as error:
            why = error
        sample.ended = self.now()
        return sample, why

    async def _ask(self, sample: LoadSample) -> None:
        """Ask, again where the service is busy, and read the answer; raises ValueError without one."""
        o = self.options
        given = {"strategy": o.strategy, "size": o.size, "model": o.model}
        body: dict[str, object] = {"prompt": sample.prompt, "seed": sample.seed, "n": 1}
        body |= {name: value for name, value in given.items() if value is not None}
        if o.partials:
            body |= {"stream": True, "partial_images": o.partials}
        for left in range(o.retries, -1, -1):
            async with self.http.stream("POST", PATH, json=body) as answer:
                if answer.status_code == 200:
                    found = await self._read(sample, answer)
                    break
                message = str(json.loads(await answer.aread())["error"]["message"])
            busy = answer.status_code == 429
            if not busy or not left:
                sample.outcome = "busy" if busy else "failed"
                raise AnswerError(answer.status_code, message)
            await asyncio.sleep(float(answer.headers.get("Retry-After", 1)))
        image = (found["data"][0] if "data" in found else found)["b64_json"]
        sample.outcome = "ok" if image else "failed"
        figures = found.get("statistics", {})
        sample.stages = figures.get("stages", SILENT)
        sample.tokens, sample.steps = figures.get("tokens"), figures.get("steps")
        sample.total_variation_per_token = figures.get("total_variation_per_token", SILENT)
        self.strategy = found.get("strategy", "unknown")
        self.relaxed = found.get("relaxed", False)

    async def _read(self, sample: LoadSample, answer: httpx.Response) -> dict[str, Any]:
        """Return an answer, or the completed event of a stream, whose first partial image is noted."""
        if not self.options.partials:
            return dict(json.loads(await answer.aread()))
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            found = json.loads(line[6:])
            if "error" in found:
                raise ValueError(found["error"]["message"])
            if found["type"].endswith("partial_image") and not is_measured(sample.first):
                sample.first = self.now()
            if found["type"].endswith("completed"):
                return dict(found)
        raise ValueError("the stream broke off before it was completed")

    async def metrics(self, name: str) -> list[tuple[str, float]]:
        """Return the service's metrics whose names begin so: lines and values; none where it has none."""
        try:
            text = (await self.http.get("/metrics")).text
        except httpx.HTTPError:
            return []
        lines = [line.rpartition(" ") for line in text.splitlines() if line.startswith(name)]
        return [(line, float(value)) for line, _, value in lines]

    async def energy(self) -> tuple[str, float] | None:
        """Return the meter's name and its joules, from the service's metrics; None without a meter."""
        for line, joules in await self.metrics("lantern_energy_joules_total"):
            return line.split('meter="')[1].split('"')[0], joules
        return None
