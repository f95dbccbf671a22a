"""Decides, once and before a request's engines, what it is decoded with."""

from __future__ import annotations

from collections.abc import Sequence

from lantern_accel.families.base import Conditions, Rows
from lantern_accel.generation.decision import Decision, Part
from lantern_accel.generation.engines import ALL, Capture
from lantern_accel.generation.request import GenerationRequest
from lantern_accel.generation.runtime import Runtime
from lantern_accel.strategy.values import Sampling, Strategy


def decided(runtime: Runtime, request: GenerationRequest, parts: Sequence[Part]) -> Decision:
    """Return the decision for these parts of a request."""
    backend, manifest = runtime.backend, runtime.model.manifest
    return Decision(
        model=manifest.name,
        weights_hash=runtime.model.weights_hash,
        backend=f"{backend.name} {backend.version}",
        device=backend.facts().name,
        dtype=str(runtime.dtype).removeprefix("torch."),
        asked=request.strategy.name,
        sampling=request.sampling,
        size=request.size,
        parts=tuple(parts),
    )


def part_of(
    runtime: Runtime, images: int, rows: int, strategy: Strategy, sampling: Sampling
) -> Part:
    """Return a part, with the memory that it takes."""
    fit = runtime.engines.capacity.fit(rows, strategy, sampling, spare=runtime.engines.nbytes)
    return Part(images=images, rows=rows, strategy=strategy, memory=fit.nbytes, free=fit.free)


def decide(
    runtime: Runtime,
    request: GenerationRequest,
    conditions: Conditions,
    wanted: Sequence[int],
    capture: Capture = ALL,
    given: Decision | None = None,
) -> Decision:
    """Decide what the ``wanted`` images of a request are decoded with.

    ``auto`` reads what is kept for this device and model, or times its candidates on the first images.
    ``given``: an earlier decision, which is taken where it fits; raises RequestError where it does not.
    """
    if given is not None:
        given.check(decided(runtime, request, given.parts), request)
        return given
    engines, asked, sampling = runtime.engines, request.strategy, request.sampling
    batch = engines.batch_of(len(wanted), request.batch_size, asked, sampling)
    parts = []
    for images in dict.fromkeys((batch, len(wanted) % batch or batch)):
        count = engines.rows_of(images, asked, sampling)

        def rows(images: int = images, count: int = count) -> Rows:
            first = [*wanted[:images], *[wanted[0]] * (count - images)]
            return runtime.rows_of(request, conditions, first)

        used = runtime.chosen(rows, count, asked, sampling, conditions.shape, capture)
        parts.append(part_of(runtime, images, count, used, sampling))
    return decided(runtime, request, parts)
