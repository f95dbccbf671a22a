"""The price of weights in fewer bits, as every result of theirs says it."""

from __future__ import annotations

from pydantic import Field

from lantern_accel.records import Frozen
from lantern_accel.strategy.values import Sampling


class RoundingPrice(Frozen):
    """What rounded weights cost per token, and along which images that was measured."""

    weights: str = Field(description="int8, int6 or int4")
    bits_per_weight: float
    by_image: tuple[float, ...] = Field(
        min_length=1, description="total variation per token of each image, from the full weights"
    )
    tokens: int = Field(ge=1, description="tokens per image")
    sampling: Sampling = Field(description="what both models were sampled with")

    @property
    def total_variation(self) -> float:
        """The mean over images."""
        return sum(self.by_image) / len(self.by_image)

    def text(self) -> str:
        """Say it in a line."""
        return (
            f"{self.weights} weights: total variation {self.total_variation:.4f} per token from the full "
            f"ones ({min(self.by_image):.4f} to {max(self.by_image):.4f} by image, {len(self.by_image)} "
            "images at the model's own sampling)"
        )
