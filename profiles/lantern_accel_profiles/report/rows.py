"""The rows of the comparison: a strategy on a device, its speed, and the quality loss next to it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from pydantic import Field, model_validator

from lantern_accel.device.host_load import BUSY
from lantern_accel.records import Record
from lantern_accel_profiles.measure.record import (
    PHASES,
    STEP_PHASES,
    Cell,
    Interval,
    NotMeasured,
    Quality,
    Reading,
    Run,
    Sample,
    is_measured,
    not_measured,
)
from lantern_accel_profiles.quality import interval as intervals
from lantern_accel_profiles.quality.interval import Verdict
from lantern_accel_profiles.report.writing import number, percent

NO_LOSS = not_measured(
    "the quality loss of this relaxed strategy is unknown, so its speed-up is not shown"
)
NO_BASE = not_measured("vanilla was not measured at this batch size and temperature")
#: The first words of what auto decoded with, if it took no drafts.
PLAIN = "plain decoding"
SAME_ALGORITHM = "both are plain decoding"
PERCENTILES = (50, 95, 99)
#: Seconds by which two clocks may differ on one sample, next to half of it: more is a jump.
JUMP = 0.25
#: What a row has as its cell does.
AS_MEASURED = ("batch", "temperature", "settled", "cold_seconds", "capture_kind")


class Row(Record):
    """One measured cell as the tables show it."""

    run: str
    device: str
    backend: str
    dtype: str
    strategy: str
    detail: str = Field(description="drafts and acceptance rule in words, those of auto, too")
    relaxed: bool
    batch: int
    temperature: float
    samples: int
    settled: bool
    others_cpu: Reading = Field(description="median share of the host that others used")
    tokens_per_second: Interval = Field(
        description="of prefill and decoding, text and pixels left out"
    )
    images_per_second: Interval | NotMeasured = Field(description="of whole requests")
    seconds_per_image: Interval | NotMeasured = Field(
        description="median request, text to pixels, over its images"
    )
    latency: dict[str, Interval | NotMeasured] = Field(
        description="seconds per request, by percentile"
    )
    speedup: Interval | NotMeasured = Field(description="of whole requests, over plain decoding")
    verdict: Verdict | NotMeasured
    step_compression: Interval = Field(description="tokens per target forward of an image")
    quality: Quality | NotMeasured | None = Field(description="None: exact, there is none")
    rounding: Interval | None = Field(
        None, description="total variation per token that quantized weights add; None: full weights"
    )
    cold_seconds: Reading
    capture_kind: str = Field("", description="how a step runs again; empty: an older run")
    peak_bytes: Reading
    joules_per_image: Reading
    phase_ms: dict[str, Reading] = Field(description="per image, by phase")
    phases_from: str = Field(description="the step whose split is used: eager or recording")

    @property
    def fidelity(self) -> str:
        """Return the quality loss relative to plain decoding, in a few words."""
        return fidelity_words(self.moved)

    @property
    def drafts(self) -> bool:
        """Whether it decodes with drafts: auto's choice may be plain decoding."""
        return self.strategy != "vanilla" and not self.detail.startswith(PLAIN)

    @property
    def total_variation_per_token(self) -> Interval | None:
        """Total variation per token of relaxation and quantized weights, at most; None: unknown."""
        parts = [] if self.rounding is None else [self.rounding]
        if self.relaxed:
            loss = self.quality
            relaxed = loss.total_variation_per_token if isinstance(loss, Quality) else None
            if not isinstance(relaxed, Interval):
                return None
            parts.append(relaxed)
        return Interval(
            value=sum(one.value for one in parts),
            low=sum(one.low for one in parts),
            high=sum(one.high for one in parts),
            n=min((one.n for one in parts), default=1),
        )

    @property
    def moved(self) -> float | None:
        """Total variation per token, 0 if exact; None: unknown."""
        moved = self.total_variation_per_token
        return None if moved is None else moved.value

    @model_validator(mode="after")
    def _require_quality_loss(self) -> Row:
        if (
            self.relaxed
            and isinstance(self.speedup, Interval)
            and not is_quality_known(self.quality)
        ):
            raise ValueError(
                f"{self.strategy} on {self.device}: a relaxed speed-up without its quality loss"
            )
        return self


def fidelity_words(moved: float | None) -> str:
    """Return a quality loss in words; ``moved``: total variation per token, 0 if exact."""
    if moved is None:
        return "quality loss not measured"
    return f"TV {number(moved, 2)} per token" if moved else "exact"


def busy_words(share: float) -> str:
    """Say that other programs describe_disturbance a measurement."""
    return f"the machine was busy: other programs used {percent(share)} of the host"


