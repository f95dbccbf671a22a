"""The schema of a suite: the protocol, one row per strategy, and what was left out, with reasons."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from lantern_accel.evaluation.suite.protocol import Protocol
from lantern_accel.quality.interval import Interval
from lantern_accel.records import Record
from lantern_accel.strategy.values import Strategy

NOT_MEASURED = "not measured: "
#: A figure with its interval, or why there is none.
Reading = Interval | str


def not_measured(reason: str) -> str:
    """Return the reading of a figure that was not measured."""
    return f"{NOT_MEASURED}{reason}"


class Metric(Record):
    """One column: what is measured, with what, and which way is better."""

    key: str
    title: str
    better: Literal["lower", "higher"]
    network: str = Field(description="what sees the pictures")
    preprocessing: str = ""
    note: str = ""


class Speed(Record):
    """How fast a strategy was while it drew the suite's pictures, next to what that costs."""

    seconds_per_image: Reading = Field(description="prefill and decoding, without text and pixels")
    speedup: Reading = Field(
        description="vanilla's seconds over these, chunk by chunk; vanilla with the model's own "
        "weights where they are in the folder"
    )
    tokens_per_step: Reading = Field(description="tokens per target forward: mean accepted length")
    total_variation: Reading = Field(
        description="relaxed mass per token, the bound of a step, and what rounded weights cost"
    )


class Row(Record):
    """One strategy. ``details``: what generation says of the run (device, dtype, weights, ...)."""

    label: str
    strategy: Strategy | None = Field(description="None: the pictures were drawn elsewhere")
    images: int
    speed: Speed
    metrics: dict[str, Reading]
    details: dict[str, Any] = Field(default_factory=dict)


class PublishedRow(Record):
    """A row that somebody else published; never comparable unless protocol and model agree."""

    method: str
    model: str
    source: str
    exact: bool
    drafter: bool
    hardware: str | None = None
    speedup: float | None = None
    tokens_per_step: float | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    note: str = ""


class Suite(Record):
    """One suite on one model: what was asked, the columns, the rows, and published ones next to them."""

    name: Literal["coco", "imagenet", "prompts"]
    protocol: Protocol
    count: int = Field(ge=2, description="pictures per strategy")
    seed: int
    sampling: dict[str, Any]
    chunk: int = Field(ge=1, description="pictures of one request: what a stop can lose")
    batch: int = Field(ge=1, description="pictures decoded together")
    per_prompt: int = 1
    prompts_source: str
    prompts_sha256: str
    reference: dict[str, Any] = Field(
        default_factory=dict, description="the real images: how many, and what was left out"
    )
    resamples: int = Field(ge=2, description="of FID's bootstrap")
    prompts_cut: int = Field(0, description="prompts that were longer than the model's prefix")
    columns: list[Metric] = Field(default_factory=list)
    rows: list[Row] = Field(default_factory=list)
    published: list[PublishedRow] = Field(default_factory=list)

    def same_question(self, other: Suite) -> list[str]:
        """Return the settings in which two suites differ."""
        results = {"columns", "rows", "published", "reference", "prompts_cut"}
        names = [name for name in type(self).model_fields if name not in results]
        return [name for name in names if getattr(self, name) != getattr(other, name)]
