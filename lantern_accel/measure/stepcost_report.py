"""The schema of a step-cost measurement, and its table."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lantern_accel.errors import RequestError
from lantern_accel.measure.interleave import relative_spread
from lantern_accel.measure.rates import Rates


class Acceptance(BaseModel):
    """Tokens that a step of the strategy brings, and where the number comes from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens_per_step: float = Field(ge=1)
    source: str


class Cost(BaseModel):
    """One kind of step: its samples, vanilla's taken alternately with them, and its floor."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["vanilla", "verify", "step"]
    label: str
    batch: int
    nodes: int
    ms: list[float] = Field(default_factory=list)
    vanilla_ms: list[float] = Field(default_factory=list)
    floor_bytes: int = 0
    floor_flops: int = 0
    operators: int = 0
    captured: bool = False
    capture_seconds: float = 0.0
    capture_bytes: int = 0
    phase_ms: dict[str, float] | None = None

    @property
    def key(self) -> tuple[str, str, int]:
        return self.kind, self.label, self.batch

    @property
    def median(self) -> float:
        return statistics.median(self.ms)

    @property
    def over_vanilla(self) -> float:
        """Median of the ratios to the vanilla step timed beside each sample."""
        return statistics.median(a / b for a, b in zip(self.ms, self.vanilla_ms, strict=True))


class StepCost(BaseModel):
    """A whole measurement; ``settings`` must agree for one to be continued."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = 1
    settings: dict[str, Any]
    environment: dict[str, Any]
    rates: Rates | None = None
    acceptance: Acceptance | None = None
    costs: list[Cost] = Field(default_factory=list)

    def rows(self) -> list[dict[str, Any]]:
        """Return a plain record a kind of step, as the table prints it."""
        rows = []
        for cost in self.costs:
            if not cost.ms or self.rates is None:
                continue
            memory = 1e3 * cost.floor_bytes / self.rates.bandwidth
            products = 1e3 * cost.floor_flops / self.rates.matmul_flops.median
            floor = max(memory, products)
            speedup = None
            if cost.kind == "step" and self.acceptance is not None:
                speedup = self.acceptance.tokens_per_step / cost.over_vanilla
            rows.append(
                {
                    "step": cost.label,
                    "batch": cost.batch,
                    "nodes": cost.nodes,
                    "ms": cost.median,
                    "spread": relative_spread(cost.ms),
                    "over_vanilla": cost.over_vanilla,
                    "conversion": 1 / cost.over_vanilla if cost.kind == "step" else None,
                    "speedup": speedup,
                    "floor_ms": floor,
                    "bound": "products" if products > memory else "memory",
                    "of_floor": floor / cost.median,
                    "operators": cost.operators,
                    "captured": cost.captured,
                    "phase_ms": cost.phase_ms,
                }
            )
        return rows

    def table(self) -> str:
        """Return the measurement as Markdown."""
        lines = []
        if self.rates is not None:
            r = self.rates
            lines.append(
                f"copy {r.copy_bytes.median / 1e9:.1f} GB/s, read {r.read_bytes.median / 1e9:.1f} GB/s, "
                f"products {r.matmul_flops.median / 1e12:.2f} TFLOP/s "
                f"({self.settings['dtype']}, {r.matmul_side} x {r.matmul_side})"
            )
        if self.acceptance is not None:
            a = self.acceptance
            lines.append(f"tokens a step: {a.tokens_per_step:g} ({a.source})")
        lines += [
            "",
            "| step | batch | nodes | ms | ± | over vanilla | floor ms | of the floor | operators "
            "| conversion | speed-up |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for row in self.rows():
            blank = {key: "" if row[key] is None else f"{row[key]:.2f}" for key in OPTIONAL}
            lines.append(
                f"| {row['step']} | {row['batch']} | {row['nodes']} | {row['ms']:.3f} "
                f"| {100 * row['spread']:.0f} % | {row['over_vanilla']:.2f} | {row['floor_ms']:.3f} "
                f"| {100 * row['of_floor']:.0f} % | {row['operators']} | {blank['conversion']} "
                f"| {blank['speedup']} |"
            )
        for cost in self.costs:
            if cost.phase_ms:
                parts = ", ".join(f"{name} {ms:.3f}" for name, ms in cost.phase_ms.items())
                lines.append(f"\n{cost.label}, batch {cost.batch}, ms by phase: {parts}")
        return "\n".join(lines)


OPTIONAL = ("conversion", "speedup")


def read_acceptance(path: Path, strategy: str) -> Acceptance:
    """Take a strategy's tokens a step from a benchmark's JSON; raises :class:`RequestError`."""
    from lantern_accel.measure.bench import BenchReport

    try:
        report = BenchReport.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError, ValueError):
        raise RequestError(
            f"{path} is not a benchmark of this version; run `bench -o` anew"
        ) from None
    found = [c for c in report.cells if c.strategy.name == strategy and c.samples]
    if not found:
        raise RequestError(f"{path} has no samples of {strategy}; measure it with `bench`")
    cell = min(found, key=lambda c: (c.batch, abs(c.temperature - 1)))
    model = report.settings.get("model", "an unnamed model")
    return Acceptance(
        tokens_per_step=cell.step_compression,
        source=f"{model}, batch {cell.batch}, temperature {cell.temperature:g}, from {path.name}",
    )