def is_quality_known(quality: Quality | str | None) -> bool:
    """Say whether a relaxed strategy's quality loss is known well enough to stand next to a speed-up.

    The moved mass and the agreement of tokens are needed; the feature distance may say why it is
    missing, because it needs a package of its own.
    """
    return (
        isinstance(quality, Quality)
        and isinstance(quality.total_variation_per_token, Interval)
        and isinstance(quality.agreement, Interval)
    )


def same_rounds(run: Run) -> Run:
    """Return a run whose cells of one batch size and temperature have the samples of the same rounds.

    Fast cells take more samples than slow ones, and a report uses the rounds that all cells have. An
    unfinished cell with fewer samples than planned does not shorten the others.
    """
    planned = run.settings.plan.samples
    cells = []
    for cell in run.cells:
        counts = [len(one.samples) for one in _measured_with(run, cell)]
        rounds = min([n for n in counts if n >= planned] or counts, default=0)
        cells.append(cell.model_copy(update={"samples": cell.samples[:rounds]}))
    return run.model_copy(update={"cells": cells})


def row_of(run: Run, cell: Cell) -> Row:
    """Build the row of a cell with samples."""
    base = base_of(run, cell)
    quality: Quality | str | None = None
    if cell.relaxed:
        how = "--resume" if run.settings.plan.quality_images else "with `lantern-accel profile`"
        quality = run.quality_of(cell) or not_measured(f"not in this run; `{run.command} {how}`")
    hidden = cell.relaxed and not is_quality_known(quality)
    reason = NO_LOSS if hidden else NO_BASE
    speedup: Interval | str = reason
    verdict: Verdict | str = reason
    if base is not None and not hidden:
        speedup = intervals.speed_ratio(*seconds_of(base, cell))
        verdict = intervals.verdict(speedup, unsettled=why_unjudged(cell, base))
    if base is cell:
        verdict = not_measured("vanilla is the base")
    made = [float(s.tokens - s.images) for s in cell.samples]
    steps = [float(s.steps) for s in cell.samples]
    totals = readings([s.total for s in cell.samples])
    seconds = if_measured(totals, lambda n: intervals.median([t / cell.batch for t in n]))
    used = [(s.energy_mj / 1e3, s.images) for s in cell.samples if s.energy_mj is not None]
    joules = sum(energy for energy, _ in used)
    no_meter = not_measured(f"backend {run.environment.device.backend!r} reads no energy meter")
    rounding = run.settings.rounding
    return Row(
        run=run.name,
        device=run.environment.device.name,
        backend=run.environment.device.backend,
        dtype=run.settings.dtype,
        strategy=cell.strategy.name,
        detail=(cell.stands_for.partition("; ")[0] or cell.strategy.detail)
        + ("" if rounding is None else f", {rounding.weights} weights"),
        relaxed=cell.relaxed,
        samples=len(cell.samples),
        others_cpu=if_measured(readings([s.others_cpu for s in cell.samples]), statistics.median),
        tokens_per_second=intervals.median(cell.rates),
        images_per_second=if_measured(seconds, intervals.reciprocal),
        seconds_per_image=seconds,
        latency={
            f"p{p}": if_measured(totals, partial(intervals.percentile, p=p)) for p in PERCENTILES
        },
        speedup=speedup,
        verdict=verdict,
        step_compression=intervals.estimate_paired(intervals.share, made, steps),
        quality=quality,
        rounding=None if rounding is None else intervals.mean(rounding.by_image),
        peak_bytes=if_measured(cell.memory, lambda memory: memory.peak_bytes),
        joules_per_image=joules / sum(n for _, n in used) if joules else no_meter,
        **{name: getattr(cell, name) for name in AS_MEASURED},
        phase_ms=phase_ms(cell),
        phases_from=cell.step_ms_from,
    )


def base_of(run: Run, cell: Cell) -> Cell | None:
    """Return plain decoding at a cell's batch size and temperature; None where it was not run."""
    return next((one for one in _measured_with(run, cell) if one.strategy.name == "vanilla"), None)


def twin_of(run: Run, cell: Cell) -> Cell | None:
    """Return exact decoding on a relaxed cell's tree, or in its window; None where it was not run."""
    drafts = cell.strategy.drafts
    here = (one for one in _measured_with(run, cell) if not one.relaxed)
    return next((one for one in here if one.strategy.drafts == drafts), None)


def _measured_with(run: Run, cell: Cell) -> list[Cell]:
    """Return the measured cells of a cell's batch size and temperature."""
    setting = cell.batch, cell.temperature
    return [one for one in run.cells if one.samples and (one.batch, one.temperature) == setting]


def is_plain(cell: Cell) -> bool:
    """Return whether all of a cell's images were decoded one token per forward pass."""
    plain = cell.strategy.drafts.kind == "none" or cell.stands_for.startswith(PLAIN)
    return plain and all(s.steps == s.tokens - s.images for s in cell.samples)


