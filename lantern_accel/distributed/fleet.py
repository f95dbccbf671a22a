"""Workers on Ray: one actor per device, of whatever kinds the cluster has, and a pool around them.

Ray places the actors, restarts one that was killed and sends its work again; generating twice gives the
same image, so nothing else is needed. This module is the only one that imports Ray.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from lantern_accel.bounds import whole
from lantern_accel.distributed.painter import Batch, Painter
from lantern_accel.errors import BackendError, RequestError, did_you_mean, shown
from lantern_accel.prompts import Item

#: Resources of a cluster that are not devices.
NOT_DEVICES = re.compile(r"(memory|object_store_memory|node:.*|accelerator_type:.*|bundle.*)")
#: Items of one call of a worker: what is generated again where it is killed.
CHUNK = 8
#: A killed worker is started again so often; a device that kills each of them is given up.
RESTARTS = 3
#: Seconds that workers have to be placed and to load their model.
PATIENCE = 600.0
#: Variables that decide how a device is opened: workers see the driver's.
PASSED_ON = re.compile(r"(LANTERN|PT_HPU|HF_|PJRT)_?.*")

_KIND = re.compile(r"([A-Za-z][\w.-]*)=(\d{1,5})(?:@([\w:.-]+))?")


@dataclass(frozen=True)
class Kind:
    """``count`` workers that each hold one ``resource`` of the cluster, on the device ``device``."""

    resource: str
    count: int
    device: str

    def __str__(self) -> str:
        return f"{self.count} on {self.device}"

    def load(self, load: Mapping[str, Any], threads: int | None) -> dict[str, Any]:
        """Return what a worker of this kind loads: ``load`` on its device, with its threads."""
        options = dict(load.get("options") or {})
        if threads and self.device == "cpu":
            options["threads"] = threads
        return {**load, "device": self.device, "options": options}


@contextmanager
def ray_cluster() -> Iterator[Any]:
    """Give Ray, connected to the cluster of ``RAY_ADDRESS`` or one on this machine; leave it at the end.

    Raises RequestError where Ray is not installed.
    """
    try:
        import ray
    except ImportError:
        raise RequestError(
            "--workers needs Ray, which is not installed; pip install 'lantern-accel[ray]'"
        ) from None
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS")
        # "local": not a cluster that was here and may be gone.
        given = (
            {"address": address} if address else {"address": "local", "include_dashboard": False}
        )
        ray.init(**given, log_to_driver=False, logging_level="warning")
    try:
        yield ray
    finally:
        ray.shutdown()


def device_counts(resources: Mapping[str, float]) -> dict[str, int]:
    """Return what a cluster has of the resources that may be devices."""
    return {
        name: int(count)
        for name, count in sorted(resources.items())
        if not NOT_DEVICES.fullmatch(name) and count >= 1
    }


def known_kinds(resources: Mapping[str, float]) -> list[Kind]:
    """Return all that a cluster has of each device that a backend knows; it may have other resources.

    A backend's name, or a word that one answers to, is the resource in small letters.
    """
    from lantern_accel.device.plugins import backend_specs

    words = {word for name, spec in backend_specs().items() for word in (name, *spec.aliases)}
    every = [Kind(name, count, name.lower()) for name, count in device_counts(resources).items()]
    return [kind for kind in every if kind.device in words]


def read_workers(text: str, resources: Mapping[str, float], threads: int | None) -> list[Kind]:
    """Read ``--workers``: ``auto``, or kinds such as ``CPU=2,GPU=4`` (``TPU=1@NAME`` names a device).

    ``auto``: one worker per accelerator of the cluster, or, where it has none, one per ``threads`` cores.
    Raises RequestError for more than the cluster has.
    """
    from lantern_accel.device.plugins import backend_specs

    devices, known = device_counts(resources), known_kinds(resources)
    if text == "auto":
        cores = devices.get("CPU", 0)
        processors = Kind("CPU", max(1, cores // (threads or cores or 1)), "cpu")
        return [kind for kind in known if kind.resource != "CPU"] or [processors]
    spelling = {name.upper(): name for name in devices}
    spelt = [name.lower() for name in devices]
    kinds = []
    for word in text.split(","):
        parts = _KIND.fullmatch(word.strip())
        if parts is None:
            raise RequestError(
                f"the workers {shown(word)} cannot be read; write auto, or KIND=COUNT such as CPU=2,GPU=4"
            )
        resource, count = spelling.get(parts[1].upper()), whole(parts[2], 1)
        if resource is None:
            raise RequestError(f"this cluster has no {parts[1]}{did_you_mean(parts[1], spelt)}")
        if count is None or count > devices[resource]:
            raise RequestError(
                f"this cluster has {devices[resource]} {resource}, not {parts[2]}; ask for as many"
            )
        device = parts[3] or next((k.device for k in known if k.resource == resource), None)
        if device is None:
            raise RequestError(
                f"no backend is named like the resource {resource!r}; write {resource}=COUNT@DEVICE, "
                f"with one of the devices {', '.join(sorted(backend_specs()))}"
            )
        kinds.append(Kind(resource, count, device))
    return kinds


def placement(kind: Kind, threads: int | None) -> dict[str, Any]:
    """Return what Ray is asked for one worker of a kind.

    Ray gives a worker as many threads as it asks for cores, and one where it asks for none. One that
    holds an accelerator asks for no core, of which there may be fewer, and gets its threads by name.
    """
    variables = {n: v for n, v in os.environ.items() if PASSED_ON.fullmatch(n)}
    options: dict[str, Any] = {"num_cpus": 0, "runtime_env": {"env_vars": variables}}
    if kind.resource == "CPU":
        return {**options, "num_cpus": threads or 1}
    if threads:
        variables["OMP_NUM_THREADS"] = str(threads)
    if kind.resource == "GPU":
        return {**options, "num_gpus": 1}
    return {**options, "resources": {kind.resource: 1}}


class Fleet:
    """Workers on a cluster, made for one run; :meth:`close` stops them."""

    def __init__(
        self,
        ray: ModuleType,
        kinds: Sequence[Kind],
        load: Mapping[str, Any],
        settings: Mapping[str, Any],
        *,
        threads: int | None = None,
        slots: int | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.ray, self.say = ray, say
        self.lost: list[str] = []
        self._actors: dict[str, Any] = {}
        remote = ray.remote(max_restarts=RESTARTS, max_task_retries=RESTARTS)(Painter)
        for kind in kinds:
            for number in range(kind.count):
                name = f"{kind.resource.lower()}-{number}"
                self._actors[name] = remote.options(**placement(kind, threads)).remote(
                    kind.load(load, threads), dict(settings), slots=slots, name=name
                )
        self.workers = sorted(
            self._answers("could not be used: {}"), key=lambda o: str(o["worker"])
        )
        if not self._actors:
            raise BackendError(f"no worker could begin: {'; '.join(self.lost)}")

    def _answers(self, failed: str) -> Iterator[dict[str, Any]]:
        """Yield the facts of the workers that answer; drop and name the others, ``failed`` with why."""
        asked = {actor.facts.remote(): name for name, actor in self._actors.items()}
        self.ray.wait(list(asked), num_returns=len(asked), timeout=PATIENCE)
        for one, name in asked.items():
            try:
                yield self.ray.get(one, timeout=0)
            except Exception as error:
                # Its last line is the actor's own, without Ray's traceback.
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                why = failed.format((lines or [type(error).__name__])[-1][:300])
                if isinstance(error, self.ray.exceptions.GetTimeoutError):
                    why = f"did not answer within {PATIENCE:g} s"
                self.lost.append(f"{name} {why}")
                self.say(f"the worker {name} {why}; the others go on without it")
                self.ray.kill(self._actors.pop(name))

    def draw(self, items: Sequence[Item]) -> Iterator[Batch]:
        """Generate items on whichever worker is free; batches come as they are finished.

        A worker that is lost for good leaves its items to the others. Raises BackendError where none is
        left.
        """
        left = {item.number: item for item in items}
        while left:
            if not self._actors:
                raise BackendError(
                    f"no worker is left, and {len(left)} images are not generated; repeat the command "
                    f"with --resume ({'; '.join(self.lost)})"
                )
            for batch in self._round(list(left.values())):
                for one in batch.images:
                    left.pop(one.number, None)
                yield batch

    def _round(self, items: list[Item]) -> Iterator[Batch]:
        """Generate what the living workers can; what a lost one had is left for the next round."""
        pool = self.ray.util.ActorPool(list(self._actors.values()))
        size = min(CHUNK, max(1, -(-len(items) // len(self._actors))))
        for at in range(0, len(items), size):
            pool.submit(lambda actor, part: actor.draw.remote(part), items[at : at + size])
        while pool.has_next():
            try:
                yield pool.get_next_unordered()
            except self.ray.exceptions.RayActorError:
                list(self._answers("was lost: {}"))  # drops those that are gone for good
                return  # the rest is shared out again, among those that live

    def close(self) -> None:
        """Stop the workers."""
        for actor in self._actors.values():
            self.ray.kill(actor)
        self._actors.clear()
