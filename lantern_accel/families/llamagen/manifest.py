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
        d = self.drafter
        if d is not None and (d.dim, d.vocab_size, d.grid, d.prefix_length) != (
            t.dim,
            t.vocab_size,
            t.grid,
            t.prefix_length - 1,
        ):
            raise ValueError(
                f"the drafter (dim {d.dim}, {d.vocab_size} codes, grid {d.grid}, prefix "
                f"{d.prefix_length}) is not of this target (dim {t.dim}, {t.vocab_size} codes, grid "
                f"{t.grid}, prefix {t.prefix_length - 1} for its drafter)"
            )
        if d is not None and max(d.taps, default=0) > t.n_layer:
            raise ValueError(
                f"the drafter reads the states after block {max(d.taps)}, the target has {t.n_layer}"
            )
        return self

    @property
    def image_size(self) -> int:
        """Side of an image in pixels."""
        return self.target.grid * self.vq.downsample
