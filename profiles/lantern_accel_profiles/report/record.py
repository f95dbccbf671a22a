"""A comparison as data: runs, offers, answers, rows, and what is missing.

The JSON of ``lantern-accel compare`` is a :class:`Comparison`; the page and the Markdown print it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lantern_accel.device.conformance import Report as ConformanceReport
from lantern_accel.records import Record
from lantern_accel_profiles.measure.record import (
    PROTOCOL,
    Ceilings,
    ClockCheck,
    Environment,
    Interval,
    NotMeasured,
    RunSession,
    RunSettings,
    Strip,
)
from lantern_accel_profiles.quality.interval import Verdict
from lantern_accel_profiles.report.offers import Offer
from lantern_accel_profiles.report.points import Point, Terms
from lantern_accel_profiles.report.rows import Row

COMPARISON: Literal["lantern_accel.comparison"] = "lantern_accel.comparison"


class Answer(Record):
    """What one run says of drafting, at one batch size and temperature."""

    run: str
    batch: int
    temperature: float
    helps: Literal["yes", "only relaxed", "not shown", "no", "unknown"]
    best: str | None = Field(description="the strategy that the answer is about")


class EqualQuality(Record):
    """What drafting gives one device where no more than a budget of total variation is moved."""

    run: str
    budget: float
    batch: int
    strategy: str = Field(description="the fastest that keeps the budget; vanilla: none is faster")
    speedup: Interval | NotMeasured = Field(description="of whole requests, over plain decoding")
    verdict: Verdict | NotMeasured


class RunSummary(Record):
    """What the report says about a run as a whole."""

    name: str
    recorded_as: str = Field(description="its name in its file")
    device: str
    state: str
    command: str
    settings: RunSettings
    environment: Environment
    clock: ClockCheck | NotMeasured
    ceilings: Ceilings | NotMeasured
    sessions: list[RunSession]


class ModelSection(Record):
    """Everything about one model."""

    model: str
    weights_hash: str
    tokens: int
    offers: list[Offer] = Field(description="what a buyer gets on the terms, the best device first")
    points: list[Point] = Field(description="images per second over seconds, of all batch sizes")
    answers: list[Answer] = Field(description="whether drafting is faster")
    differences: dict[str, list[str]] = Field(
        description="what differs besides the devices, in the order of the answers"
    )
    equal_quality: list[EqualQuality]
    rows: list[Row]
    contact_sheet: dict[str, list[Strip]] = Field(description="by run")

    @property
    def runs(self) -> list[str]:
        """Names of runs that have points, the best offer's first, as plots colour them."""
        return list(dict.fromkeys([*(o.run for o in self.offers), *(p.run for p in self.points)]))

    @property
    def many_temperatures(self) -> bool:
        """Whether rows differ in temperature, so that each has to name its own."""
        return len({row.temperature for row in self.rows}) > 1


class Gap(Record):
    """Figures that were not measured, why, and the command that measures them (empty: none can yet)."""

    where: str
    what: list[str]
    reason: str
    command: str
    device: bool = Field(False, description="a device without a run: every figure is missing")


class Comparison(Record):
    """The whole report as data."""

    kind: Literal["lantern_accel.comparison"] = COMPARISON
    schema_version: Literal[2] = 2
    protocol_version: int = PROTOCOL
    created: str
    lantern_accel: str
    runs: list[RunSummary]
    terms: Terms = Field(description="what a buyer asked for")
    models: list[ModelSection]
    conformance: list[ConformanceReport]
    gaps: list[Gap]
