"""Lumina-mGPT 2.0: Chameleon's trunk, guided by a scale that falls along the image, and its manifest.

Source: Alpha-VLLM/Lumina-mGPT-2.0 f44a4d7 ``lumina_mgpt/inference_solver.py``.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from lantern_accel.errors import RequestError
from lantern_accel.families.chameleon.model import ChameleonConfig, ChameleonGPT, ChameleonManifest
from lantern_accel.families.lumina2.text import UNIT, Lumina2Ids
from lantern_accel.nn.movq import MoVQConfig
from lantern_accel.strategy.choose import ModelDefaults
from lantern_accel.strategy.trees import MC_SIM_7B_63
from lantern_accel.strategy.values import Sampling

#: What the official schedule counts before the first code: the tokens of the height and the width.
SIZE_TOKENS = 2
#: Codes of the patch that its divisor counts in, of an earlier tokenizer: 2 x 2.
PATCH = 4


class Lumina2Config(ChameleonConfig):
    """Sizes of a target; the defaults of a trunk are the released ones."""

    guidance_floor: float = Field(4.0, ge=1, description="what the scale of guidance falls to")


class Lumina2GPT(ChameleonGPT):
    """The target model."""

    config: Lumina2Config

    def guidance_scales(self, cfg_scale: float) -> list[float]:
        """Return the scale with which each token is guided: it falls from token to token to the floor.

        Token n takes the scale before it times ``1 - (n + 2) / (area / 4)``, area in codes. Raises
        :class:`RequestError` for a scale below the floor.
        """
        c, scale, scales = self.config, cfg_scale, []
        if cfg_scale < c.guidance_floor:
            raise RequestError(
                f"cfg_scale {cfg_scale:g} is below {c.guidance_floor:g}, to which this model's guidance "
                f"falls along an image; ask for {c.guidance_floor:g} or more, or for 1: no guidance",
                field="cfg_scale",
            )
        for token in range(c.num_tokens):
            left = 1 - (token + SIZE_TOKENS) / (c.height * c.width / PATCH)
            scale = max(c.guidance_floor, scale * left)
            scales.append(scale)
        return scales


#: The README's command line; below 4 the official code guides with 4.
DEFAULTS = ModelDefaults(sampling=Sampling(cfg_scale=4.0, top_k=4096), static_tree=MC_SIM_7B_63)


class Lumina2Manifest(ChameleonManifest):
    """``model.json`` of Lumina-mGPT 2.0's family; ``side`` bounds the area of its images."""

    unit: ClassVar[int] = UNIT
    family: Literal["lumina2"] = "lumina2"
    variant: Literal["lumina"] = "lumina"
    ids: Lumina2Ids = Lumina2Ids()
    target: Lumina2Config
    vq: MoVQConfig

    def grid(self, size: tuple[int, int] | None) -> tuple[int, int]:
        rows, columns = super().grid(size)
        most = len(self.ids.grids) - 1
        if max(rows, columns) > most * UNIT:
            raise RequestError(
                f"the model {self.name!r} has no size token for a side of {max(rows, columns) // UNIT} "
                f"units of {UNIT * self.token_pixels} pixels; ask for at most {most}",
                field="size",
            )
        return rows, columns

    def start(self, rows: int = 0, columns: int = 0) -> list[int]:
        grids = self.ids.grids
        return [self.ids.image_start, grids[rows // UNIT], grids[columns // UNIT]]
