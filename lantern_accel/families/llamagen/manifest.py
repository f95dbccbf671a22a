"""The manifest of a LlamaGen model, whose parts must fit each other."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from lantern_accel.families.llamagen.drafter import DrafterConfig
from lantern_accel.families.llamagen.model import LlamaGenConfig
from lantern_accel.families.llamagen.text import TextEncoderConfig
from lantern_accel.families.manifest import Manifest, check_codes
from lantern_accel.nn.vq import VQConfig


class LlamaGenManifest(Manifest):
    """``model.json`` of LlamaGen's family."""

    family: Literal["llamagen"] = "llamagen"
    target: LlamaGenConfig
    drafter: DrafterConfig | None = None
    text: TextEncoderConfig | None = None
    vq: VQConfig

    @model_validator(mode="after")
    def _parts_fit(self) -> LlamaGenManifest:
        t = self.target
        check_codes(self.vq.codebook_size, t.vocab_size)
        if self.text is not None and (self.text.dim, self.text.prefix_length) != (
            t.caption_dim,
            t.prefix_length,
        ):
            raise ValueError(
                f"the text encoder gives {self.text.prefix_length} x {self.text.dim} features, the "
                f"target takes {t.prefix_length} x {t.caption_dim}"
            )
        return self

    @property
    def conditioning(self) -> Literal["class", "text"]:
        return self.target.conditioning

    @property
    def image_size(self) -> int:
        """Side of an image in pixels."""
        return self.target.grid * self.vq.downsample
