"""Levels of load: a steady number of requests under way at a service, and the search for the largest."""

from __future__ import annotations

import asyncio
import itertools
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from lantern_accel import bounds
from lantern_accel.errors import LanternError, RequestError
from lantern_accel.generation.built_in_prompts import REPORTING
from lantern_accel_profiles import store
from lantern_accel_profiles.measure.environment import HostLoad
from lantern_accel_profiles.measure.load import LEAST, SHARE, holds, largest
from lantern_accel_profiles.measure.prompts import prompts_of
from lantern_accel_profiles.measure.record import (
    LoadCell,
    LoadSample,
    Plan,
    Run,
    Session,
    is_measured,
    not_measured,
)
from lantern_accel_profiles.measure.run import command_of, fresh_name, identity, now

if TYPE_CHECKING:
    from load import Load, Sample

#: Seconds that a service has to load its model, and to finish what clients left.
STARTS, ENDS = 900.0, 60.0
SILENT = not_measured("the service does not say")


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


class ServiceLoad(HostLoad):
    """What others use of the host, next to this client and the service, whose number is ``pid``."""

    def __init__(self, pid: int | None) -> None:
        self.pid = pid
        super().__init__()

    def ours(self) -> float:
        """Return the seconds that both have used."""
        return super().ours() + (0.0 if self.pid is None else seconds_of(self.pid))


