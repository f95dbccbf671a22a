"""What a model folder says about its model: sizes of every part, and what a request gets by default."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lantern_accel.decoding.trees import EAGLE2_TREE, NAIVE_EXTEND_57
from lantern_accel.families.llamagen.drafter import DrafterConfig
from lantern_accel.families.llamagen.model import LlamaGenConfig
from lantern_accel.families.llamagen.text import TextEncoderConfig
from lantern_accel.families.llamagen.vq import VQConfig
from lantern_accel.strategy.values import (
    DynamicTree,
    Lantern,
    LanternPP,
    NeighbourSpace,
    Sampling,
    StaticTree,
)

FORMAT: Literal[1] = 1


class ModelDefaults(BaseModel):
    """What a request gets that does not say otherwise."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sampling: Sampling = Sampling()
    static_tree: StaticTree = NAIVE_EXTEND_57
    dynamic_tree: DynamicTree = EAGLE2_TREE
    lantern: Lantern = Lantern()
    lantern_pp: LanternPP = LanternPP()
    style: str | None = Field(
        None,
        description="what a prompt without a style word asks for, where training settled on one",
    )

    def within(self, vocab: int) -> ModelDefaults:
        """Return these defaults with every k brought below a codebook of ``vocab`` codes."""
        sampling = self.sampling
        if sampling.top_k > vocab:
            sampling = sampling.model_copy(update={"top_k": 0})
        most = max(vocab - 2, 1)
        return self.model_copy(
            update={
                "sampling": sampling,
                "lantern": self.lantern.model_copy(update={"k": min(self.lantern.k, most)}),
                "lantern_pp": self.lantern_pp.model_copy(
                    update={"k": min(self.lantern_pp.k, most)}
                ),
            }
        )


class Manifest(BaseModel):
    """What every family's ``model.json`` has; a family adds the configurations of its parts.

    Decoding reads of ``target``: ``num_tokens``, ``vocab_size``, ``prefix_length``, ``dim``,
    ``n_layer``, ``n_head`` and ``head_dim``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = FORMAT
    name: str
    family: str
    summary: str = ""
    licence: str = ""
    target: Any
    drafter: Any = None
    vq: Any
    neighbour_space: NeighbourSpace = Field(
        "decoder", description="measure neighbours where the decoder looks codes up, or on raw rows"
    )
    defaults: ModelDefaults = ModelDefaults()


class ModelManifest(Manifest):
    """``model.json`` of LlamaGen's family."""

    family: Literal["llamagen"] = "llamagen"
    target: LlamaGenConfig
    drafter: DrafterConfig | None = None
    text: TextEncoderConfig | None = None
    vq: VQConfig

    @model_validator(mode="after")
    def _parts_fit(self) -> ModelManifest:
        t = self.target
        if self.vq.codebook_size != t.vocab_size:
            raise ValueError(
                f"the codebook has {self.vq.codebook_size} codes, the target {t.vocab_size}"
            )
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
