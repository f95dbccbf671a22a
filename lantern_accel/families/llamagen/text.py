"""The bundled model's text encoder: words to caption features, without any download.

It stands where flan-t5 stands in LlamaGen: features ``[B, prefix, caption_dim]``, right-aligned
(left-padded) with a mask. A small bidirectional transformer, trained together with the target.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from lantern_accel.device.operations import TensorOps
from lantern_accel.errors import LanternWarning, RequestError, show
from lantern_accel.families.base import TextSource
from lantern_accel.families.llamagen.taught import Taught
from lantern_accel.families.llamagen.words import normalise
from lantern_accel.nn.sizes import Sizes
from lantern_accel.nn.transformer import REFERENCE, Decoder, Pass, RMSNorm

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD_ID = 0
UNKNOWN_ID = 1


class TextEncoderConfig(Sizes):
    """Sizes of the text encoder."""

    vocab_size: int = Field(ge=2)
    dim: int = Field(192, ge=4)
    n_layer: int = Field(2, ge=0)
    n_head: int = Field(4, ge=1)
    prefix_length: int = Field(16, ge=1)
    repeat: bool = Field(
        False,
        description="say a short caption again until the prefix is full: prompt positions have score "
        "0 in LlamaGen, so that their weight among 256 image tokens is their number",
    )
    norm_eps: float = 1e-5


class TextEncoder(nn.Module):
    """Token ids to caption features of width ``dim``."""

    def __init__(self, config: TextEncoderConfig, *, ops: TensorOps = REFERENCE) -> None:
        super().__init__()
        self.config = config
        self.ops = ops
        self.words = nn.Embedding(config.vocab_size, config.dim)
        self.positions = nn.Embedding(config.prefix_length, config.dim)
        one = config
        plain = Decoder.plain(one.dim, one.n_head, 2 * one.dim, one.norm_eps, one.n_layer)
        self.layers = plain.blocks()
        self.norm = RMSNorm(config.dim, config.norm_eps)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Encode left-padded ids, int ``[B, prefix]``, mask bool ``[B, prefix]``; pads come out 0."""
        x = F.embedding(ids, self.words.weight)
        # Positions count from the first word, wherever the padding puts it.
        place = (mask.long().cumsum(1) - 1).clamp(min=0)
        x = x + F.embedding(place, self.positions.weight)
        eye = torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
        seen = self.ops.mask((mask[:, None, :] | eye).unsqueeze(1), x.dtype)
        half = self.config.dim // self.config.n_head // 2
        cos = torch.ones(1, 1, 1, half, device=x.device)
        x = self.ops.trunk(self.layers, x, Pass(cos, torch.zeros_like(cos), seen))
        out: Tensor = self.norm(x, self.ops)
        return out * mask.unsqueeze(-1).to(out.dtype)


def place(tokens: Sequence[int], config: TextEncoderConfig) -> list[int]:
    """Return exactly ``prefix_length`` ids: cut, repeated where the model was trained so, left-padded."""
    size = config.prefix_length
    if config.repeat and tokens:
        tokens = list(tokens) * (-(-size // len(tokens)))
    kept = list(tokens[:size])
    return [PAD_ID] * (size - len(kept)) + kept


def tokenize(
    tokenizer: Tokenizer, prompts: Sequence[str], config: TextEncoderConfig
) -> tuple[Tensor, Tensor]:
    """Turn prompts into ids int64 ``[B, prefix]`` and a mask bool ``[B, prefix]``.

    A prompt longer than the prefix is cut with a :class:`LanternWarning`, as T5 pipelines do.
    Raises :class:`RequestError` for a prompt without a single known word.
    """
    rows = []
    for prompt in prompts:
        tokens = tokenizer.encode(normalise(prompt)).ids
        if all(t == UNKNOWN_ID for t in tokens):
            raise RequestError(
                f"the prompt {show(prompt)} has no word that this model knows; describe a thing in "
                "English, such as 'red heart'"
            )
        if len(tokens) > config.prefix_length:
            kept = tokenizer.decode(tokens[: config.prefix_length])
            warnings.warn(
                f"the prompt has {len(tokens)} tokens, the model's prefix holds "
                f"{config.prefix_length}: it was cut after {kept!r}",
                LanternWarning,
                stacklevel=2,
            )
        rows.append(place(tokens, config))
    ids = torch.tensor(rows, dtype=torch.int64)
    return ids, ids != PAD_ID


class WordText(TextSource):
    """The bundled model's source of caption features: its word tokenizer and encoder, on the host."""

    def __init__(self, encoder: TextEncoder, tokenizer: Tokenizer, taught: Taught) -> None:
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.taught = taught

    def encode(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        prompts = [self.taught.name_emoji(prompt) for prompt in prompts]
        words, mask = tokenize(self.tokenizer, prompts, self.encoder.config)
        self.taught.warn(prompts)
        features: Tensor = self.encoder(words, mask)
        return features, mask
