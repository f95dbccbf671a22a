"""A load of a fixed number of requests, some of whose clients behave badly, and its figures."""

from __future__ import annotations

import asyncio
import json
import math
import random
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from lantern_accel_profiles.load.clients import PATH, Clients, Reply
from lantern_accel_profiles.load.options import Options
from lantern_accel_profiles.load.service import resident


class Mixture:
    """Clients that wait for their image, leave early, ask for what cannot be generated, or never read."""

    def __init__(self, options: Options, prompts: Sequence[str]) -> None:
        self.options, self.prompts = options, prompts
        self.clients = Clients(options)
        self.random = random.Random(options.seed)
        self.samples: list[Reply] = []
        self.memory: list[tuple[float, int]] = []
        self.deaf: list[socket.socket] = []

    def plan(self) -> list[Reply]:
        """Return the requests in a random order, which ``--seed`` fixes."""
        o, prompts = self.options, self.prompts
        leaving = set(self.random.sample(range(o.requests), round(o.cancel * o.requests)))
        kinds = ["leaves" if n in leaving else "drawn" for n in range(o.requests)]
        kinds += ["impossible"] * o.impossible + ["deaf"] * o.deaf
        self.random.shuffle(kinds)
        return [
            Reply(n, kind, prompts[n % len(prompts)], n // len(prompts) % o.seeds)
            for n, kind in enumerate(kinds)
        ]

    async def run(self) -> dict[str, Any]:
        """Run all requests, ``--concurrency`` at once; return the figures."""
        waiting = self.plan()
        async with self.clients.http:
            before = await self.clients.energy()
            watching = asyncio.ensure_future(self._watch())
            self.clients.zero = time.perf_counter()

            async def client() -> None:
                while waiting:
                    sample = waiting.pop(0)
                    self.samples.append(sample)
                    await self.clients.record_times(sample, self._behave(sample))

            await asyncio.gather(*(client() for _ in range(self.options.concurrency)))
            seconds = self.clients.now()
            after = await self.clients.energy()
            watching.cancel()
            wrong = await self._check() if self.options.check else None
        for one in self.deaf:
            one.close()
        return self._figures(seconds, before, after, wrong)

    async def _behave(self, sample: Reply) -> None:
        """Be one client of its kind."""
        if sample.kind == "deaf":
            self.deaf.append(await asyncio.to_thread(self._shout, sample))
            sample.outcome = "ok"
            return
        leave = self.random.uniform(0.02, 1.0) if sample.kind == "leaves" else None
        try:
            await asyncio.wait_for(self.clients.ask(sample), leave)
        except asyncio.TimeoutError:
            sample.outcome = "left"

    def _shout(self, sample: Reply) -> socket.socket:
        """Send a request and never read what comes; return the open connection."""
        address = urlsplit(self.options.url)
        body = json.dumps(self.clients.body(sample)).encode()
        key = f"Authorization: Bearer {self.options.key}\r\n" if self.options.key else ""
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: {address.netloc}\r\n{key}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        one = socket.socket()
        # As little as the system allows, so that the service soon has nowhere to write to.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        one.connect((address.hostname, address.port or 80))
        one.sendall(head.encode() + body)
        return one

    async def _check(self) -> int:
        """Ask for every image again, alone; return how many answers were another image."""
        alone: dict[tuple[str, int], str | None] = {}
        answered = [one for one in self.samples if one.digest is not None]
        for sample in answered:
            key = (sample.prompt, sample.seed)
            if key not in alone:
                again = Reply(-1, "drawn", *key)
                await self.clients.ask(again)
                alone[key] = again.digest
            if alone[key] != sample.digest:
                sample.outcome = "wrong"
        return sum(one.outcome == "wrong" for one in answered)

    async def _watch(self) -> None:
        """Note the service's resident memory every half second."""
        pid = self.options.pid
        while pid is not None and (size := resident(pid)) is not None:
            self.memory.append((self.clients.now(), size))
            await asyncio.sleep(0.5)

    def _figures(
        self,
        seconds: float,
        before: tuple[str, float] | None,
        after: tuple[str, float] | None,
        wrong: int | None,
    ) -> dict[str, object]:
        """Return the run's figures, with every sample."""
        ok = [one for one in self.samples if one.outcome == "ok" and one.digest is not None]
        took = [one.ended - one.began for one in ok if one.ended is not None]
        first = [one.first - one.began for one in ok if one.first is not None]
        known = [n for one in ok if (n := one.statistics.get("tokens_per_step")) is not None]
        meter = joules = None
        if before is not None and after is not None and ok:
            meter, joules = before[0], (after[1] - before[1]) / len(ok)
        return {
            "schema_version": 1,
            "options": {k: str(v) for k, v in asdict(self.options).items() if k != "key"},
            "seconds": seconds,
            "outcomes": dict(
                sorted(Counter(f"{s.kind}: {s.outcome}" for s in self.samples).items())
            ),
            "wrong_pictures": wrong,
            "latency_s": quantiles(took),
            "first_partial_s": quantiles(first),
            "images_per_s": len(ok) / seconds,
            "goodput_per_s": sum(one <= self.options.deadline for one in took) / seconds,
            "deadline_s": self.options.deadline,
            "joules_per_image": joules,
            "meter": meter,
            "tokens_per_step": sum(known) / len(known) if known else None,
            "memory": self._grown(),
            "samples": [asdict(one) for one in sorted(self.samples, key=lambda s: s.number)],
        }

    def _grown(self) -> dict[str, object] | None:
        """Return the service's memory in the second and in the last quarter of the run, in bytes."""
        if len(self.memory) < 8:
            return None
        sizes = [size for _, size in self.memory]
        quarter = len(sizes) // 4
        early, late = max(sizes[quarter : 2 * quarter]), max(sizes[-quarter:])
        return {"second_quarter": early, "last_quarter": late, "samples": self.memory}


def quantiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return p50, p95, p99 and the largest of values, each one that was seen; None of none."""
    if not values:
        return None
    ordered = sorted(values)
    found = {f"p{p}": ordered[math.ceil(p * len(ordered) / 100) - 1] for p in (50, 95, 99)}
    return {**found, "max": ordered[-1]}


def figure_words(found: dict[str, Any]) -> list[str]:
    """Write the figures of a mixture as a few lines."""

    def times(name: str) -> str:
        one = found[name]
        return "none" if one is None else ", ".join(f"{k} {v:.2f}" for k, v in one.items())

    lines = [
        f"{found['seconds']:.1f} s: " + ", ".join(f"{n} {k}" for k, n in found["outcomes"].items()),
        f"latency in s: {times('latency_s')}",
        f"first partial image after s: {times('first_partial_s')}",
        f"{found['images_per_s']:.2f} images/s, {found['goodput_per_s']:.2f} within "
        f"{found['deadline_s']:g} s",
    ]
    if found["joules_per_image"] is not None:
        lines.append(f"{found['joules_per_image']:.1f} J per image ({found['meter']})")
    if found["wrong_pictures"] is not None:
        lines.append(f"{found['wrong_pictures']} answers were not the image that was asked for")
    if found["memory"] is not None:
        early, late = (found["memory"][k] / 1e6 for k in ("second_quarter", "last_quarter"))
        lines.append(f"the service's memory: {early:.0f} MB, at the end {late:.0f} MB")
    return lines
