"""One row of the comparison: a strategy on a device, its speed, and the price beside it."""

from __future__ import annotations

import statistics as plain
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lantern_accel.measure import intervals as statistics
from lantern_accel.measure.bench import PHASES as STEP_PHASES
from lantern_accel.measure.intervals import Verdict
from lantern_accel.measure.record import (
    PHASES,
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
from lantern_accel.strategy.values import DynamicTree, NoTree, StaticTree, Strategy, Window

UNPRICED = not_measured(
    "the price of this relaxed strategy is not known, so its speed-up is not shown"
)
NO_BASE = not_measured("there is no vanilla at this batch size and temperature")
PERCENTILES = (50, 90, 99)


class Row(BaseModel):
    """One measured cell as the tables show it."""

    model_config = ConfigDict(extra="forbid")

    measured: Literal[True] = True
    run: str
    device: str
    backend: str
    dtype: str
    strategy: str
    detail: str = Field(description="tree and acceptance rule in words")
    relaxed: bool
    batch: int
    temperature: float
    samples: int
    seconds: float = Field(description="timed seconds in all")
    settled: bool
    others_cpu: Reading = Field(description="median share of the host that others used")
    tokens_per_second: Interval
    images_per_second: Interval | NotMeasured
    latency: dict[str, Interval | NotMeasured] = Field(
        description="seconds of a request, by percentile"
    )
    speedup: Interval | NotMeasured
    verdict: Verdict | NotMeasured
    step_compression: float
    conversion: Reading
    price: Quality | NotMeasured | None = Field(description="None: exact, there is none")
    cold_seconds: Reading
    captured: bool
    peak_bytes: Reading
    buffers_bytes: Reading
    joules_per_image: Reading
    images_per_joule: Reading
    tokens_per_s_per_gb_s: Reading
    bandwidth_fraction: Reading
    matmul_fraction: Reading
    phase_ms: dict[str, Reading] = Field(description="an image, by phase")
    phases_from: str = Field(description="the step whose split is used: eager or recording")

    @model_validator(mode="after")
    def _no_speedup_without_its_price(self) -> Row:
        if self.relaxed and isinstance(self.speedup, Interval) and not priced(self.price):
            raise ValueError(
                f"{self.strategy} on {self.device}: a relaxed strategy's speed-up without its price"
            )
        return self


def priced(price: Quality | str | None) -> bool:
    """Say whether a relaxed strategy's price is known well enough to stand beside a speed-up.

    The moved mass and the agreement of tokens are needed; the feature distance may say why it is
    missing, because it needs a package of its own.
    """
    return (
        isinstance(price, Quality)
        and isinstance(price.total_variation, Interval)
        and isinstance(price.agreement, Interval)
    )


def rates(cell: Cell) -> list[float]:
    """Return tokens a second of each sample, prefill included."""
    return [s.tokens / (s.prefill + s.decode) for s in cell.samples]


def compression(cell: Cell) -> float:
    """Return image tokens a target forward, prefill's first token not counted."""
    made = sum(s.tokens - s.images for s in cell.samples)
    return made / max(sum(s.steps for s in cell.samples), 1)


def row_of(run: Run, cell: Cell) -> Row:
    """Build the row of a cell with samples."""
    base = _baseline(run, cell)
    price: Quality | str | None = None
    if cell.relaxed:
        price = run.quality_of(cell) or not_measured(
            f"`{run.command}` measures it"
            if run.migrated_from
            else f"the run is not complete; `{run.command} --resume`"
        )
    speedup: Interval | str = NO_BASE
    if base is not None:
        speedup = statistics.ratio(rates(cell), rates(base), paired=True)
        if cell.relaxed and not priced(price):
            speedup = UNPRICED
    verdict: Verdict | str = not_measured("vanilla is the base")
    if base is not cell:
        verdict = (
            statistics.verdict(speedup, unsettled=unsettled(cell, base or cell))
            if isinstance(speedup, Interval)
            else speedup
        )
    steps = compression(cell)
    totals = readings([s.total for s in cell.samples])
    per_image = _energy(cell, run)
    return Row(
        run=run.name,
        device=run.environment.device.name,
        backend=run.environment.device.backend,
        dtype=run.settings.dtype,
        strategy=cell.strategy.name,
        detail=detail_of(cell.strategy),
        relaxed=cell.relaxed,
        batch=cell.batch,
        temperature=cell.temperature,
        samples=len(cell.samples),
        seconds=sum(s.prefill + s.decode for s in cell.samples),
        settled=cell.settled,
        others_cpu=_median([s.others_cpu for s in cell.samples]),
        tokens_per_second=statistics.median(rates(cell)),
        images_per_second=totals
        if isinstance(totals, str)
        else statistics.median([cell.batch / total for total in totals]),
        latency={
            f"p{p}": totals if isinstance(totals, str) else statistics.percentile(totals, p)
            for p in PERCENTILES
        },
        speedup=speedup,
        verdict=verdict,
        step_compression=steps,
        conversion=speedup.value / steps if isinstance(speedup, Interval) else speedup,
        price=price,
        cold_seconds=cell.cold_seconds,
        captured=cell.captured,
        peak_bytes=cell.memory if isinstance(cell.memory, str) else cell.memory.peak_bytes,
        buffers_bytes=cell.memory if isinstance(cell.memory, str) else cell.memory.buffers_bytes,
        joules_per_image=per_image,
        images_per_joule=1 / per_image if is_measured(per_image) and per_image else per_image,
        **_fractions(run, cell),
        phase_ms=phase_ms(cell),
        phases_from=cell.step_ms_from,
    )


def unsettled(*cells: Cell) -> str:
    """Say why the times of one of the cells are not known to have settled; empty where all have."""
    for cell in cells:
        if not cell.warmup:
            return "the file does not say whether warm-up had settled"
        if not cell.settled:
            return f"warm-up of {cell.strategy.name} did not settle"
    return ""


def detail_of(strategy: Strategy) -> str:
    """Say tree and acceptance rule in a few words."""
    tree, rule = strategy.tree, strategy.acceptance
    if isinstance(tree, NoTree):
        words = ["one token a step"]
    elif isinstance(tree, StaticTree):
        deep = max(len(path) for path in tree.paths)
        words = [f"{len(tree.paths)} drafts, {deep} deep"]
    elif isinstance(tree, DynamicTree):
        words = [f"dynamic, {tree.total - 1} drafts, {tree.depth + 1} deep"]
    elif isinstance(tree, Window):
        words = [f"window of {tree.length}, {tree.fresh}, {tree.tail}"]
        if tree.siblings:
            words.append(f"siblings {' '.join(map(str, tree.siblings))}")
    else:
        words = [f"chain of {tree.length}"]
    fields = rule.model_dump(exclude={"kind"})
    symbols = {"k": "k", "delta": "δ", "lam": "λ"}
    words += [f"{symbols[name]} {value:g}" for name, value in fields.items()]
    if fields and strategy.residual != "aggregate":
        words.append(f"{strategy.residual} residual")
    return ", ".join(words)


def phase_ms(cell: Cell) -> dict[str, Reading]:
    """Return milliseconds an image in each phase.

    Text, prefill and pixels are medians of the samples. The decoding time of the samples is split as
    the timed step splits, and the host's part holds what no phase claims.
    """

    def per_image(values: Sequence[float]) -> float:
        return 1e3 * plain.median(v / s.images for v, s in zip(values, cell.samples, strict=True))

    def outer(values: Sequence[Reading]) -> Reading:
        found = readings(values)
        return found if isinstance(found, str) else per_image(found)

    found: dict[str, Reading] = {
        "text": outer([s.text for s in cell.samples]),
        "prefill": per_image([s.prefill for s in cell.samples]),
        "pixels": outer([s.pixels for s in cell.samples]),
    }
    if isinstance(cell.step_ms, str):
        found |= dict.fromkeys((*STEP_PHASES, "host"), cell.step_ms)
    else:
        decode = per_image([s.decode for s in cell.samples])
        steps = plain.median(s.steps / s.images for s in cell.samples)
        split = dict(cell.step_ms)
        # The eager decoding's remainder holds its prefill.
        prefill = 1e3 * plain.median(s.prefill for s in cell.samples)
        split["host"] = max(split.get("host", 0.0) - prefill / max(steps, 1), 0.0)
        whole = sum(split.values()) or 1.0
        found |= {name: decode * value / whole for name, value in split.items()}
        totals = readings([s.total for s in cell.samples])
        if not isinstance(totals, str):
            claimed = sum(v for v in found.values() if is_measured(v))
            host = found["host"]
            if is_measured(host):
                found["host"] = host + max(per_image(totals) - claimed, 0.0)
    return {name: found[name] for name in PHASES}


def readings(values: Sequence[Reading]) -> list[float] | NotMeasured:
    """Return all numbers, or the first reason why there are not all."""
    numbers = [value for value in values if is_measured(value)]
    if len(numbers) == len(values):
        return numbers
    return next(str(value) for value in values if not is_measured(value))


def _median(values: Sequence[Reading]) -> Reading:
    found = readings(values)
    return found if isinstance(found, str) else plain.median(found)


def _baseline(run: Run, cell: Cell) -> Cell | None:
    for other in run.cells:
        same = (other.batch, other.temperature) == (cell.batch, cell.temperature)
        if same and other.strategy.name == "vanilla" and other.samples:
            return other
    return None


def _energy(cell: Cell, run: Run) -> Reading:
    """Return joules an image, over all samples."""
    used: list[Sample] = [s for s in cell.samples if s.energy_mj is not None]
    total = sum(s.energy_mj or 0.0 for s in used)
    if not used or not total:
        backend = run.environment.device.backend
        return not_measured(f"backend {backend!r} reads no energy meter")
    return total / 1e3 / sum(s.images for s in used)


def _fractions(run: Run, cell: Cell) -> dict[str, Reading]:
    """Return the shares of the run's own ceilings that decoding reached, and tokens a GB/s."""
    names = ("bandwidth_fraction", "matmul_fraction", "tokens_per_s_per_gb_s")
    if isinstance(run.ceilings, str):
        return dict.fromkeys(names, run.ceilings)
    copy = run.ceilings.copy_bytes_per_s
    flops = run.ceilings.matmul_flops.get(run.settings.dtype, not_measured("no such ceiling"))
    rate = plain.median(rates(cell))
    found: dict[str, Reading] = {
        "tokens_per_s_per_gb_s": rate / (copy / 1e9) if is_measured(copy) else copy
    }
    if isinstance(cell.work, str):
        return found | dict.fromkeys(names[:2], cell.work)
    achieved = achieved_rates(cell)
    assert achieved is not None
    found["bandwidth_fraction"] = achieved[1] / copy if is_measured(copy) else copy
    found["matmul_fraction"] = achieved[0] / flops if is_measured(flops) else flops
    return found


def achieved_rates(cell: Cell) -> tuple[float, float] | None:
    """Return the FLOP and the bytes a second that decoding reached by the model's needs."""
    if isinstance(cell.work, str) or not cell.samples:
        return None
    step = [work for name, work in cell.work.items() if name != "prefill"]
    # A step serves all images of a batch at once.
    steps = plain.median(s.steps / s.images / s.decode for s in cell.samples)
    return steps * sum(w.flops for w in step), steps * sum(w.bytes for w in step)
