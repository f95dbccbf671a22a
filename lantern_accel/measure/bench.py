"""The benchmark: strategies interleaved on one device, ratios to vanilla in the same run.

``conversion`` is the part of the step compression that becomes speed: speed-up over vanilla divided
by step compression. Quality stands beside speed: the total variation that relaxation used.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lantern_accel.device.backend import check_clock
from lantern_accel.errors import RequestError
from lantern_accel.files import write_json
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.strategy.values import Strategy

SCHEMA = 1
PHASES = ("draft", "verify", "accept", "commit")


class Sample(BaseModel):
    """One timed decoding: seconds of prefill and decode, target forwards, tokens made by them."""

    model_config = ConfigDict(extra="forbid")

    seconds: float
    steps: int
    tokens: int
    total_variation: float


class Cell(BaseModel):
    """All samples of one strategy at one batch size and temperature, and how a step's time splits."""

    model_config = ConfigDict(extra="forbid")

    strategy: Strategy
    batch: int
    temperature: float
    samples: list[Sample] = Field(default_factory=list)
    phase_ms: dict[str, float] = Field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int, float]:
        return self.strategy.model_dump_json(), self.batch, self.temperature

    @property
    def tokens_per_second(self) -> float:
        """Median over samples, image tokens of the whole batch."""
        return statistics.median(s.tokens / s.seconds for s in self.samples)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles over the median."""
        rates = sorted(s.tokens / s.seconds for s in self.samples)
        if len(rates) < 4:
            return (rates[-1] - rates[0]) / 2 / statistics.median(rates)
        low, _, high = statistics.quantiles(rates, n=4)
        return (high - low) / 2 / statistics.median(rates)

    @property
    def step_compression(self) -> float:
        """Tokens per target forward of an image, over all samples."""
        made = sum(s.tokens for s in self.samples) - self.batch * len(self.samples)
        return made / max(sum(s.steps for s in self.samples), 1)

    @property
    def total_variation(self) -> float:
        """Relaxed mass used a token, mean over samples."""
        return statistics.mean(s.total_variation for s in self.samples)


class BenchReport(BaseModel):
    """A benchmark run; ``settings`` must agree for a run to be continued."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = SCHEMA
    settings: dict[str, Any]
    environment: dict[str, Any]
    cells: list[Cell] = Field(default_factory=list)

    def baseline(self, cell: Cell) -> Cell | None:
        """Return vanilla at the same batch size and temperature."""
        for other in self.cells:
            same = (other.batch, other.temperature) == (cell.batch, cell.temperature)
            if same and other.strategy.name == "vanilla" and other.samples:
                return other
        return None

    def rows(self) -> list[dict[str, Any]]:
        """Return one plain record a cell, as the table prints it."""
        rows = []
        for cell in self.cells:
            if not cell.samples:
                continue
            base = self.baseline(cell)
            speedup = cell.tokens_per_second / base.tokens_per_second if base else None
            rows.append(
                {
                    "strategy": cell.strategy.name,
                    "batch": cell.batch,
                    "temperature": cell.temperature,
                    "tokens_per_second": cell.tokens_per_second,
                    "spread": cell.spread,
                    "speedup": speedup,
                    "step_compression": cell.step_compression,
                    "conversion": speedup / cell.step_compression if speedup else None,
                    "total_variation": cell.total_variation,
                    "samples": len(cell.samples),
                    "phase_ms": cell.phase_ms,
                }
            )
        return rows


