"""The LlamaGen GPT, class- or text-conditional, its drafter and its manifest.

Source: FoundationVision/LlamaGen ce98ec4, arXiv 2406.06525. The caption or class becomes a prefix of
``prefix_length`` positions; image token ``n`` then sits at grid cell ``n`` in raster order. B and L are
published at 256 and 384 pixels, XL, XXL and 3B at 384, the text-conditional XL at 256 and 512.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from lantern_accel.device.operations import TensorOps
from lantern_accel.device.plan import DraftStack, Stack
from lantern_accel.families.llamagen.text import TextEncoderConfig
from lantern_accel.families.manifest import Manifest, check_codes
from lantern_accel.families.target import TrunkTarget
from lantern_accel.nn.drafter import EagleDrafter, EagleSizes
from lantern_accel.nn.rotary import GridNetwork
from lantern_accel.nn.sizes import GridSizes
from lantern_accel.nn.transformer import REFERENCE, Decoder, Projection, RMSNorm, plan_blocks
from lantern_accel.nn.vq import VQConfig


class LlamaGenConfig(GridSizes):
    """Sizes of a LlamaGen GPT."""

    n_layer: int = Field(ge=1)
    ffn_dim: int = Field(0, ge=0, description="0: int(8 dim / 3) rounded up to 256")
    vocab_size: int = Field(16384, ge=2)
    conditioning: Literal["class", "text"] = "text"
    prefix_length: int = Field(120, ge=1)
    num_classes: int = Field(1000, ge=1)
    caption_dim: int = Field(2048, ge=1)
    norm_eps: float = 1e-5

    @model_validator(mode="after")
    def _classes_fit(self) -> LlamaGenConfig:
        if self.conditioning == "class" and self.prefix_length != 1:
            raise ValueError("a class-conditional model has a prefix_length of 1")
        return self

    @property
    def hidden_dim(self) -> int:
        return self.ffn_dim or -(-int(8 * self.dim / 3) // 256) * 256

    @property
    def decoder(self) -> Decoder:
        return Decoder.of(self, self.hidden_dim)


class _CaptionMLP(nn.Module):
    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.caption_dim, config.dim, bias=False)
        self.fc2 = nn.Linear(config.dim, config.dim, bias=False)


class CaptionEmbedder(nn.Module):
    """``fc2(gelu_tanh(fc1(features)))`` and the unconditional features, ``[prefix, caption_dim]``."""

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__()
        self.cap_proj = _CaptionMLP(config)
        self.uncond_embedding = nn.Parameter(torch.empty(config.prefix_length, config.caption_dim))
        nn.init.normal_(self.uncond_embedding, std=config.caption_dim**-0.5)

    def forward(self, features: Tensor) -> Tensor:
        proj = self.cap_proj
        out: Tensor = proj.fc2(F.gelu(proj.fc1(features), approximate="tanh"))
        return out


class ClassEmbedder(nn.Module):
    """One row a class and, last, one for "no class"."""

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(config.num_classes + 1, config.dim)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.embedding_table(ids)
        return out


class LlamaGenGPT(GridNetwork, TrunkTarget):
    """The target model. Its features are the states after the final norm."""

    def __init__(self, config: LlamaGenConfig, *, ops: TensorOps = REFERENCE) -> None:
        super().__init__(config, ops)
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.cls_embedding: CaptionEmbedder | ClassEmbedder = (
            CaptionEmbedder(config) if config.conditioning == "text" else ClassEmbedder(config)
        )
        self.make_layers()
        self.output = Projection(config.dim, config.vocab_size, bias=False)
        self.place_tables(self.output.weight.device)

    @property
    def stack(self) -> Stack | None:
        blocks = plan_blocks(self.layers)
        if blocks is None:
            return None
        table, norm, head = self.tok_embeddings.weight, self.norm.to_plan(), self.output
        return Stack(table, blocks, norm, head.to_plan())

    def embed_prefix(self, condition: Tensor) -> Tensor:
        """Embed caption features ``[R, prefix, caption_dim]`` or class ids ``[R]``: [R, prefix, D]."""
        x: Tensor = self.cls_embedding(condition)
        return x if self.config.conditioning == "text" else x.unsqueeze(1)

    def unconditional(self, rows: int) -> Tensor:
        """Return the condition of the CFG branch without a prompt, for ``rows`` rows."""
        if isinstance(self.cls_embedding, CaptionEmbedder):
            return self.cls_embedding.uncond_embedding.expand(rows, -1, -1)
        weight = self.cls_embedding.embedding_table.weight
        return torch.full((rows,), self.config.num_classes, device=weight.device)

    def condition_buffer(self, rows: int) -> Tensor:
        weight = self.output.weight
        if self.config.conditioning == "class":
            return torch.zeros(rows, dtype=self.ops.index, device=weight.device)
        shape = (rows, self.config.prefix_length, self.config.caption_dim)
        return torch.zeros(shape, dtype=weight.dtype, device=weight.device)


#: Layers, heads and width; the 3B has heads of 100, the others of 64.
SHAPES = {
    "B": (12, 12, 768),
    "L": (24, 16, 1024),
    "XL": (36, 20, 1280),
    "XXL": (48, 24, 1536),
    "3B": (24, 32, 3200),
}


def llamagen_config(size: str, pixels: int, *, text: bool = False) -> LlamaGenConfig:
    """Return the configuration of a LlamaGen ``size`` (B, L, XL, XXL, 3B) at 256, 384 or 512 pixels."""
    n_layer, n_head, dim = SHAPES[size]
    return LlamaGenConfig(
        dim=dim,
        n_layer=n_layer,
        n_head=n_head,
        grid=pixels // 16,
        conditioning="text" if text else "class",
        prefix_length=120 if text else 1,
    )


class DrafterConfig(EagleSizes, GridSizes):
    """Sizes of an EAGLE drafter for a LlamaGen target."""

    same = ("dim", "vocab_size", "grid", "prefix_length")
    ffn_dim: int = Field(ge=1)
    vocab_size: int = Field(ge=2)
    grid: int = Field(ge=1)
    prefix_length: int = Field(ge=0, description="the target's prefix length less one")
    norm_eps: float = 1e-6

    @property
    def decoder(self) -> Decoder:
        return Decoder.of(self, input_norm=False)

    @classmethod
    def of_target(cls, target: LlamaGenConfig) -> dict[str, object]:
        own = {"ffn_dim": target.hidden_dim, "prefix_length": target.prefix_length - 1}
        return super().of_target(target) | own


class LlamaGenDrafter(GridNetwork, EagleDrafter):
    """The EAGLE drafter of a LlamaGen target, with a table of codes of its own; one block as published.

    Source: jadohu/LANTERN: no norm before attention in the first block, no final norm; the target's head
    reads its output. Its rotary tables have one prefix row fewer than the target's.
    """

    sizes = DrafterConfig
    config: DrafterConfig

    def __init__(self, config: DrafterConfig, *, ops: TensorOps = REFERENCE) -> None:
        super().__init__(config, ops)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.make_layers()
        self.place_tables(self.embed_tokens.weight.device)

    @property
    def stack(self) -> DraftStack | None:
        blocks = plan_blocks(self.layers)
        if blocks is None:
            return None
        norms = tuple(norm.to_plan() for norm in self.tap_norms if isinstance(norm, RMSNorm))
        fuse = None if self.fuse is None else self.fuse.to_plan()
        return DraftStack(self.embed_tokens.weight, norms, fuse, self.fc.to_plan(), blocks)

    def embed(self, codes: Tensor) -> Tensor:
        return F.embedding(codes, self.embed_tokens.weight)

    def embed_prompt(self, condition: Tensor | None, features: Tensor, length: int) -> Tensor:
        """Embed code 0 for every position: nothing of the condition is read."""
        shape = (features.shape[0], length)
        return self.embed(torch.zeros(shape, dtype=self.ops.index, device=features.device))


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
