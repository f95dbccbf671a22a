"""Decides, once and before a request's engines, what it is decoded with."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from lantern_accel.decoding.engine import Engine
from lantern_accel.device.context import inferring
from lantern_accel.errors import DoesNotFitError
from lantern_accel.families.base import Rows, Size
from lantern_accel.generation.decision import Decision, Part
from lantern_accel.generation.engines import explained
from lantern_accel.generation.runtime import Runtime
from lantern_accel.strategy.values import AUTO, Sampling, Strategy


def made_for(runtime: Runtime) -> dict[str, str]:
    """Return what a decision serves for, by the names of its fields."""
    backend, model = runtime.backend, runtime.model
    return {
        "model": model.manifest.name,
        "weights_hash": model.weights_hash,
        "backend": f"{backend.name} {backend.version}",
        "device": backend.facts().name,
        "dtype": str(runtime.dtype).removeprefix("torch."),
    }


@inferring
def decide(
    runtime: Runtime,
    asked: Strategy,
    sampling: Sampling,
    shape: Hashable,
    rows: Callable[[int], Rows],
    images: int,
    batch: int | None = None,
    size: Size | None = None,
    *,
    joins: bool = False,
) -> Decision:
    """Decide what some images are decoded with, ``batch`` at once; None: as many as fit.

    ``auto`` reads what is kept for this device and model, or times its candidates on the first images.
    ``shape``: of the images; ``rows``: what the first images start from, by their number. ``joins``:
    images join and leave the rows of one batch, so that it has no other rows and there is no rest.
    """
    if asked.name == AUTO:  # before anything is timed
        runtime.engines.check(asked, sampling)
    capacity, parts = runtime.engines.capacity, list[Part]()
    for together, padded in capacity.batches(images, batch, asked, sampling, shape).items():
        count, used = together if joins else padded, asked
        if asked.name == AUTO:

            def begun(source: Strategy, count: int = count) -> Engine | None:
                try:
                    ready = runtime.engines.get(count, source, sampling, shape)
                except DoesNotFitError:  # not together with the first
                    return None
                ready.begin(rows(count), 0, range(count))
                return ready.engine

            with explained(runtime.backend):
                used = runtime.auto.choose(asked, count, sampling, begun)
        free, need = capacity.free, capacity.bytes_of(count, used, sampling, shape)
        parts.append(Part(images=together, rows=count, strategy=used, memory=need, free=free))
        if joins:
            break
    of = made_for(runtime)
    return Decision(asked=asked.name, sampling=sampling, size=size, parts=tuple(parts), **of)
