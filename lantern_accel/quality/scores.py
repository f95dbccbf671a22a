"""Scores of real images as values."""

from __future__ import annotations

from pydantic import Field

from lantern_accel.records import Record


class Likelihood(Record):
    """Mean negative log-likelihood of real images, nats per token, without guidance."""

    images: str = Field(description="which images")
    count: int
    nll: float
    perplexity: float


class Ambiguity(Record):
    """How flat next-token distributions are, teacher-forced, at temperature 1 without filters."""

    of: str = Field(description="which tokens")
    source: str = Field(description="where the figures come from")
    cfg: float | None = None
    positions: int
    vocabulary: int
    top1_mean: float
    top1_median: float
    top1_below_tenth: float = Field(description="share of positions whose likeliest token is < 0.1")
    top10_mass: float
    entropy: float = Field(description="nats; ln(vocabulary) is uniform")
