"""The schema of what ``lantern-accel evaluate`` writes: parts, suites, settings and the environment."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from lantern_accel.records import Record
from lantern_accel.strategy.values import Strategy
from lantern_accel_profiles.evaluation.suite.protocol import Protocol, PublishedRow
from lantern_accel_profiles.quality.interval import LOSS, Interval
from lantern_accel_profiles.quality.scoring import Ambiguity, Likelihood


class EvaluationSettings(Record):
    """How much is measured, and from which seed; the same settings give the same figures."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: int = 0
    images: int = Field(64, ge=2, description="held-out images that are scored and damaged")
    positions: int = Field(4000, ge=10, description="token positions whose distribution is read")
    cfg: tuple[float, ...] = Field((1.0, 3.0, 7.5), description="guidance scales of ambiguity")
    interchange_k: tuple[int, ...] = (1, 10, 100)
    frontier_prompts: int = Field(8, ge=1, description="images per point of the frontier")
    lantern_k: tuple[int, ...] = (10, 100)
    delta: tuple[float, ...] = (0.1, 0.2, 0.4, 0.6)
    lantern_pp_k: tuple[int, ...] = (10, 100)
    lam: tuple[float, ...] = (2.0, 4.0, 8.0, 16.0)
    budget_k: tuple[int, ...] = (100,)
    tv_budget: tuple[float, ...] = (0.005, 0.01, 0.02, 0.05)
    distance_images: int = Field(40, ge=2, description="images per strategy in the distances")

    @classmethod
    def quick(cls, seed: int = 0) -> EvaluationSettings:
        """Return settings that finish in a minute or two: for a look, not for figures to quote."""
        return cls(
            seed=seed,
            images=16,
            positions=600,
            cfg=(1.0, 3.0),
            interchange_k=(1, 10),
            frontier_prompts=4,
            lantern_k=(10,),
            delta=(0.1, 0.4),
            lantern_pp_k=(10,),
            lam=(2.0, 4.0),
            budget_k=(10,),
            tv_budget=(0.02,),
            distance_images=4,
        )


class Interchange(Record):
    """Damage when every code of an image is replaced, against the image's own reconstruction."""

    replaced_by: str
    k: int | None = Field(description="replaced by one of the k nearest codes; None: by any code")
    psnr: float = Field(description="dB, mean over images, to the undamaged reconstruction")
    psnr_to_image: float = Field(description="dB, mean over images, to the image itself")
    feature_distance: float | None


class FrontierPoint(Record):
    """What one setting of relaxation gains and costs, sampling at the model's defaults."""

    strategy: Strategy
    step_compression: Interval = Field(
        description="tokens per target forward: the mean accepted length"
    )
    total_variation_per_token: Interval = Field(
        validation_alias=LOSS,
        description="distance between a token's distribution and the target's, mean over tokens",
    )
    steps: list[int] = Field(description="target forwards of each image, in the order of prompts")
    images: int


class StrategyDistance(Record):
    """How far a strategy's images are from exact decoding's.

    ``kid``: squared maximum mean discrepancy of network features between the sets, times 1000
    (unbiased, may be below 0), next to exact decoding under another seed; ``p_value`` that of a
    sign-flip permutation test of "both are alike", ``detectable`` the distance that this many images
    would find in four of five cases. ``greedy_*``: image by image at temperature 0, where exact
    decoding gives one fixed image per prompt.
    """

    strategy: Strategy
    images: int
    kid: Interval | None
    p_value: float | None
    detectable: float | None
    greedy_psnr: float | None
    greedy_feature_distance: float | None
    greedy_same_tokens: Interval | None


# --- suites: one row per strategy, and what was left out, with reasons ---------------------------

#: A figure with its interval, or why there is none.
Reading = Interval | str


class Metric(Record):
    """One column: what is measured, with what, and which way is better."""

    key: str
    title: str
    better: Literal["lower", "higher"]
    network: str = Field(description="what sees the images")
    preprocessing: str = ""
    note: str = ""


class Speed(Record):
    """How fast a strategy was while it generated the suite's images, next to what that costs."""

    seconds_per_image: Reading = Field(description="prefill and decoding, without text and pixels")
    speedup: Reading = Field(
        description="vanilla's seconds over these, chunk by chunk; vanilla with the model's own "
        "weights where they are in the folder"
    )
    tokens_per_step: Reading = Field(description="tokens per target forward: mean accepted length")
    total_variation_per_token: Reading = Field(
        validation_alias=LOSS,
        description="relaxed mass per token, the bound of a step, and what quantized weights add",
    )


class Scored(Record):
    """One strategy. ``details``: what generation says of the run (device, dtype, weights, ...)."""

    label: str
    strategy: Strategy | None = Field(description="None: the images were generated elsewhere")
    images: int
    speed: Speed
    metrics: dict[str, Reading]
    details: dict[str, object] = Field(default_factory=dict)


class Suite(Record):
    """One suite on one model: what was asked, the columns, the rows, and published ones next to them."""

    name: Literal["coco", "imagenet", "prompts"]
    protocol: Protocol
    count: int = Field(ge=2, description="images per strategy")
    seed: int
    sampling: dict[str, object]
    chunk: int = Field(ge=1, description="images of one request: what a stop can lose")
    batch: int = Field(ge=1, description="batch size")
    prompts_source: str
    prompts_sha256: str
    reference: dict[str, Any] = Field(
        default_factory=dict, description="the real images: how many, and what was left out"
    )
    resamples: int = Field(ge=2, description="of FID's bootstrap")
    prompts_cut: int = Field(0, description="prompts that were longer than the model's prefix")
    columns: list[Metric] = Field(default_factory=list)
    rows: list[Scored] = Field(default_factory=list)
    published: list[PublishedRow] = Field(default_factory=list)

    @property
    def question(self) -> dict[str, object]:
        """What was asked, without what was found."""
        results = {"columns", "rows", "published", "reference", "prompts_cut"}
        return self.model_dump(mode="json", exclude=results)


# --- the whole ------------------------------------------------------------------------------------


class Evaluation(Record):
    """One evaluation; a part that could not be measured is None and ``skipped`` says why."""

    schema_version: Literal[2] = 2
    model: str
    weights_hash: str
    settings: EvaluationSettings
    environment: dict[str, object]
    features: str | None = Field(None, description="the network behind the feature distances")
    skipped: dict[str, str] = Field(default_factory=dict)
    likelihood: list[Likelihood] | None = None
    ambiguity: list[Ambiguity] | None = None
    interchange: list[Interchange] | None = None
    frontier: list[FrontierPoint] | None = None
    distances: list[StrategyDistance] | None = None
    suite: Suite | None = None


PARTS = ("likelihood", "ambiguity", "interchange", "frontier", "distances")