def pool_samples(run: Run, cell: Cell) -> Cell | None:
    """Return a cell with the samples of all that did the same work, in the order of their times.

    None: the cell's samples are in that of plain decoding.
    """
    base = base_of(run, cell)
    if base is None or not is_plain(cell):
        return cell
    if cell is not base:
        return None
    alike = [one for one in _measured_with(run, cell) if is_plain(one)]
    samples = sorted((s for one in alike for s in one.samples), key=lambda s: (s.session, s.at))
    return base.model_copy(update={"samples": samples})


def seconds_of(*cells: Cell) -> list[list[float]]:
    """Return the seconds per image of each cell's samples: whole requests, text to pixels.

    Where a request of one of the cells was not timed as a whole: of decoding, for all of them.
    """
    whole = all(is_measured(s.total) for cell in cells for s in cell.samples)
    return [
        [float(s.total if whole else s.prefill + s.decode) / cell.batch for s in cell.samples]
        for cell in cells
    ]


def why_unjudged(*cells: Cell) -> str:
    """Say why the times of one of the cells, or their ratio, cannot be judged; empty where all can."""
    if len(cells) > 1 and all(map(is_plain, cells)):
        return SAME_ALGORITHM
    for cell in cells:
        if not cell.warmup:
            return "the file does not say whether warm-up had settled"
        if not cell.settled:
            return f"warm-up of {cell.strategy.name} did not settle"
        if doubt := describe_disturbance(cell):
            return doubt
    return ""


def describe_disturbance(cell: Cell) -> str:
    """Say why no time of a cell is believed: a busy machine, or a clock that jumped; empty: neither."""
    shares = [s.others_cpu for s in cell.samples if is_measured(s.others_cpu)]
    if shares and (share := statistics.median(shares)) > BUSY:
        return busy_words(share)
    if jumps := clock_jumps(cell.samples):
        return f"a clock jumped in {jumps} of {len(cell.samples)} samples of {cell.name}"
    return ""


def clock_jumps(samples: Sequence[Sample]) -> int:
    """Count samples of which a clock tells what cannot be.

    That are those which the two clocks saw differently by more than :data:`JUMP` and half of what they
    saw, and those that began before the sample in front of them.
    """
    found = 0
    for before, sample in zip([None, *samples], samples, strict=False):
        a, b = sample.total, sample.wall
        far = is_measured(a) and is_measured(b) and abs(a - b) > JUMP + max(a, b) / 2
        follows = before is not None and before.session == sample.session
        found += far or (follows and sample.at < (before.at if before else 0.0))
    return found


def phase_ms(cell: Cell) -> dict[str, Reading]:
    """Return milliseconds per image in each phase.

    Text, prefill and pixels are medians of the samples. The decoding time of the samples is split as
    the timed step splits, and the host's part holds what no phase claims.
    """

    def per_image(values: Sequence[float]) -> float:
        return 1e3 * statistics.median(
            v / s.images for v, s in zip(values, cell.samples, strict=True)
        )

    found: dict[str, Reading] = {
        "text": if_measured(readings([s.text for s in cell.samples]), per_image),
        "prefill": per_image([s.prefill for s in cell.samples]),
        "pixels": if_measured(readings([s.pixels for s in cell.samples]), per_image),
    }
    if isinstance(cell.step_ms, str):
        found |= dict.fromkeys((*STEP_PHASES, "host"), cell.step_ms)
    else:
        decode = per_image([s.decode for s in cell.samples])
        steps = statistics.median(s.steps / s.images for s in cell.samples)
        split = dict(cell.step_ms)
        # The eager decoding's remainder holds its prefill.
        prefill = 1e3 * statistics.median(s.prefill for s in cell.samples)
        split["host"] = max(split.get("host", 0.0) - prefill / max(steps, 1), 0.0)
        whole = sum(split.values()) or 1.0
        found |= {name: decode * value / whole for name, value in split.items()}
        totals, host = readings([s.total for s in cell.samples]), found["host"]
        if not isinstance(totals, str) and is_measured(host):
            claimed = sum(v for v in found.values() if is_measured(v))
            found["host"] = host + max(per_image(totals) - claimed, 0.0)
    return {name: found[name] for name in PHASES}


Value = TypeVar("Value")
Found = TypeVar("Found")


def readings(values: Sequence[Reading]) -> list[float] | NotMeasured:
    """Return all numbers, or the first reason why there are not all."""
    numbers = [value for value in values if is_measured(value)]
    return next((str(value) for value in values if not is_measured(value)), numbers)


def if_measured(value: Value | str, figure: Callable[[Value], Found]) -> Found | str:
    """Return a figure of what was measured, or why it was not."""
    return value if isinstance(value, str) else figure(value)
