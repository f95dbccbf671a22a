"""On Ray: images of a dataset's prompts by actors (Data), and the image service in replicas (Serve).

Ray starts, places and restarts processes. Each one loads a model as :func:`lantern_accel.load` does. An
image depends on its row alone, so a row that is generated twice after a crash is the same image.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import time
import uuid
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, Json, ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from lantern_accel.api import DEFAULT_MODEL, load
from lantern_accel.bounds import SEEDS
from lantern_accel.device.plugins import named_spec
from lantern_accel.errors import DeviceLostError, LanternError, LanternWarning, RequestError, show
from lantern_accel.families.releases import require
from lantern_accel.generation.folder import FolderImages
from lantern_accel.prompts import Item
from lantern_accel.serving.app import make_app
from lantern_accel.serving.keys import read_keys
from lantern_accel.serving.scheduler import ServerSettings, usual_slots

require("ray")

import ray  # noqa: E402  # its release is looked at first
from ray import data, serve  # noqa: E402  # as above

#: Seconds that a cluster has to show a device that was asked for.
WAITING = 60.0
ADDED = ("image", "tokens", "seconds", "error")
OWN = ("app", "state", "extensions")  # of a request: parts of the process that it came to


def resources(device: str, threads: int | None = None) -> dict[str, Any]:
    """Return what one actor or replica on a device asks Ray for, as ``ray.remote`` takes it.

    ``device``: a backend's name, without an index, since Ray chooses the card; ``threads``: of the
    process. Ray gives one thread to a process that asks for none: a processor's then warns.
    """
    if ":" in device:
        raise RequestError(f"Ray chooses the card; leave the index out of {device!r}")
    name = named_spec(device).scheduled_as
    wanted = {"num_cpus": threads or 1}
    if name == "CPU":
        if threads is None:
            told = f"each process on {device!r} runs one thread; say how many with threads="
            warnings.warn(told, LanternWarning, stacklevel=3)
        return wanted
    return wanted | ({"num_gpus": 1} if name == "GPU" else {"resources": {name: 1}})


def check_cluster(wanted: Mapping[str, Any], device: str, seconds: float = WAITING) -> None:
    """Raise RequestError where no node has what is wanted after ``seconds``; Ray waits without an end.

    A task that asks for it lets an autoscaler start a node.
    """
    needs = {"CPU": wanted["num_cpus"], "GPU": wanted.get("num_gpus", 0)}
    needs |= wanted.get("resources", {})

    def there() -> bool:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return any(all(has.get(name, 0) >= n for name, n in needs.items()) for has in nodes)

    if there():
        return
    asked = ray.remote(lambda: None).options(**wanted).remote()
    ray.wait([asked], timeout=seconds)
    ray.cancel(asked)
    if not there():
        need = ", ".join(f"{n:g} {name}" for name, n in needs.items() if n)
        raise RequestError(
            f"no node of this cluster has what device={device!r} needs ({need}) after {seconds:g} s; "
            "start one that has, with `ray start --resources` where Ray does not count the device"
        )


def _visible(model: str) -> str:
    return str(Path(model).resolve()) if Path(model).exists() else model  # actors run elsewhere


class Images:
    """Generates the images of rows; made once in an actor, for ``Dataset.map_batches``.

    Rows have ``prompt`` and, if wanted, ``seed`` or ``id``. They come back with ``image`` (PNG bytes),
    ``tokens`` (their number), ``seconds`` and ``error``; one of ``image`` and ``error`` is None.

    A row with a seed is the image that ``generate`` makes with it. A row with an integer as ``id`` is
    that row of ``generate --prompts FILE --seed SEED``, counted from 0. Any other id, or the prompt where
    there is none, gives a seed by its hash: rows of one prompt without an id are one image.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        device: str = "auto",
        seed: int = 0,
        loading: Mapping[str, Any] | None = None,
        **settings: object,
    ) -> None:
        """Load a model; ``loading``: keywords of ``load``, ``settings``: keywords of ``generate``."""
        try:
            self._pipeline = load(model, device=device, **loading or {})
        except LanternError as error:
            node = ray.util.get_node_ip_address()
            raise RequestError(f"node {node} cannot load {show(model)}: {error}") from None
        self._images, self._seed = FolderImages(self._pipeline, settings), seed

    def __call__(self, batch: dict[str, Any]) -> dict[str, object]:
        """Return a batch with its images; a lost device ends the process, and Ray starts another."""
        if "prompt" not in batch:
            raise RequestError(f"the rows have no column 'prompt', only {', '.join(sorted(batch))}")
        count, began = len(batch["prompt"]), time.perf_counter()
        made: list[dict[str, object]] = [{} for _ in range(count)]
        items = []
        for number in range(count):
            try:
                items.append(self._item(number, {name: batch[name][number] for name in batch}))
            except RequestError as error:
                made[number] = {"error": str(error)}
        try:
            for item, png, line in self._images.generate(items):
                made[item.number] = {"image": png or None, **line}
        except DeviceLostError as error:
            print(error, flush=True)
            os._exit(1)
        seconds = (time.perf_counter() - began) / max(len(items), 1)
        usual = {"image": None, "tokens": 0, "seconds": seconds, "error": None}
        # Arrays of objects: numpy's own bytes would lose zeros at their end.
        return batch | {
            name: np.array([one.get(name, usual[name]) for one in made] + [None], dtype=object)[:-1]
            for name in ADDED
        }

    def _item(self, number: int, row: Mapping[str, object]) -> Item:
        row = {key: one.item() if isinstance(one, np.generic) else one for key, one in row.items()}
        prompt, own, name = map(row.get, ("prompt", "seed", "id"))
        if isinstance(prompt, bool) or not isinstance(prompt, int | str) or not str(prompt).strip():
            raise RequestError(f"the prompt {show(prompt)} is not text; write what to generate")
        # A column that some rows leave empty has NaN there, and its integers are floats.
        own, name = (int(x) if isinstance(x, float) and x.is_integer() else x for x in (own, name))
        seed, index = self._seed, 0
        if own is not None and own == own:
            if not isinstance(own, int) or not 0 <= own < SEEDS:
                raise RequestError(f"the seed {show(own)} is not an integer from 0 to {SEEDS - 1}")
            seed = own
        elif isinstance(name, int) and name >= 0:
            index = name
        else:
            text = f"{self._seed}/{prompt if name is None or name != name else name}"
            seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % SEEDS
        return Item(number=number, name=str(number), prompt=prompt, seed=seed, index=index)


