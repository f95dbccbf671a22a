"""The manifest of a GLM-Image model: sizes, ids, and the strings around a picture's size."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lantern_accel.errors import RequestError
from lantern_accel.families.glm_image.grids import PIXELS, grid_of, grids
from lantern_accel.families.glm_image.model import CodebookConfig, GlmImageConfig
from lantern_accel.families.manifest import ModelDefaults
from lantern_accel.families.prompted_drafter import PromptedManifest
from lantern_accel.records import Frozen
from lantern_accel.strategy.values import Sampling

#: The released generation_config.json; its top-k is the head's width and filters nothing.
DEFAULTS = ModelDefaults(sampling=Sampling(temperature=0.9, top_p=0.75))
#: More tokens than this have no noise of their own.
MOST_TOKENS = 65535


class Marks(Frozen):
    """The tokenizer's strings around a picture's size and before the picture, and what pads prompts."""

    size_begin: str = "<sop>"
    size_end: str = "<eop>"
    image_start: str = "<|dit_token_16384|>"
    pad: int = Field(16385, ge=0)


class GlmImageManifest(PromptedManifest):
    """``model.json`` of GLM-Image's family."""

    family: Literal["glm_image"] = "glm_image"
    marks: Marks = Marks()
    target: GlmImageConfig
    vq: CodebookConfig

    @property
    def pad(self) -> int:
        """The id that pads prompts."""
        return self.marks.pad

    @property
    def token_pixels(self) -> int:
        """Pixels along the side of a token of the large grid."""
        return PIXELS

    def grid(self, size: tuple[int, int] | None) -> tuple[int, int]:
        """Return rows and columns of the large grid of a picture ``(width, height)`` in pixels.

        None: the default size. Raises :class:`RequestError` for a size that the model cannot draw.
        """
        if size is None:
            return super().grid(None)
        width, height = size
        rows, columns = grid_of(width, height, f"the model {self.name!r}")
        both = grids(rows, columns, self.target.small_tokens)
        most = min(self.target.max_positions, MOST_TOKENS)
        if min(both[0]) < 1 or sum(a * b for a, b in both) > most:
            raise RequestError(
                f"the model {self.name!r} cannot draw {width}x{height} pixels: "
                f"{'it is too narrow' if min(both[0]) < 1 else f'it has more than {most} tokens'}; "
                "choose a size such as 1024x1024"
            )
        return rows, columns
