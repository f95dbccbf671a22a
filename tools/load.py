"""Load a server of OpenAI's images API and say what its clients saw.

``python tools/load.py --url http://127.0.0.1:8000 --requests 200 --concurrency 32 -o load.json``

Measures what other clients do not: the time to the first partial image, goodput under a deadline, and
joules an image with the meter's name (null without a meter, never 0). Some clients can be told to behave
badly: to leave half-way, to ask for what cannot be drawn, to never read their answer. With ``--check``
every picture is asked for again afterwards, alone, and compared. All samples are kept in the file.

``python tools/load.py --serve "--device cpu --slots 4" --latency 2 -o load.json``

Starts a service in a process of its own and seeks the largest number of requests at once whose p95 stays
within two seconds, by bisection. The file is a run, which ``lantern-accel compare`` takes; after an
interruption the same command goes on behind the levels that it holds.

Needs httpx (``pip install -e ".[test]"``). A load works with any server of that API; a search asks a
service of lantern-accel what it serves.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import json
import math
import random
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import load_levels

from lantern_accel.errors import LanternError, RequestError
from lantern_accel.files import check_target, json_text, write_whole
from lantern_accel_profiles import store
from lantern_accel_profiles.measure.environment import wait_for_quiet

PROMPTS = ("red heart", "dog face", "pizza", "sunflower", "fish", "star", "ghost", "strawberry")
#: A size that no model draws, and no client sends unasked.
IMPOSSIBLE = "13x17"
#: Options that stand in no file: a secret, and what was read from the file of prompts.
HIDDEN = ("key", "lines")


@dataclass
class Sample:
    """What one client saw. Times are seconds since the load began; None where it never came to that.

    ``kind``: drawn, leaves, impossible or deaf. ``outcome``: ok, refused (4xx as it should be), left,
    busy (429 to the end), failed, or wrong (an answer that it should not have got).
    """

    number: int
    kind: str
    prompt: str
    seed: int
    began: float
    first: float | None = None
    ended: float | None = None
    status: int | None = None
    outcome: str = "failed"
    digest: str | None = None
    error: str | None = None
    retries: int = 0
    statistics: dict[str, Any] = field(default_factory=dict)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000")
    add(
        "--serve",
        default=None,
        metavar="WORDS",
        help="start lantern-accel serve with these options",
    )
    add("--latency", type=float, default=None, help="seconds: seek the largest load with this p95")
    add(
        "--wait",
        type=float,
        default=0.0,
        help="seconds that other programs have to end, in a search",
    )
    add(
        "--requests",
        type=int,
        default=200,
        help="requests that draw or leave; in a search per level",
    )
    add("--concurrency", type=int, default=32, help="requests at once; in a search at most")
    add("--partials", type=int, default=3, choices=range(4), help="partial images; 0: no stream")
    add("--cancel", type=float, default=0.0, help="share of the requests that leave half-way")
    add("--impossible", type=int, default=0, help="further requests of a size that cannot be drawn")
    add("--deaf", type=int, default=0, help="further clients that never read their answer")
    add("--deadline", type=float, default=10.0, help="seconds that a good answer takes at most")
    add("--strategy", default=None, help="left out: the server's own choice")
    add("--size", default=None)
    add("--model", default=None)
    add("--key", default=None, help="API key")
    add("--prompts", type=Path, default=None, help="a prompt per line")
    add("--seeds", type=int, default=4, help="different seeds for each prompt")
    add("--retries", type=int, default=30, help="how often to come back where the server is busy")
    add("--timeout", type=float, default=600.0)
    add("--seed", type=int, default=0, help="fixes which requests leave, and when")
    add("--check", action="store_true", help="ask for every picture again, alone, and compare")
    add("--pid", type=int, default=None, help="the server's process, to watch its memory (Linux)")
    add("-o", "--output", type=Path, default=None, help="the file of figures and samples")
    return parser.parse_args(argv)


def check(options: argparse.Namespace) -> None:
    """Raise RequestError for what no load can keep, before a service starts; prompts are read."""
    fewest = {"requests": 1, "concurrency": 1, "seeds": 1, "impossible": 0, "deaf": 0}
    for name, least in fewest.items():
        if getattr(options, name) < least:
            raise RequestError(f"--{name} {getattr(options, name)}: give {least} or more")
    if not 0 <= options.cancel <= 1:
        raise RequestError(f"--cancel {options.cancel:g} is not a share; give 0 to 1")
    if options.latency is not None:
        load_levels.check_search(options.latency, options.requests)
    if options.output is not None and options.latency is not None:
        store.check_output(options.output, resume=True)
    elif options.output is not None:
        check_target(options.output)
    options.lines = PROMPTS
    if options.prompts is not None:
        try:
            text = options.prompts.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"{options.prompts} cannot be read ({error}); name a text") from None
        options.lines = tuple(line.strip() for line in text.splitlines() if line.strip())
        if not options.lines:
            raise RequestError(f"{options.prompts} has no prompt; write one per line")


class Load:
    """One run: clients, their samples, and what is made of them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.samples: list[Sample] = []
        self.memory: list[tuple[float, int]] = []
        self.random = random.Random(options.seed)
        headers = {"Authorization": f"Bearer {options.key}"} if options.key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=options.concurrency)
        self.client = httpx.AsyncClient(
            base_url=options.url, headers=headers, limits=limits, timeout=options.timeout
        )
        self.zero = time.perf_counter()
        #: Seconds that the service took to start, where this client started it, and its last answer.
        self.started = 0.0
        self.answered: dict[str, Any] = {}

    def now(self) -> float:
        """Return the seconds since the load began."""
        return time.perf_counter() - self.zero

    def request(self, number: int, prompt: str, seed: int) -> Sample:
        """Return a request that is to be drawn."""
        return Sample(number, "drawn", prompt, seed, 0.0)

    def plan(self) -> list[Sample]:
        """Return the requests of the run in a random order, which ``--seed`` fixes."""
        o, prompts = self.options, self.options.lines
        leaving = set(self.random.sample(range(o.requests), round(o.cancel * o.requests)))
        kinds = ["leaves" if n in leaving else "drawn" for n in range(o.requests)]
        kinds += ["impossible"] * o.impossible + ["deaf"] * o.deaf
        self.random.shuffle(kinds)
        return [
            Sample(n, kind, prompts[n % len(prompts)], n // len(prompts) % o.seeds, 0.0)
            for n, kind in enumerate(kinds)
        ]

    def body(self, sample: Sample, stream: bool) -> dict[str, Any]:
        """Return the JSON of a request."""
        o = self.options
        body: dict[str, Any] = {"prompt": sample.prompt, "seed": sample.seed, "n": 1}
        more = {"strategy": o.strategy, "size": o.size, "model": o.model}
        body |= {name: value for name, value in more.items() if value is not None}
        if stream:
            body |= {"stream": True, "partial_images": o.partials}
        if sample.kind == "impossible":
            body["size"] = IMPOSSIBLE
        return body

    async def run(self) -> dict[str, Any]:
        """Run all requests, so many at once; return the figures."""
        waiting = self.plan()
        before = await self.energy()
        watching = asyncio.ensure_future(self.watch())
        deaf: list[socket.socket] = []
        self.zero = time.perf_counter()

        async def client() -> None:
            while waiting:
                sample = waiting.pop(0)
                self.samples.append(sample)
                await self.ended(sample, deaf)

        await asyncio.gather(*(client() for _ in range(self.options.concurrency)))
        seconds = self.now()
        after = await self.energy()
        watching.cancel()
        wrong = await self.check() if self.options.check else None
        for one in deaf:
            one.close()
        await self.client.aclose()
        return self.figures(seconds, before, after, wrong)

    async def ended(self, sample: Sample, deaf: list[socket.socket] | None = None) -> None:
        """Be one client to its end; what fails is noted."""
        sample.began = self.now()
        try:
            await self.one(sample, [] if deaf is None else deaf)
        except (httpx.HTTPError, OSError, ValueError, KeyError) as error:
            sample.error = f"{type(error).__name__}: {error}"[:300]
        sample.ended = self.now()

    async def one(self, sample: Sample, deaf: list[socket.socket]) -> None:
        """Be one client."""
        if sample.kind == "deaf":
            deaf.append(await asyncio.to_thread(self.shout, sample))
            sample.outcome = "ok"
            return
        leave = self.random.uniform(0.02, 1.0) if sample.kind == "leaves" else None
        try:
            await asyncio.wait_for(self.ask(sample), leave)
        except asyncio.TimeoutError:
            sample.outcome = "left"

    async def ask(self, sample: Sample) -> None:
        """Send a request, again where the server is busy, and read the answer."""
        stream = self.options.partials > 0
        path = "/v1/images/generations"
        while True:
            request = self.client.build_request("POST", path, json=self.body(sample, stream))
            answer = await self.client.send(request, stream=True)
            try:
                sample.status = answer.status_code
                if answer.status_code == 429 and sample.retries < self.options.retries:
                    sample.retries += 1
                    await asyncio.sleep(float(answer.headers.get("Retry-After", 1)))
                    continue
                if answer.status_code != 200:
                    told = json.loads(await answer.aread())["error"]
                    sample.error = str(told["message"])
                    right = sample.kind == "impossible" and answer.status_code == 400
                    sample.outcome = "refused" if right else "failed"
                    sample.outcome = "busy" if answer.status_code == 429 else sample.outcome
                    return
                found = await (self.events(sample, answer) if stream else self.whole(answer))
            finally:
                await answer.aclose()
            picture = base64.b64decode(
                found["data"][0]["b64_json"] if "data" in found else found["b64_json"]
            )
            sample.digest = hashlib.sha256(picture).hexdigest()
            sample.outcome = "wrong" if sample.kind == "impossible" else "ok"
            sample.statistics = found.get("statistics", {})
            self.answered = {
                name: found.get(name, unknown)
                for name, unknown in (("strategy", "unknown"), ("relaxed", False))
            }
            return

    async def whole(self, answer: httpx.Response) -> dict[str, Any]:
        """Return an answer that is not streamed."""
        found: dict[str, Any] = json.loads(await answer.aread())
        return found

    async def events(self, sample: Sample, answer: httpx.Response) -> dict[str, Any]:
        """Return the completed event of a stream, and note when its first partial image came."""
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event: dict[str, Any] = json.loads(line[6:])
            if "error" in event:
                raise ValueError(event["error"]["message"])
            if event["type"].endswith("partial_image") and sample.first is None:
                sample.first = self.now()
            if event["type"].endswith("completed"):
                return event
        raise ValueError("the stream broke off before it was completed")

    def shout(self, sample: Sample) -> socket.socket:
        """Send a request and never read what comes; return the open connection."""
        address = urlsplit(self.options.url)
        body = json.dumps(self.body(sample, True)).encode()
        key = f"Authorization: Bearer {self.options.key}\r\n" if self.options.key else ""
        head = (
            f"POST /v1/images/generations HTTP/1.1\r\nHost: {address.netloc}\r\n{key}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        one = socket.socket()
        # As little as the system allows, so that the server soon has nowhere to write to.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        one.connect((address.hostname, address.port or 80))
        one.sendall(head.encode() + body)
        return one

    async def check(self) -> int:
        """Ask for every picture again, alone; return how many answers were another picture."""
        alone: dict[tuple[str, int], str | None] = {}
        wrong = 0
        for sample in [one for one in self.samples if one.digest is not None]:
            key = (sample.prompt, sample.seed)
            if key not in alone:
                again = self.request(-1, *key)
                await self.ask(again)
                alone[key] = again.digest
            if alone[key] != sample.digest:
                sample.outcome, wrong = "wrong", wrong + 1
        return wrong

    async def energy(self) -> tuple[str, float] | None:
        """Return the meter's name and its joules, from the server's metrics; None without a meter."""
        try:
            text = (await self.client.get("/metrics")).text
        except httpx.HTTPError:
            return None
        for line in text.splitlines():
            if line.startswith("lantern_energy_joules_total"):
                return line.split('meter="')[1].split('"')[0], float(line.split()[-1])
        return None

    async def watch(self) -> None:
        """Note the server's resident memory every half second."""
        path = Path(f"/proc/{self.options.pid}/status")
        while self.options.pid is not None and path.exists():
            for line in path.read_text().splitlines():
                if line.startswith("VmRSS:"):
                    self.memory.append((self.now(), int(line.split()[1]) * 1024))
            await asyncio.sleep(0.5)

    def figures(
        self,
        seconds: float,
        before: tuple[str, float] | None,
        after: tuple[str, float] | None,
        wrong: int | None,
    ) -> dict[str, Any]:
        """Return the run's figures, with every sample."""
        ok = [one for one in self.samples if one.outcome == "ok" and one.digest is not None]
        took = [one.ended - one.began for one in ok if one.ended is not None]
        first = [one.first - one.began for one in ok if one.first is not None]
        good = [one for one in took if one <= self.options.deadline]
        outcomes: dict[str, int] = {}
        for one in self.samples:
            name = f"{one.kind}: {one.outcome}"
            outcomes[name] = outcomes.get(name, 0) + 1
        joules = None
        if before is not None and after is not None and ok:
            joules = (after[1] - before[1]) / len(ok)
        known = [n for one in ok if (n := one.statistics.get("tokens_per_step")) is not None]
        return {
            "schema_version": 1,
            "options": {k: str(v) for k, v in vars(self.options).items() if k not in HIDDEN},
            "seconds": seconds,
            "outcomes": dict(sorted(outcomes.items())),
            "wrong_pictures": wrong,
            "latency_s": quantiles(took),
            "first_partial_s": quantiles(first),
            "images_per_s": len(ok) / seconds if seconds else None,
            "goodput_per_s": len(good) / seconds if seconds else None,
            "deadline_s": self.options.deadline,
            "joules_per_image": joules,
            "meter": None if joules is None or before is None else before[0],
            "tokens_per_step": sum(known) / len(known) if known else None,
            "memory": self.grown(),
            "samples": [asdict(one) for one in sorted(self.samples, key=lambda s: s.number)],
        }

    def grown(self) -> dict[str, Any] | None:
        """Return the server's memory in the second and in the last quarter of the run, in bytes."""
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

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]

    return {"p50": at(0.5), "p95": at(0.95), "p99": at(0.99), "max": ordered[-1]}


def said(found: dict[str, Any]) -> str:
    """Write the figures as a few lines."""

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
        lines.append(f"{found['joules_per_image']:.1f} J an image ({found['meter']})")
    if found["wrong_pictures"] is not None:
        lines.append(f"{found['wrong_pictures']} answers were not the picture that was asked for")
    if found["memory"] is not None:
        early, late = (found["memory"][k] / 1e6 for k in ("second_quarter", "last_quarter"))
        lines.append(f"the server's memory: {early:.0f} MB, at the end {late:.0f} MB")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the load, or the search; 1 where an answer of a load was wrong or failed."""
    options = parse(sys.argv[1:] if argv is None else argv)
    with ExitStack() as ending:
        started = 0.0
        try:
            check(options)
            if options.latency is not None:
                wait_for_quiet(options.wait, print)
            if options.serve is not None:
                given = load_levels.service(options.serve, 2 * options.concurrency)
                options.url, options.pid, started = ending.enter_context(given)
            found = asyncio.run(_run(options, started))
        except (LanternError, httpx.HTTPError) as error:
            print(f"error: {error}", file=sys.stderr)
            return getattr(error, "exit_code", 1)
        except KeyboardInterrupt:
            print(
                "interrupted; the same command goes on behind the levels of its file",
                file=sys.stderr,
            )
            return 130
    if found is None:
        return 0
    print(said(found))
    if options.output is not None:
        write_whole(options.output, json_text(found))
    bad = sum(
        n
        for name, n in found["outcomes"].items()
        if name.endswith((": failed", ": wrong", ": busy"))
    )
    return 1 if bad else 0


async def _run(options: argparse.Namespace, started: float) -> dict[str, Any] | None:
    load = Load(options)
    if options.latency is None:
        return await load.run()
    load.started = started
    async with load.client:
        await load_levels.seek(load)
    return None


if __name__ == "__main__":
    raise SystemExit(main())
