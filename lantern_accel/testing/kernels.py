"""Counts the kernels that a step launches: operators that compute, on tensors without data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from pydantic import Field

from lantern_accel.decoding.base import EngineBase
from lantern_accel.device.backend import Backend
from lantern_accel.device.entry_points import why
from lantern_accel.families.random_weights import random_model, sized
from lantern_accel.families.registry import published
from lantern_accel.memory.footprint import Shapes
from lantern_accel.records import Record
from lantern_accel.strategy.choose import choose_strategy
from lantern_accel.testing import tiny
from lantern_accel.testing.trace import Recorder

#: What is counted: no drafts, a tree, relaxed acceptance, and a window.
STRATEGIES = ("vanilla", "eagle2", "lantern++", "scd")


class Kernels(Record):
    """The kernels of one decoding step; ``kernels`` None: they could not be counted, ``why`` says so."""

    model: str
    strategy: str
    dtype: str
    nodes: int = Field(0, description="positions that the target judges per step and image")
    kernels: int | None = None
    why: str = Field(
        "", description="what was counted in place of the backend's operations, and why"
    )


@contextmanager
def without_data(backend: Backend) -> Iterator[None]:
    """Let a backend make tensors of shapes only inside the block, with weights as they are."""
    own: dict[str, Any] = {k: v for k, v in vars(backend).items() if k in ("device", "pack")}
    backend.device = torch.device("meta")
    # Packing reads weights, and these have no data; put back when the block ends.
    backend.pack = lambda weight: weight  # type: ignore[method-assign]
    try:
        yield
    finally:
        del backend.pack
        vars(backend).update(own)


def count_kernels(backend: Backend) -> list[Kernels]:
    """Count a step of every family's tiny model and of the first published one, in the best dtype.

    The backend's layout and operations are used on the ``meta`` device, and the reference operations
    where those do not run without data. A kernel that is called by address is not seen: it counts as
    the operators that stand in for it.
    """
    dtype = backend.dtypes().compute
    out = []
    with without_data(backend):
        for family, strategy in tiny.cases(STRATEGIES):
            out.append(_count(backend, family, strategy, dtype, tiny_sized=True))
        for strategy in STRATEGIES:
            out.append(_count(backend, published()[0].name, strategy, dtype, tiny_sized=False))
    return out


def _count(
    backend: Backend, model: str, strategy: str, dtype: torch.dtype, *, tiny_sized: bool
) -> Kernels:
    """Count one step, first as the backend would run it."""
    make = _small if tiny_sized else _large
    found = Kernels(
        model=f"tiny {model}" if tiny_sized else model,
        strategy=strategy,
        dtype=str(dtype).removeprefix("torch."),
    )
    for ops in (backend, Shapes(backend)):
        try:
            engine = make(ops, model, strategy, dtype)
            found.nodes = engine.geometry.nodes
            recorder = Recorder(torch.device("meta"))
            with recorder:
                engine.step()
        except Exception as error:  # a kernel that takes no tensor without data, for example
            known = f"not counted ({why(error)[:200]})"
            found.why = found.why or f"the backend's operations do not run without data: {known}"
            continue
        found.kernels = recorder.launched
        if ops is not backend:
            found.why = f"reference operations in the backend's layout; {found.why}"
        break
    return found


def _small(ops: Any, family: str, strategy: str, dtype: torch.dtype) -> EngineBase:
    engine = tiny.tiny_engine(ops, strategy, dtype=dtype, family=family)
    tiny.load(engine, 0)
    return engine


def _large(ops: Any, name: str, strategy: str, dtype: torch.dtype) -> EngineBase:
    manifest = sized(name)
    model = random_model(manifest, ops, dtype)
    chosen = choose_strategy(manifest.defaults, strategy)
    return model.engine(ops, chosen, manifest.defaults.sampling)
