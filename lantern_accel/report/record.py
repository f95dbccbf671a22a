"""A comparison as data: runs, answers, rows, rankings, and what is missing.

The JSON of ``lantern-accel compare`` is a :class:`Comparison`; the page and the Markdown print it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lantern_accel.device.conformance import Report as ConformanceReport
from lantern_accel.measure.record import (
    PROTOCOL,
    Ceilings,
    ClockCheck,
    Environment,
    Interval,
    NotMeasured,
    RunSettings,
    Session,
    Strip,
)
from lantern_accel.quality.interval import Verdict
from lantern_accel.records import Record
from lantern_accel.report.offers import Offer, Terms
from lantern_accel.report.rows import Row

COMPARISON: Literal["lantern_accel.comparison"] = "lantern_accel.comparison"


class Answer(Record):
    """What one run says of drafting, at one batch size and temperature."""

    run: str
    batch: int
    temperature: float
    pays: Literal["yes", "for a price", "not shown", "no", "unknown"]
    best: str | None = Field(description="the strategy that the answer is about")
    priced: str | None = Field(
        None, description="a relaxed strategy that is faster still, which has a price"
    )
    confidence: Literal["low", "medium", "high"]
    because: list[str]
    untested: list[str]
    unpublishable: list[str] = Field(description="why it is not for publication; empty: it is")


class Standing(Record):
    """One device against the slowest: images per second, each with its fastest exact strategy."""

    run: str
    strategy: str
    against: str
    against_strategy: str
    batch: int
    ratio: Interval
    verdict: Verdict | NotMeasured


class Answers(Record):
    """The first screen of one model, as data."""

    answers: list[Answer]
    standings: list[Standing] = Field(description="fastest first; empty for a single run")
    differences: dict[str, list[str]] = Field(
        description="what differs besides the devices, in the order of the answers"
    )


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
    sessions: list[Session]


class Place(Record):
    """One row of a ranking; rows of the same rank have overlapping intervals."""

    rank: int
    run: str
    strategy: str
    images_per_second: Interval


class Ranking(Record):
    """Measured rows of one batch size and temperature, fastest first."""

    batch: int
    temperature: float
    relaxed: bool
    places: list[Place]


class ModelSection(Record):
    """Everything about one model."""

    model: str
    weights_hash: str
    tokens: int
    first: Answers = Field(description="what the first screen says")
    offers: list[Offer] = Field(description="what a buyer gets on the terms")
    rows: list[Row]
    rankings: list[Ranking]
    contact_sheet: dict[str, list[Strip]] = Field(description="by run")


class Gap(Record):
    """Something that was not measured, why, and what fills it (empty: the backend must learn it)."""

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
