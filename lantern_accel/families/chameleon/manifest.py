"""The manifest of a Chameleon model: which of the two ways to prompt and to write an image."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from lantern_accel.errors import RequestError
from lantern_accel.families.chameleon.drafter import ChameleonDrafterConfig
from lantern_accel.families.chameleon.model import ChameleonConfig
from lantern_accel.families.chameleon.text import ChameleonIds
from lantern_accel.families.manifest import TokenManifest
from lantern_accel.nn.vq import VQConfig
from lantern_accel.strategy.choose import ModelDefaults
from lantern_accel.strategy.trees import MC_SIM_7B_63, NAIVE_EXTEND_57
from lantern_accel.strategy.values import Sampling

Variant = Literal["anole", "lumina"]
#: No side of Lumina's training images was longer than this many times the other.
MAX_RATIO = 4.0


class ChameleonManifest(TokenManifest):
    """``model.json`` of Chameleon's family: Anole and Lumina-mGPT.

    ``side``: codes along the side of the square image that the model was trained for.
    """

    #: Codes along a unit of the grid, which size tokens count.
    unit: ClassVar[int] = 2
    family: str = "chameleon"
    variant: Variant = "anole"
    side: int = Field(32, ge=2)
    ids: ChameleonIds = ChameleonIds()
    target: ChameleonConfig
    drafter: ChameleonDrafterConfig | None = None
    vq: VQConfig

    @model_validator(mode="after")
    def _parts_fit(self) -> ChameleonManifest:
        if (self.variant == "lumina") != (self.target.newline_id is not None):
            raise ValueError("Lumina's rows end in a newline token, Anole's do not")
        return self

    def grid(self, size: tuple[int, int] | None) -> tuple[int, int]:
        """Return rows and columns of codes of an image ``(width, height)`` in pixels; None: the default.

        Raises :class:`RequestError` for a size that the model was not trained for.
        """
        if size is None or self.variant == "anole":
            return super().grid(size)
        width, height = size
        patch, most = self.unit * self.token_pixels, (self.side // self.unit) ** 2
        wide, high = width // patch, height // patch
        fits = (
            (wide * patch, high * patch) == size
            and 1 <= wide * high <= most
            and max(wide, high) <= MAX_RATIO * min(wide, high)
        )
        if not fits:
            whole = self.side * self.token_pixels
            raise RequestError(
                f"the model {self.name!r} cannot make {width}x{height} pixels: sides are multiples of "
                f"{patch}, one at most {MAX_RATIO:g} times the other, with no more pixels than "
                f"{whole}x{whole}; {nearest_size(width, height, patch, most)} would do",
                field="size",
            )
        return self.unit * high, self.unit * wide

    def start(self, rows: int = 0, columns: int = 0) -> list[int]:
        """Return what starts an image: its mark, and a Lumina's tokens of its height and width.

        All that a Lumina's row without a prompt sees.
        """
        sizes = [self.ids.grid + side // self.unit for side in (rows, columns)]
        return (
            [self.ids.image_start, *sizes] if self.variant == "lumina" else [self.ids.image_start]
        )


def nearest_size(width: int, height: int, patch: int, most: int) -> str:
    """Return the allowed size with the nearest shape that has the most pixels, as ``WxH``."""
    ratio = max(width, 1) / max(height, 1)
    best = min(
        (
            (w, most // w)
            for w in range(1, most + 1)
            if max(w, most // w) <= MAX_RATIO * min(w, most // w)
        ),
        key=lambda s: abs(s[0] / s[1] - ratio),
    )
    return f"{best[0] * patch}x{best[1] * patch}"


#: LANTERN's command line for Anole; Lumina-mGPT's README. Both filter by top-k 2000 of the codes.
DEFAULTS: dict[Variant, ModelDefaults] = {
    "anole": ModelDefaults(
        sampling=Sampling(cfg_scale=3.0, top_k=2000), static_tree=NAIVE_EXTEND_57
    ),
    "lumina": ModelDefaults(sampling=Sampling(cfg_scale=4.0, top_k=2000), static_tree=MC_SIM_7B_63),
}
