"""Janus's half that generates: a Llama with an embedding and a head for image tokens, and its manifest.

Source: deepseek-ai/Janus 1daa72f (arXiv 2501.17811), ``janus/models/modeling_vlm.py``. What an
image token feeds the Llama, ``aligner(gen_embed[code])``, depends on the code alone, so it is
computed once for all codes. Positions are those of a line of text; every position sees all before
it, pads of the row without a prompt included.
"""

from __future__ import annotations

import itertools
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from lantern_accel.device.operations import TensorOps
from lantern_accel.families.janus.text import JanusIds, Variant
from lantern_accel.families.prompted_drafter import PromptedManifest
from lantern_accel.families.target import TrunkTarget
from lantern_accel.nn.sizes import LlamaSizes, SquareSizes
from lantern_accel.nn.transformer import REFERENCE, Decoder, Projection
from lantern_accel.nn.vq import VQConfig
from lantern_accel.strategy.choose import ModelDefaults
from lantern_accel.strategy.values import Sampling


class JanusConfig(LlamaSizes, SquareSizes):
    """Sizes of Janus's Llama, of its image embedding and of its image head."""

    dim: int = Field(2048, ge=4)
    n_layer: int = Field(24, ge=1)
    n_head: int = Field(16, ge=1)
    ffn_dim: int = Field(5632, ge=1)
    token_count: int = Field(102400, ge=2, description="the vocabulary of text tokens")
    vocab_size: int = Field(16384, ge=2, description="image codes")
    code_dim: int = Field(8, ge=1, description="width of a code before the aligner")
    aligner_depth: int = Field(2, ge=1)
    head_dim_image: int = Field(0, ge=0, description="width within the image head; 0: dim")
    norm_eps: float = 1e-6
    grid: int = Field(24, ge=1, description="tokens along one side of the image")
    bias: bool = Field(False, description="queries, keys and values have one")
    max_positions: int = Field(16384, ge=2, description="prompt and image, as trained")
    newline: ClassVar[None] = None

    @property
    def image_width(self) -> int:
        """Width within the image head."""
        return self.head_dim_image or self.dim

    @property
    def decoder(self) -> Decoder:
        return Decoder.of(self, bias=self.bias)


class JanusGPT(TrunkTarget):
    """The target model."""

    config: JanusConfig
    image_table: Tensor

    def __init__(self, config: JanusConfig, *, ops: TensorOps = REFERENCE) -> None:
        super().__init__(config, ops)
        self.tok_embeddings = nn.Embedding(config.token_count, config.dim)
        self.gen_embed = nn.Embedding(config.vocab_size, config.code_dim)
        widths = [config.code_dim] + [config.dim] * config.aligner_depth
        self.aligner = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.make_layers()
        self.head_in = Projection(config.dim, config.image_width)
        self.output = Projection(config.image_width, config.vocab_size)
        self.place_tables(self.output.weight.device)

    def place_tables(self, device: torch.device) -> None:
        super().place_tables(device)
        with torch.no_grad():
            x = self.gen_embed.weight
            for i, layer in enumerate(self.aligner):
                x = layer(F.gelu(x) if i else x)
        self.register_buffer("image_table", x, persistent=False)

    @property
    def code_table(self) -> Tensor:
        return self.image_table

    @property
    def head_layers(self) -> tuple[Projection, ...]:
        return self.head_in, self.output


#: ``generation_inference.py``: guidance 5, temperature 1, no filter.
DEFAULTS = ModelDefaults(sampling=Sampling(cfg_scale=5.0))


class JanusManifest(PromptedManifest):
    """``model.json`` of Janus's family."""

    family: Literal["janus"] = "janus"
    variant: Variant = "pro"
    ids: JanusIds = JanusIds()
    target: JanusConfig
    vq: VQConfig