def seconds_of(pid: int) -> float:
    """Return the seconds that a process has used; 0 where it is gone, and where there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(int(field) for field in fields[11:13]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0


class Levels:
    """A service that answers a steady number of clients, each of which asks again when it is answered."""

    def __init__(self, load: Load, prompts: Sequence[str], slots: int | None) -> None:
        self.load, self.prompts, self.slots = load, list(prompts), slots
        self.numbers = itertools.count()

    def next(self) -> Sample:
        """Return the next request; the seed changes when all prompts were asked for."""
        at, many = next(self.numbers), len(self.prompts)
        return self.load.request(at, self.prompts[at % many], at // many)

    async def warm_up(self) -> None:
        """Draw every prompt once, and leave out those that the model does not take."""
        waiting, taken = list(self.prompts), []

        async def client() -> None:
            while waiting:
                sample = self.next()
                sample.prompt = waiting.pop(0)
                await self.load.ended(sample)
                if sample.outcome == "ok":
                    taken.append(sample.prompt)
                elif sample.status != 400:
                    raise RequestError(f"the service does not draw: {sample.error}")

        await asyncio.gather(*(client() for _ in range(self.slots or 1)))
        self.prompts = [one for one in self.prompts if one in taken]
        if not self.prompts:
            raise RequestError("the model takes none of the prompts; name others with --prompts")

    async def level(self, clients: int, count: int) -> LoadCell:
        """Keep ``clients`` requests under way until ``count`` that count have ended.

        The first request of every client fills the service and does not count, and neither do those that
        keep it full while the last ones that count are drawn.
        """
        load, seen = self.load, []
        host = ServiceLoad(load.options.pid)
        numbers, left, over = itertools.count(), count, asyncio.Event()
        began = 0.0
        energy: list[asyncio.Future[tuple[str, float] | None]] = []

        async def client() -> None:
            nonlocal left, began
            while not over.is_set():
                number, sample = next(numbers), self.next()
                counted = clients <= number < clients + count
                if number == clients:
                    began = load.now()
                    energy.append(asyncio.ensure_future(load.energy()))
                await load.ended(sample)
                seen.append((sample, counted))
                left -= counted
                if not left:
                    over.set()

        tasks = [asyncio.ensure_future(client()) for _ in range(clients)]
        await over.wait()
        ended = load.now()
        energy.append(asyncio.ensure_future(load.energy()))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        others = host.others()
        first, last = await asyncio.gather(*energy)
        await self.idle()
        failed = [one for one, counted in seen if counted and one.outcome == "failed"]
        if 2 * len(failed) > count:
            raise RequestError(
                f"{len(failed)} of {count} requests failed, {clients} at once: {failed[0].error}"
            )
        spent = not_measured("the service has no meter")
        return LoadCell(
            strategy=load.answered["strategy"],
            relaxed=load.answered["relaxed"],
            clients=clients,
            slots=self.slots,
            partials=load.options.partials,
            began=began,
            ended=ended,
            joules=spent if first is None or last is None else last[1] - first[1],
            others_cpu=not_measured("--pid says which process the service is")
            if load.options.pid is None
            else others,
            samples=[_kept(sample, counted) for sample, counted in seen],
        )

    async def idle(self) -> None:
        """Wait until a service that counts its rows draws nothing of what clients left."""
        until = time.monotonic() + ENDS
        while time.monotonic() < until:
            text = (await self.load.client.get("/metrics")).text
            if not any(
                float(line.split()[-1])
                for line in text.splitlines()
                if line.startswith(("lantern_slots_busy", "lantern_queue_images"))
            ):
                return
            await asyncio.sleep(0.05)


def _kept(sample: Sample, counted: bool) -> LoadSample:
    figures, gap = sample.statistics, not_measured("no partial image came")
    return LoadSample(
        prompt=sample.prompt,
        seed=sample.seed,
        began=sample.began,
        first=gap if sample.first is None else sample.first,
        ended=sample.ended or 0.0,
        outcome=sample.outcome,
        counted=counted,
        stages=figures.get("stages", SILENT),
        tokens=figures.get("tokens"),
        steps=figures.get("steps"),
        total_variation=figures.get("total_variation_per_token", SILENT),
    )


async def seek(load: Load, say: Any = print) -> Run:
    """Find the largest load within ``--latency``, into ``--output``, where a file goes on."""
    o = load.options
    most, count = o.concurrency, o.requests
    answer = await load.client.get("/run")
    if answer.status_code != 200:
        raise RequestError(
            f"{o.url} does not say what it serves (GET /run: {answer.status_code}); a search needs a "
            "service of lantern-accel"
        )
    run = Run.model_validate(answer.json())
    health = (await load.client.get("/health")).json()
    lines = o.lines if o.prompts is not None else REPORTING
    levels = Levels(load, lines, health["slots"])
    say(f"warm-up: {len(lines)} prompts, {levels.slots} at a time")
    await levels.warm_up()
    source = "built-in, a random draw" if o.prompts is None else o.prompts.name
    run.name, run.command = fresh_name(str(health["device"])), "python tools/load.py"
    run.command += command_of(sys.argv[1:]).removeprefix("lantern-accel")
    run.settings.prompts = prompts_of(source, [*levels.prompts])
    plan = Plan(quick=False, samples=count, seconds=0.0, quality_images=0, latency_s=o.latency)
    run.settings.plan = plan
    run = store.resume(o.output, run, identity, run.command)
    run.settings.plan, run.state = plan, "running"
    keep = store.Keeper(o.output, run)
    run.sessions.append(session := Session(started=now(), load_seconds=load.started))
    mine = [one for one in run.loads if one.strategy == load.answered["strategy"]]
    for one in mine:
        store.check_same(
            o.output, {"slots": one.slots, "partials": one.partials},
            {"slots": levels.slots, "partials": o.partials}, "file with -o",
        )  # fmt: skip
    try:
        while (clients := next_load(mine, o.latency, most)) is not None:
            mine.append(cell := await levels.level(clients, count))
            run.loads.append(cell)
            keep()
            say(level_words(cell, o.latency))
        run.environment.conditions_after = Run.model_validate(
            (await load.client.get("/run")).json()
        ).environment.conditions_before
        run.state = "complete"
    except BaseException as error:
        stopped = isinstance(error, (KeyboardInterrupt, asyncio.CancelledError))
        session.reason = "interrupted from the keyboard" if stopped else str(error)
        run.state = "interrupted"
        raise
    finally:
        session.ended = now()
        keep()
    say(found_words(mine, o.latency, most))
    return run


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
    return text + ("" if holds(cell, latency) else ": too slow")


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


@contextmanager
def service(words: str, queue: int) -> Iterator[tuple[str, int, float]]:
    """Start ``lantern-accel serve`` in a process of its own: its address, number and seconds to start.

    Raises LanternError where it ends before it serves.
    """
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    command = [sys.executable, "-m", "lantern_accel", "serve", "--queue", str(queue)]
    began = time.perf_counter()
    # A client that has to end ends its service, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    process = subprocess.Popen([*command, *shlex.split(words), "--port", str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            if process.poll() is not None:
                raise LanternError(f"the service ended with {process.returncode} before it served")
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.HTTPError:
                if time.perf_counter() - began > STARTS:
                    raise LanternError(f"the service did not start within {STARTS:g} s") from None
            time.sleep(0.1)
        yield url, process.pid, time.perf_counter() - began
    finally:
        process.terminate()
        try:
            process.wait(ENDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def check_search(latency: float, count: int) -> None:
    """Raise RequestError for a bound or a number of requests that no search can keep."""
    if not 0 < latency <= bounds.MOST_SECONDS:
        raise RequestError(f"--latency {latency:g} cannot be kept; give seconds above 0")
    if count < LEAST:
        raise RequestError(f"--requests {count} is too few for a p95; give {LEAST} or more")