def environment(pipeline: Pipeline) -> dict[str, Any]:
    """Return what a reader needs to judge the figures."""
    import os

    import lantern_accel

    backend = pipeline.backend
    return {
        "device": backend.facts().model_dump(mode="json"),
        "backend": f"{backend.name} {backend.version}",
        "dtype": str(pipeline.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "lantern_accel": lantern_accel.__version__,
    }


@contextmanager
def timed_phases(pipeline: Pipeline) -> Iterator[dict[str, float]]:
    """Sum the seconds of each phase while the block runs; the device is waited for at every edge."""
    sums = dict.fromkeys(PHASES, 0.0)
    backend = pipeline.backend

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        with backend.stopwatch() as watch:
            yield
        sums[name] += watch.seconds

    # An attribute of the object hides the method of its class for as long as it is there.
    vars(backend)["phase"] = phase
    try:
        yield sums
    finally:
        del vars(backend)["phase"]


def decode_once(
    pipeline: Pipeline,
    cell: Cell,
    prompts: Sequence[str | int],
    seed: int,
    step: Callable[[], None] | None = None,
) -> Sample:
    """Decode one batch and return its figures; ``step`` runs in place of the captured step."""
    result = pipeline.decode_only(
        [prompts[(seed + i) % len(prompts)] for i in range(cell.batch)],
        cell.strategy,
        pipeline.sampling(temperature=cell.temperature),
        seed,
        step,
    )
    decoded, seconds = result
    return Sample(
        seconds=seconds,
        steps=int(decoded.steps.sum()),
        tokens=decoded.tokens.numel(),
        total_variation=float(decoded.price.sum()) / decoded.tokens.numel(),
    )


def _phases(pipeline: Pipeline, cell: Cell, prompts: Sequence[str | int]) -> dict[str, float]:
    """Return milliseconds a step in each phase, host included, from one eager decoding.

    A captured step has no edges to stop a clock at, so it is the Python function that is timed.
    """
    sampling = pipeline.sampling(temperature=cell.temperature)
    engine = pipeline.engine(cell.batch, cell.strategy, sampling).engine
    began = time.perf_counter()
    with timed_phases(pipeline) as sums:
        sample = decode_once(pipeline, cell, prompts, 0, engine.step)
    total = time.perf_counter() - began
    steps = max(sample.steps / cell.batch, 1)
    split = {name: 1e3 * seconds / steps for name, seconds in sums.items()}
    split["host"] = 1e3 * max(min(total, sample.seconds) - sum(sums.values()), 0.0) / steps
    return split


def run_bench(
    pipeline: Pipeline,
    strategies: Sequence[Strategy],
    *,
    batches: Sequence[int] = (1,),
    temperatures: Sequence[float] = (1.0,),
    repeats: int = 5,
    prompts: Sequence[str | int] = (),
    out: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> BenchReport:
    """Measure every cell ``repeats`` times, interleaved, after one warm-up each.

    Without ``prompts`` the family's examples are drawn. ``out`` is written after every sample; a run
    that was interrupted goes on from there. Raises
    :class:`RequestError` where ``out`` holds a run with other settings, and on a simulated device.
    """
    check_clock(pipeline.backend)
    prompts = prompts or pipeline.model.family.examples(pipeline.model.manifest)
    cells = [
        Cell(strategy=pipeline.tuned(s, t), batch=b, temperature=t)
        for t in temperatures
        for b in batches
        for s in strategies
    ]
    settings = {
        "model": pipeline.model.manifest.name,
        "weights_hash": pipeline.model.weights_hash,
        "device": str(pipeline.backend.device),
        "dtype": str(pipeline.dtype).removeprefix("torch."),
        "prompts": list(prompts),
        "sampling": pipeline.sampling().model_dump(mode="json"),
    }
    report = BenchReport(settings=settings, environment=environment(pipeline))
    if out is not None and out.is_file():
        report = _continue(out, report)
    known = {cell.key: cell for cell in report.cells}
    for cell in cells:
        if cell.key not in known:
            known[cell.key] = cell
            report.cells.append(cell)
    for batch in batches:
        for temperature in temperatures:
            group = [
                known[c.key] for c in cells if (c.batch, c.temperature) == (batch, temperature)
            ]
            open_ = [c for c in group if len(c.samples) < repeats]
            for cell in open_:
                say(f"warm-up {cell.strategy.name}, batch {batch}, temperature {temperature}")
                decode_once(pipeline, cell, prompts, 0)
                cell.phase_ms = _phases(pipeline, cell, prompts)
            while open_ := [c for c in group if len(c.samples) < repeats]:
                for cell in open_:
                    number = len(cell.samples)
                    cell.samples.append(decode_once(pipeline, cell, prompts, 1 + number))
                    say(
                        f"{cell.strategy.name}, batch {batch}, temperature {temperature}: "
                        f"{number + 1} of {repeats}"
                    )
                    if out is not None:
                        write_json(out, report.model_dump(mode="json"))
    if out is not None:
        write_json(out, report.model_dump(mode="json"))
    return report


def _continue(path: Path, fresh: BenchReport) -> BenchReport:
    try:
        stored = BenchReport.model_validate_json(path.read_text(encoding="utf-8"))
    except (ValidationError, ValueError):
        raise RequestError(
            f"{path} is not a benchmark of this version; name another file or delete it"
        ) from None
    for key, value in fresh.settings.items():
        if stored.settings.get(key) != value:
            raise RequestError(
                f"{path} was measured with {key} {stored.settings.get(key)!r}, not {value!r}; name "
                "another file or delete it"
            )
    return stored


def table(report: BenchReport) -> str:
    """Return the report as a Markdown table."""
    head = (
        "| strategy | batch | T | tokens/s | ± | speed-up | tokens a step | conversion | TV a token "
        "| draft / verify / accept / commit / host, ms an eager step |"
    )
    lines = [head, "|---|---|---|---|---|---|---|---|---|---|"]
    for row in report.rows():
        phases = " / ".join(
            f"{row['phase_ms'].get(name, float('nan')):.1f}" for name in (*PHASES, "host")
        )
        speedup = "" if row["speedup"] is None else f"{row['speedup']:.2f}x"
        conversion = "" if row["conversion"] is None else f"{row['conversion']:.2f}"
        lines.append(
            f"| {row['strategy']} | {row['batch']} | {row['temperature']:g} "
            f"| {row['tokens_per_second']:.0f} | {100 * row['spread']:.0f} % | {speedup} "
            f"| {row['step_compression']:.2f} | {conversion} | {row['total_variation']:.3f} | {phases} |"
        )
    return "\n".join(lines)
