"""Writes one request as a trace for ui.perfetto.dev: its stages, its steps, and power next to them.

The device is waited for at both ends of every step, so that a trace is slower than what it shows. A
recording that keeps its phases apart shows them within its steps; where it does not, the Python step is
traced as well, on a track of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from lantern_accel.decoding.decoded import Decoded
from lantern_accel.device.capture import Replay, listening
from lantern_accel.device.context import inferring
from lantern_accel.files import write_json
from lantern_accel.generation.engines import CapturedEngine
from lantern_accel.generation.pipeline import Pipeline, Prompt
from lantern_accel_profiles.measure.record import Cell
from lantern_accel_profiles.measure.samples import engine_of, in_place

TRACKS = {1: "request", 2: "the same by the Python step, which is slower, for its phases"}


class Trace:
    """Events in Chrome's format; ``track`` is the one that they are added to."""

    def __init__(self, pipeline: Pipeline, ready: CapturedEngine) -> None:
        self.backend, self.state, self.engine = pipeline.backend, ready.engine.state, ready.engine
        self.zero, self.track = time.perf_counter(), 1
        self.events: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": track, "args": {"name": name}}
            for track, name in TRACKS.items()
        ]

    def add(self, name: str, kind: str, at: float, took: float = 0.0, **about: object) -> None:
        """Add an event at a moment of the host's clock, of some seconds."""
        what = {"name": name, "ph": kind, "pid": 1, "tid": self.track, "args": about}
        self.events.append(what | {"ts": 1e6 * (at - self.zero), "dur": 1e6 * took})

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add what runs inside the block; the device is waited for at both ends."""
        self.backend.synchronize()
        began = time.perf_counter()
        yield
        self.backend.synchronize()
        self.add(name, "X", began, time.perf_counter() - began)

    def step(self, part: Callable[[], None]) -> None:
        """Run a step and add it, with the drafts that each image accepted, and the power of then.

        Power is what the device reads, or else what its energy meter has counted since the step began.
        """
        known, before = self.state.length.tolist(), self.backend.energy_mj()
        began = at = time.perf_counter()
        phases = part.time_phases() if isinstance(part, Replay) else None
        if phases is None:
            part()
        self.backend.synchronize()
        took = time.perf_counter() - began
        gained = zip(self.state.length.tolist(), known, strict=True)
        accepted = [max(after - length - 1, 0) for after, length in gained]
        self.add("step", "X", began, took, accepted=accepted, length=self.engine.now)
        for name, seconds in (phases or {}).items():
            self.add(name, "X", at, seconds)
            at += seconds
        watts, after = self.backend.conditions().power_w, self.backend.energy_mj()
        if watts is None and before is not None and after is not None:
            watts = (after - before) / 1000 / took
        if watts is not None:
            self.add("power", "C", began, W=watts)


@inferring
def write_trace(pipeline: Pipeline, cell: Cell, prompts: Sequence[Prompt], path: Path) -> None:
    """Generate a cell's request once more, and write its trace, whole or not at all."""
    ready, sampling = engine_of(pipeline, cell), pipeline.sampling(temperature=cell.temperature)
    trace = Trace(pipeline, ready)
    with trace.span("text"):
        pipeline.conditions(prompts)

    def decode(functions: Mapping[str, Callable[[], None]]) -> Decoded:
        began, first = time.perf_counter(), len(trace.events)
        steps = {
            n: partial(trace.step, one) for n, one in functions.items() if n.startswith("step")
        }
        with in_place(ready.engine, {**functions, **steps}):
            done, _ = pipeline.decode_only(prompts, cell.strategy, sampling, 0)
        at = next(one["ts"] for one in trace.events[first:] if one["name"] == "step")
        trace.add("text and prefill", "X", began, trace.zero + at / 1e6 - began)
        return done

    done = decode(ready.engine.functions)
    with trace.span("pixels"):
        pipeline.pixels(done.tokens, pipeline.model.family.usual_shape(pipeline.model))
    if not any(one["name"] == "verify" for one in trace.events):
        trace.track = 2
        with listening(pipeline.backend, trace.span):
            decode(ready.engine.host_functions())
    write_json(path, {"traceEvents": trace.events, "displayTimeUnit": "ms"})