def generate(
    dataset: data.Dataset,
    actors: Mapping[str, int],
    *,
    threads: int | None = None,
    rows: int = 16,
    seconds: float = WAITING,
    **asked: Any,
) -> data.Dataset:
    """Generate the images of a dataset's rows on actors of one device or of several.

    ``actors``: how many of each device, such as ``{"cpu": 8}``; ``threads`` of each; ``rows`` that an
    actor takes at a time; ``seconds`` to wait for a node that has the device; ``asked``: keywords of
    :class:`Images`. An actor that dies is started again, and its rows are generated again.
    Several devices load the model in float32, for the same images; who is done first takes more rows.
    Raises RequestError for wrong columns, two rows of one id, or a device that no node has.
    """
    wanted = {device: resources(device, threads) for device in actors}
    dataset = dataset.materialize()  # before actors hold the processors that reading it needs
    names = dataset.columns() or []
    if "prompt" not in names or not set(ADDED).isdisjoint(names):
        raise RequestError(
            f"the dataset has the columns {', '.join(sorted(names))}; it needs 'prompt', and none of "
            f"{', '.join(ADDED)}: rename them with Dataset.rename_columns"
        )
    if "id" in names:
        ids = Counter(row["id"] for row in dataset.select_columns(["id"]).iter_rows())
        if twice := [one for one, times in ids.items() if times > 1 and one is not None]:
            raise RequestError(f"two rows have the id {show(twice[0])}; give each one of its own")
    for device in actors:
        check_cluster(wanted[device], device, seconds)
    asked["model"] = _visible(asked.get("model", DEFAULT_MODEL))
    shape = {"batch_size": rows, "compute": data.ActorPoolStrategy(size=sum(actors.values()))}
    if len(actors) == 1:
        ((device, needs),) = wanted.items()
        asked["device"] = device
        return dataset.map_batches(Images, fn_constructor_kwargs=asked, **shape, **needs)
    asked["loading"] = {"dtype": "float32"} | (asked.get("loading") or {})
    places = [(device, wanted[device]) for device, count in actors.items() for _ in range(count)]
    given = uuid.uuid4().hex, places, asked
    return dataset.map_batches(Elsewhere, fn_constructor_args=given, num_cpus=0, **shape)


class Elsewhere:
    """Passes batches on to an actor of its own, in the first of a run's places that is free."""

    def __init__(
        self, run: str, places: Sequence[tuple[str, dict[str, object]]], asked: dict[str, object]
    ) -> None:
        made = ray.remote(max_restarts=-1, max_task_retries=-1)(Images)
        for at, (device, needs) in itertools.cycle(enumerate(places)):
            named = made.options(name=f"{run}/{at}", **needs)
            try:
                self._actor = named.remote(device=device, **asked)
                return
            except ValueError:  # another one has that name
                time.sleep(0.1)

    def __call__(self, batch: dict[str, object]) -> object:
        return ray.get(self._actor.__call__.remote(batch))


