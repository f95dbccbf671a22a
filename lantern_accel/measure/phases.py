"""Listening to a step's phases: their seconds, their operators, and a trace that names them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, record_function, schedule
from torch.utils._python_dispatch import TorchDispatchMode

from lantern_accel.decoding.base import EngineBase
from lantern_accel.device.backend import Backend
from lantern_accel.families.random_weights import random_model
from lantern_accel.files import write_whole
from lantern_accel.generation.pipeline import Pipeline, Prompt
from lantern_accel.measure.record import STEP_PHASES
from lantern_accel.memory.footprint import Shapes
from lantern_accel.strategy.values import Sampling, Strategy
from lantern_accel.testing.trace import computes

#: Steps that pass before a trace begins, so that kernels are there, and steps that are traced.
PASSED, TRACED = 2, 8


@contextmanager
def timed_phases(backend: Backend) -> Iterator[dict[str, float]]:
    """Sum the seconds of each phase inside the block; the device is waited for at every edge."""
    sums = dict.fromkeys(STEP_PHASES, 0.0)

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        with backend.stopwatch() as watch:
            yield
        sums[name] += watch.seconds

    with backend.listen(timed):
        yield sums


# torch leaves the base class untyped.
class LaunchCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators by phase; views and allocations, which launch nothing, are left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "other"
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if computes(func):
            self.counts[self.phase] = self.counts.get(self.phase, 0) + 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Count what runs inside the block under ``name``."""
        before, self.phase = self.phase, name
        try:
            yield
        finally:
            self.phase = before


def count_launches(engine: EngineBase, *, prefill: bool = True) -> dict[str, int]:
    """Run ``prefill`` and one eager step of a loaded engine; return the operators of each phase.

    Called in inference mode, as steps run.
    """
    counter = LaunchCounter()
    with engine.ops.listen(counter.within), counter:
        if prefill:
            with counter.within("prefill"):
                engine.prefill()
        engine.step()
    return counter.counts


@torch.inference_mode()
def count_operators(
    manifest: Any,
    strategy: Strategy,
    sampling: Sampling,
    batch: int,
    dtype: torch.dtype,
    *,
    prefill: bool = True,
) -> dict[str, int]:
    """Return the reference's operators by phase (views left out) of a model with these sizes.

    A device's own count says what *it* gives to its queue: a native call or a fused kernel hides in one,
    or in none, what is many on another device. Projections take this count, on shapes alone, the same
    everywhere.
    """
    ops = Shapes()
    with ops.device:
        model = random_model(manifest, ops, dtype, neighbours=max(strategy.neighbours, 1))
        return count_launches(model.engine(ops, strategy, sampling, batch), prefill=prefill)


def write_trace(
    pipeline: Pipeline,
    strategy: Strategy,
    sampling: Sampling,
    prompts: Sequence[Prompt],
    eager: Callable[[], None],
    path: Path,
) -> None:
    """Trace a few eager steps, phases named, into a file for ui.perfetto.dev: whole or not at all.

    ``eager`` is the engine's Python step: a replay has no phases to name.
    """
    plan = schedule(wait=PASSED - 1, warmup=1, active=TRACED, repeat=1)

    def export(seen: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            whole = Path(folder) / "trace.json"
            seen.export_chrome_trace(str(whole))
            with whole.open("rb") as source:
                write_whole(path, lambda stream: shutil.copyfileobj(source, stream))

    # Every activity that this torch can see.
    with profile(schedule=plan, on_trace_ready=export) as seen:

        def step() -> None:
            with record_function("step"):
                eager()
            if seen.step_num == PASSED + TRACED - 1:  # the last that is traced
                pipeline.backend.synchronize()
            seen.step()

        with pipeline.backend.listen(record_function):
            pipeline.decode_only(prompts, strategy, sampling, 0, step=step)
