"""The emoji model's target: a text-conditional LlamaGen GPT on VQ tokens, with its text encoder."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from lantern_accel.errors import DataError
from lantern_accel.families.llamagen.model import CaptionEmbedder, LlamaGenConfig, LlamaGenGPT
from lantern_accel.families.llamagen.text import TextEncoder, TextEncoderConfig
from lantern_accel.nn.sizes import PrefixRotary
from lantern_accel.training.loop import TrainConfig, seed_everything
from lantern_emoji.captions import STYLES
from lantern_emoji.grow import widen


class TargetConfig(TrainConfig):
    """Settings of the target trainer, the mixture it learns from among them."""

    dim: int = Field(384, description="width of the transformer")
    n_layer: int = 8
    n_head: int = 6
    ffn_dim: int = 1024
    text_dim: int = 192
    text_layers: int = 2
    text_heads: int = 4
    prefix_length: int = 16
    repeat_caption: bool = Field(True, description="fill the prefix by repeating the caption")
    prefix_rotary: PrefixRotary = Field(
        "identity", description="identity: the image attends to the prompt by content"
    )
    text_dropout: float = Field(
        0.1, ge=0, lt=1, description="share of unconditional examples (CFG)"
    )
    ema: float = Field(0.995, ge=0, lt=1, description="decay of the averaged weights that are kept")
    evaluate_every: int = Field(1000, ge=1)
    folder: str = Field("target", description="where in the training folder this target is kept")
    compile: bool = Field(True, description="torch.compile the loss; about twice as fast on CPU")

    start_from: str | None = Field(
        None, description="folder there of a smaller trained target that this one grows out of"
    )
    scenes: int = Field(24000, ge=0, description="composed scenes to train on")
    scene_share: float = Field(0.3, ge=0, le=1, description="share of examples that are scenes")
    common_weight: float = Field(
        15.0, gt=0, description="factor on the sampling weight of common concepts"
    )
    group_weights: dict[str, float] = Field(
        default={
            "smileys-emotion": 2.5,
            "animals-nature": 2.0,
            "food-drink": 2.0,
            "objects": 0.7,
            "travel-places": 0.7,
            "people-body": 0.4,
        },
        description="factors on the records' sampling weights, by emoji group",
    )
    concept_weights: dict[str, float] = Field(
        default={}, description="further factors by concept name, such as {'red heart': 5}"
    )
    default_style: str | None = Field(
        None,
        description="style that a caption without a style word means; pictures of the others say theirs",
    )
    style_weights: dict[str, float] = Field(
        default={}, description="further factors by style, such as {'twemoji': 8}"
    )

    @model_validator(mode="after")
    def _sizes_fit(self) -> TargetConfig:
        if self.dim % self.n_head or (self.dim // self.n_head) % 4:
            raise ValueError(
                f"dim {self.dim} must be n_head {self.n_head} times a head width that is a multiple "
                "of 4 (2D rotary positions)"
            )
        if self.text_dim % self.text_heads or (self.text_dim // self.text_heads) % 2:
            raise ValueError(
                f"text_dim {self.text_dim} must be text_heads {self.text_heads} times an even width"
            )
        return self

    @model_validator(mode="after")
    def _styles_exist(self) -> TargetConfig:
        named = {*self.style_weights, *([self.default_style] if self.default_style else [])}
        if unknown := sorted(named - set(STYLES)):
            raise ValueError(f"no style is named {unknown[0]!r}; there are {', '.join(STYLES)}")
        return self


class TextTarget(nn.Module):
    """Text encoder and GPT, trained together."""

    def __init__(self, text: TextEncoder, gpt: LlamaGenGPT) -> None:
        super().__init__()
        self.text, self.gpt = text, gpt

    @classmethod
    def fresh(cls, config: TargetConfig, vocabulary: int, codes: int, grid: int) -> TextTarget:
        """Return an untrained model of the configured sizes, initialised as GPT-2 is."""
        text = TextEncoderConfig(
            vocab_size=vocabulary,
            dim=config.text_dim,
            n_layer=config.text_layers,
            n_head=config.text_heads,
            prefix_length=config.prefix_length,
            repeat=config.repeat_caption,
        )
        gpt = LlamaGenConfig(
            dim=config.dim,
            n_layer=config.n_layer,
            n_head=config.n_head,
            ffn_dim=config.ffn_dim,
            vocab_size=codes,
            grid=grid,
            prefix_length=config.prefix_length,
            caption_dim=config.text_dim,
            prefix_rotary=config.prefix_rotary,
        )
        model = cls(TextEncoder(text), LlamaGenGPT(gpt))
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)
            if name.endswith(("wo.weight", "w2.weight")):
                nn.init.normal_(weight, std=0.02 / (2 * config.n_layer) ** 0.5)
        model.spread_words()
        return model

    @torch.no_grad()
    def spread_words(self) -> None:
        """Start the text path with captions far apart.

        With GPT-2's small embeddings shared directions drown the words: captions come out
        nearly parallel (cosine 0.94 and more within two clusters).
        """
        nn.init.normal_(self.text.words.weight, std=1.0)
        nn.init.normal_(self.text.positions.weight, std=0.3)
        cls = self.gpt.cls_embedding
        assert isinstance(cls, CaptionEmbedder)
        for layer in (cls.cap_proj.fc1, cls.cap_proj.fc2):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)

    def features(
        self, ids: Tensor, mask: Tensor, drop: Tensor, codes: Tensor, taps: Sequence[int] = ()
    ) -> Tensor:
        """Return the states over prompt and image, ``[B, prefix + n - 1, D]``; ``taps``: the target's.

        Row ``prefix - 1 + n`` predicts token n.

        ``ids, mask [B, prefix]``, ``drop`` bool ``[B]`` marks unconditional rows, ``codes [B, n]``.
        """
        cond = self.text(ids, mask)
        free = self.gpt.unconditional(cond.shape[0]).to(cond.dtype)
        # As in LlamaGen, the unconditional branch keeps the caption's padding mask.
        cond = torch.where(drop.view(-1, 1, 1), free * mask.unsqueeze(-1), cond)
        return self.gpt.forward_dense(cond, codes[:, :-1], mask, taps)

    def forward(self, ids: Tensor, mask: Tensor, drop: Tensor, codes: Tensor) -> Tensor:
        """Return the mean cross-entropy of the codes, nats per token."""
        states = self.features(ids, mask, drop, codes)
        logits = self.gpt.head(states[:, self.gpt.config.prefix_length - 1 :])
        return F.cross_entropy(logits.flatten(0, 1), codes.flatten())


def fresh_target(
    config: TargetConfig,
    vocabulary: int,
    codes: int,
    grid: int,
    start: TextTarget | None = None,
) -> TextTarget:
    """Return the model to train: untrained, or grown out of ``start`` and computing the same.

    Raises :class:`DataError` where the configured sizes cannot grow out of those of ``start``.
    """
    seed_everything(config.seed)
    model = TextTarget.fresh(config, vocabulary, codes, grid)
    if start is not None:
        if start.text.config != model.text.config:
            raise DataError(
                f"the target to start from has the text encoder {start.text.config!r}, the "
                f"configuration asks for {model.text.config!r}; the text encoder cannot grow"
            )
        model.text.load_state_dict(start.text.state_dict())
        widen(model.gpt, start.gpt)
    return model