class Arguments(BaseModel, extra="forbid"):
    """What :func:`app` takes, most of it as `lantern-accel serve` does.

    ``deployment``: more settings of Serve's ``deployment``, such as ``autoscaling_config``, in JSON.
    """

    model: str = DEFAULT_MODEL
    device: str = "cpu"
    dtype: str = "auto"
    slots: int | None = None
    queue: int = 64
    deadline: float = 300.0
    grace: float = 300.0
    api_keys: Path | None = None
    replicas: int = 1
    deployment: dict[str, object] | Json[dict[str, object]] = {}
    threads: int | None = None
    seconds: float = WAITING


class Replica:
    """One image service with a model of its own, as `lantern-accel serve` runs it."""

    def __init__(self, device: str, given: Arguments, keys: tuple[str, ...], alone: bool) -> None:
        """Load the model; ``alone``: no :class:`Front` is before it."""
        self._pipeline = load(given.model, device=device, dtype=given.dtype)
        slots = given.slots or usual_slots(self._pipeline)
        limits = ServerSettings(slots, given.queue, given.deadline, keys, grace=given.grace)
        self._service = make_app(self._pipeline, limits)
        self._scheduler = self._service.state.scheduler
        if not alone:  # otherwise Serve runs the application
            self._scheduler.start()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._service

    async def check_health(self) -> None:
        """Raise where the device is lost, so that Ray starts another replica."""
        if self._scheduler.queue.broken is not None:
            raise RuntimeError(self._scheduler.queue.broken)

    async def answer(
        self, scope: dict[str, object], body: bytes
    ) -> AsyncIterator[Mapping[str, object]]:
        """Yield the application's messages for a request of :class:`Front`."""
        events: asyncio.Queue[Mapping[str, object] | None] = asyncio.Queue()
        parts, left = [body], asyncio.Event()

        async def receive() -> dict[str, object]:
            if parts:
                return {"type": "http.request", "body": parts.pop()}
            await left.wait()
            return {"type": "http.disconnect"}

        work = asyncio.ensure_future(self._service(scope, receive, events.put))
        work.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
        finally:
            left.set()
            await work


class Front:
    """Passes a request on to the device that has the fewest."""

    def __init__(self, *handles: serve.handle.DeploymentHandle) -> None:
        self._handles = [one.options(stream=True) for one in handles]
        self._running = [0] * len(handles)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        async def pass_on(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return
            body, more = b"", True
            while more:
                event = await receive()
                body, more = body + event.get("body", b""), event.get("more_body", False)
            at = self._running.index(min(self._running))
            self._running[at] += 1
            try:
                plain = {name: scope[name] for name in scope if name not in OWN}
                async for event in self._handles[at].answer.remote(plain, body):
                    await send(event)
            finally:
                self._running[at] -= 1

        return pass_on


def app(arguments: Mapping[str, object]) -> serve.Application:
    """Build the image service for ``serve run lantern_accel.integrations.ray:app NAME=VALUE ...``.

    :class:`Arguments` lists the names. ``device`` may be several with commas between: a deployment
    of ``replicas`` each, behind one route. Raises RequestError for other names and absent devices.
    """
    try:
        given = Arguments.model_validate(arguments)
    except ValidationError as error:
        name, why = error.errors()[0]["loc"][0], error.errors()[0]["msg"]
        known = ", ".join(Arguments.model_fields)
        raise RequestError(f"{show(name)}: {why}; the service takes {known}") from None
    made, devices, more = list[serve.Application](), given.device.split(","), given.deployment
    given.model, keys, alone = _visible(given.model), read_keys(given.api_keys), len(devices) == 1
    for device in devices:
        wanted = resources(device, given.threads)
        if ray.is_initialized():  # `serve run` connects later
            check_cluster(wanted, device, given.seconds)
        deployment = serve.deployment(
            serve.ingress()(Replica) if alone else Replica,
            name=f"images on {device}",
            ray_actor_options=wanted,
            # With this many a replica is full, and Serve chooses another one.
            max_ongoing_requests=given.queue,
            graceful_shutdown_timeout_s=given.grace,
            **({} if "autoscaling_config" in more else {"num_replicas": given.replicas}),
            **more,
        )
        made.append(deployment.bind(device, given, keys, alone))
    if alone:
        return made[0]
    front = serve.deployment(serve.ingress()(Front), name="images", max_ongoing_requests=1 << 10)
    return front.options(ray_actor_options={"num_cpus": 0}).bind(*made)
