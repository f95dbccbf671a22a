"""Sampling settings: guidance, temperature and filters, as values that are checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from lantern_accel.bounds import MOST_CODES, MOST_SCALE, MOST_TEMPERATURE
from lantern_accel.errors import RequestError
from lantern_accel.records import Frozen

Scale = Annotated[float, Field(ge=0, le=MOST_SCALE, allow_inf_nan=False)]


def named_once(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which diffusers' name for guidance is ours; raises RequestError for both."""
    values = dict(given)
    if (scale := values.pop("guidance_scale", None)) is not None:
        if values.get("cfg_scale") is not None:
            text = "guidance_scale and cfg_scale are one setting; leave one out"
            raise RequestError(text, field="guidance_scale")
        values["cfg_scale"] = scale
    return values


class Sampling(Frozen):
    """How logits become a distribution: guidance, temperature, then the two filters.

    ``temperature=0`` is greedy. LlamaGen filters by top-k before top-p; LANTERN's code the other way
    round (``order="top_p_first"``), which differs only where both are set. A ``Scale`` is a finite
    number, at least 0. ``guidance_scale`` is ``cfg_scale`` under diffusers' name.
    """

    temperature: float = Field(1.0, ge=0, le=MOST_TEMPERATURE, allow_inf_nan=False)
    top_k: int = Field(0, ge=0, le=MOST_CODES, description="0: all codes")
    top_p: float = Field(1.0, gt=0, le=1)
    cfg_scale: Scale = Field(1.0, description="u + s (c - u); 1 or less: no guidance")
    cfg_scale_image: Scale | None = Field(
        None,
        description="three-way guidance, u + s_image (i - u) + s (c - i), with i the prompt's images",
    )
    cfg_interval: int = Field(
        -1,
        ge=-1,
        le=MOST_CODES,
        description="guide only up to this decode index (0 is the second token); -1: all",
    )
    order: Literal["top_k_first", "top_p_first"] = "top_k_first"

    @model_validator(mode="before")
    @classmethod
    def _named_once(cls, given: object) -> object:
        return named_once(given) if isinstance(given, Mapping) else given

    @field_validator("temperature")
    @classmethod
    def _does_not_overflow(cls, value: float) -> float:
        if 0 < value < 1e-3:
            raise ValueError(f"{value} is too close to 0 for float32; 0 is greedy")
        return value

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def guided(self) -> bool:
        return self.cfg_scale > 1

    @property
    def branches(self) -> int:
        """Rows an image: 1, with guidance 2, with three-way guidance 3."""
        return (2 if self.cfg_scale_image is None else 3) if self.guided else 1

    @property
    def bucket(self) -> tuple[object, ...]:
        """What fixes the shape of a step; temperature, top-p and guidance are data."""
        return (self.greedy, self.branches, self.top_k, self.top_p < 1, self.order)
