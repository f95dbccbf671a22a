"""Levels of load: a steady number of requests under way at a service, and the search for the largest."""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict

from lantern_accel.errors import RequestError
from lantern_accel_profiles import store
from lantern_accel_profiles.load.clients import AnswerError, Clients
from lantern_accel_profiles.load.options import Options
from lantern_accel_profiles.load.service import ENDS, ServiceLoad
from lantern_accel_profiles.measure.prompts import BUILT_IN, prompts_of
from lantern_accel_profiles.measure.record import (
    LoadCell,
    Plan,
    Run,
    is_measured,
    not_measured,
)
from lantern_accel_profiles.measure.run import command_of, fresh_name, identity, working_on

COMMAND = "python -m lantern_accel_profiles.load"
#: Metrics of a service that are 0 where it generates nothing.
ROWS = ("slots_busy", "queue_images")
#: The share of requests that must stay within the latency.
SHARE = 0.95


def holds(cell: LoadCell, latency: float) -> bool:
    """Say whether a service stayed within ``latency`` seconds under this load; p95 decides."""
    return cell.latency(SHARE) <= latency


def largest(cells: Sequence[LoadCell], latency: float) -> LoadCell | None:
    """Return the largest load that stays within ``latency``, below the first that does not.

    None where none does. Noise may let a larger load pass; it does not count above one that failed.
    """
    failed = min((one.clients for one in cells if not holds(one, latency)), default=None)
    good = [one for one in cells if failed is None or one.clients < failed]
    return max(good, key=lambda one: one.clients, default=None)


def next_load(cells: Sequence[LoadCell], latency: float, most: int) -> int | None:
    """Return the load to try next: twice the largest that stays within, then the middle; None: found.

    ``most``: of which no more are tried.
    """
    found = largest(cells, latency)
    low = found.clients if found else 0
    high = min((one.clients for one in cells if not holds(one, latency)), default=None)
    if high is None:
        return None if low >= most else min(max(2 * low, 1), most)
    return None if high - low <= 1 else (low + high) // 2


class Levels:
    """A service that answers a steady number of clients, each of which asks again when it is answered."""

    def __init__(self, clients: Clients, prompts: Sequence[str], slots: int | None) -> None:
        self.clients, self.prompts, self.slots = clients, list(prompts), slots
        self.numbers = itertools.count()

    def next(self) -> tuple[str, int]:
        """Return the next request's prompt and seed, which changes when all prompts were asked for."""
        at, many = next(self.numbers), len(self.prompts)
        return self.prompts[at % many], at // many

    async def warm_up(self) -> None:
        """Generate every prompt once, and leave out those that the model does not take."""
        waiting, taken = list(self.prompts), []

        async def client() -> None:
            while waiting:
                sample, why = await self.clients.request(waiting.pop(0), 0)
                if sample.outcome == "ok":
                    taken.append(sample.prompt)
                elif not isinstance(why, AnswerError) or why.status != 400:
                    raise RequestError(f"the service does not generate: {why}")

        await asyncio.gather(*(client() for _ in range(self.slots or 1)))
        self.prompts = [one for one in self.prompts if one in taken]
        if not self.prompts:
            raise RequestError("the model takes none of the prompts; name others with --prompts")

    async def level(self, at_once: int, count: int) -> LoadCell:
        """Keep ``at_once`` requests under way until ``count`` that count have ended.

        The first request of every client fills the service and does not count, and neither do those that
        keep it full while the last ones that count are generated.
        """
        clients, pid, seen = self.clients, self.clients.options.pid, []
        host = ServiceLoad(pid)
        numbers, left, over = itertools.count(), count, asyncio.Event()
        began = 0.0
        energy: list[asyncio.Future[tuple[str, float] | None]] = []

        async def client() -> None:
            nonlocal left, began
            while not over.is_set():
                number = next(numbers)
                counted = at_once <= number < at_once + count
                if number == at_once:
                    began = clients.now()
                    energy.append(asyncio.ensure_future(clients.energy()))
                seen.append(await clients.request(*self.next(), counted=counted))
                left -= counted
                if not left:
                    over.set()

        tasks = [asyncio.ensure_future(client()) for _ in range(at_once)]
        await over.wait()
        ended = clients.now()
        energy.append(asyncio.ensure_future(clients.energy()))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        others = host.others()
        first, last = await asyncio.gather(*energy)
        await self.idle()
        failed = [why for one, why in seen if one.counted and one.outcome == "failed"]
        if 2 * len(failed) > count:
            raise RequestError(
                f"{len(failed)} of {count} requests failed, {at_once} at once: {failed[0]}"
            )
        spent = not_measured("the service has no meter")
        return LoadCell(
            strategy=clients.strategy,
            relaxed=clients.relaxed,
            clients=at_once,
            slots=self.slots,
            partials=clients.options.partials,
            began=began,
            ended=ended,
            joules=spent if first is None or last is None else last[1] - first[1],
            others_cpu=not_measured("--pid says which process the service is")
            if pid is None
            else others,
            samples=[sample for sample, _ in seen],
        )

    async def idle(self) -> None:
        """Wait until a service that counts its rows generates nothing of what clients left."""
        until = time.monotonic() + ENDS
        while time.monotonic() < until:
            rows = [await self.clients.metrics(f"lantern_{name}") for name in ROWS]
            if not any(value for found in rows for _, value in found):
                return
            await asyncio.sleep(0.05)


def quantiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return p50, p95, p99 and the largest of rising values, each one that was seen; None of none."""
    if not values:
        return None
    found = {f"p{p}": values[math.ceil(p * len(values) / 100) - 1] for p in (50, 95, 99)}
    return {**found, "max": values[-1]}


async def keep_up(
    options: Options, prompts: Sequence[str], say: Callable[[str], None]
) -> dict[str, object]:
    """Keep ``--concurrency`` requests under way until ``--requests`` have ended; return the figures."""
    clients = Clients(options)
    async with clients.http:
        meter = await clients.energy()
        cell = await Levels(clients, prompts, None).level(options.concurrency, options.requests)
    say(level_words(cell, options.deadline))
    counted, joules = [one for one in cell.samples if one.counted], cell.joules_per_image
    return {
        "schema_version": 2,
        "options": {k: str(v) for k, v in asdict(options).items() if k != "key"},
        "seconds": cell.ended - cell.began,
        "outcomes": dict(Counter(one.outcome for one in counted)),
        "latency_s": quantiles([one for one in cell.latencies if math.isfinite(one)]),
        "first_partial_s": quantiles(cell.first_partials),
        "images_per_s": cell.rate(),
        "goodput_per_s": cell.rate(options.deadline),
        "deadline_s": options.deadline,
        "joules_per_image": joules if is_measured(joules) else None,
        "meter": None if meter is None else meter[0],
        "samples": [one.model_dump(mode="json") for one in cell.samples],
    }


async def seek(
    options: Options, prompts: Sequence[str], started: float, say: Callable[[str], None]
) -> None:
    """Find the largest load within ``--latency``, into ``--output``, which continues where it exists.

    ``started``: seconds that the service took to start, where the client started it.
    """
    clients = Clients(options)
    async with clients.http:
        answer = await clients.http.get("/run")
        if answer.status_code != 200:
            raise RequestError(
                f"{options.url} does not say what it serves (GET /run: {answer.status_code}); a search "
                "needs a service of lantern-accel"
            )
        run = Run.model_validate(answer.json())
        health = (await clients.http.get("/health")).json()
        levels = Levels(clients, prompts, health["slots"])
        say(f"warm-up: {len(prompts)} prompts, {levels.slots} at a time")
        await levels.warm_up()
        source = BUILT_IN if options.prompts is None else options.prompts.name
        run.settings.prompts = prompts_of(source, [*levels.prompts])
        run.name = fresh_name(str(health["device"]))
        run.command = command_of(sys.argv[1:], COMMAND)
        await _search(levels, run, started, say)


async def _search(levels: Levels, fresh: Run, started: float, say: Callable[[str], None]) -> None:
    """Add levels to a run until the largest load is found; ``fresh``: the run without any."""
    o = levels.clients.options
    assert o.latency is not None
    plan = Plan(quick=False, samples=o.requests, seconds=0.0, quality_images=0, latency_s=o.latency)
    fresh.settings.plan = plan
    run = store.resume(o.output, fresh, identity, fresh.command)
    run.settings.plan = plan
    keep = store.Keeper(o.output, run)
    mine = [one for one in run.loads if one.strategy == levels.clients.strategy]
    if o.output is not None:
        for one in mine:
            stored = {"slots": one.slots, "partials": one.partials}
            asked = {"slots": levels.slots, "partials": o.partials}
            store.check_same(o.output, stored, asked, "file with -o")
    with working_on(run, keep, started):
        while (at_once := next_load(mine, o.latency, o.concurrency)) is not None:
            mine.append(cell := await levels.level(at_once, o.requests))
            run.loads.append(cell)
            keep()
            say(level_words(cell, o.latency) + ("" if holds(cell, o.latency) else ": too slow"))
        last = Run.model_validate((await levels.clients.http.get("/run")).json())
        run.environment.conditions_after = last.environment.conditions_before
    say(found_words(mine, o.latency, o.concurrency))


def level_words(cell: LoadCell, latency: float) -> str:
    """Write a level's figures in a line."""
    times = ", ".join(f"p{p} {cell.latency(p / 100):.2f}" for p in (50, 95, 99))
    first = cell.first_partials
    text = f"{cell.clients} at once: {times} s, "
    if first:
        text += f"first partial image after {first[len(first) // 2]:.2f} s, "
    text += f"{cell.rate():.2f} images/s, {cell.rate(latency):.2f} of them within {latency:g} s"
    if is_measured(joules := cell.joules_per_image):
        text += f", {joules:.1f} J per image"
    return text


def found_words(cells: Sequence[LoadCell], latency: float, most: int) -> str:
    """Say what the search has found."""
    found = largest(cells, latency)
    if found is None:
        least = min(cells, key=lambda one: one.clients)
        return (
            f"p{100 * SHARE:.0f} of one request at a time is {least.latency(SHARE):.2f} s, which is more "
            f"than {latency:g} s"
        )
    limit = "at least " if found.clients >= most else ""
    return f"within {latency:g} s: {limit}{found.clients} requests at once"
