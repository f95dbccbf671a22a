"""A few steps under torch's profiler, as a file that Perfetto (ui.perfetto.dev) opens."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from torch.profiler import profile, record_function

from lantern_accel.files import write_whole
from lantern_accel.generation.pipeline import Pipeline, Prompt
from lantern_accel.measure.record import Cell
from lantern_accel.measure.samples import batch_prompts, ready_of

#: Steps that are let pass, so that kernels are there, and steps that are traced.
PASSED, TRACED = 2, 8


def write_trace(pipeline: Pipeline, cell: Cell, prompts: Sequence[Prompt], path: Path) -> None:
    """Trace a few eager steps of a cell, phases named, into ``path``: whole or not at all.

    Steps run eagerly, because a replay has no phases to name.
    """
    ready, sampling = ready_of(pipeline, cell)
    seen = profile()  # every activity that this torch can see
    count, running = 0, False

    def step() -> None:
        nonlocal count, running
        count += 1
        if count == PASSED + 1:
            seen.start()
            running = True
        if running and count > PASSED + TRACED:
            pipeline.backend.synchronize()
            seen.stop()
            running = False
        with record_function("step") if running else nullcontext():
            ready.engine.step()

    with _named_phases(pipeline):
        pipeline.decode_only(
            batch_prompts(prompts, cell.batch, 0), cell.strategy, sampling, 0, step=step
        )
    if running:  # the image was complete before
        seen.stop()
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(whole))
        with whole.open("rb") as source:
            write_whole(path, lambda stream: shutil.copyfileobj(source, stream))


@contextmanager
def _named_phases(pipeline: Pipeline) -> Iterator[None]:
    """Let the profiler see the step's phases by name."""
    vars(pipeline.backend)["phase"] = record_function
    try:
        yield
    finally:
        del vars(pipeline.backend)["phase"]
