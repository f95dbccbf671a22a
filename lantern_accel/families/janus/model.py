"""Janus's half that draws: a Llama with an embedding and a head for image tokens.

Source: deepseek-ai/Janus 1daa72f (arXiv 2501.17811), ``janus/models/modeling_vlm.py``. What an
image token feeds the Llama, ``aligner(gen_embed[code])``, depends on the code alone, so it is
computed once for all codes. Positions are those of a line of text; every position sees all before
it, pads of the row without a prompt included.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from lantern_accel.decoding.rows import Allowed
from lantern_accel.device.operations import TensorOps
from lantern_accel.nn.decoder import Decoder
from lantern_accel.nn.rotary import rotary_table
from lantern_accel.nn.sizes import Sizes
from lantern_accel.nn.transformer import REFERENCE, Pass, Projection, RMSNorm, dense_visible


class JanusConfig(Sizes):
    """Sizes of Janus's Llama, of its image embedding and of its image head."""

    dim: int = Field(2048, ge=4)
    n_layer: int = Field(24, ge=1)
    n_head: int = Field(16, ge=1)
    n_kv_head: int = Field(0, ge=0, description="0: as many as heads")
    head_width: int = Field(0, ge=0, description="0: dim / n_head")
    ffn_dim: int = Field(5632, ge=1)
    token_count: int = Field(102400, ge=2, description="the vocabulary of text tokens")
    vocab_size: int = Field(16384, ge=2, description="image codes")
    code_dim: int = Field(8, ge=1, description="width of a code before the aligner")
    aligner_depth: int = Field(2, ge=1)
    head_dim_image: int = Field(0, ge=0, description="width within the image head; 0: dim")
    norm_eps: float = 1e-6
    rope_base: float = 10000.0
    grid: int = Field(24, ge=1, description="tokens along one side of the image")
    bias: bool = Field(False, description="queries, keys and values have one")
    max_positions: int = Field(16384, ge=2, description="prompt and picture, as trained")
    prefix_length: int = Field(64, ge=2, description="positions kept for the prompt, left-padded")

    @model_validator(mode="after")
    def _sizes_fit(self) -> JanusConfig:
        if not self.head_width and self.dim % self.n_head:
            raise ValueError(f"dim {self.dim} must be a multiple of n_head {self.n_head}")
        if self.head_dim % 2:
            raise ValueError(f"heads are {self.head_dim} wide, which must be an even number")
        if self.n_head % self.kv_heads:
            raise ValueError(
                f"n_head {self.n_head} must be a multiple of n_kv_head {self.n_kv_head}"
            )
        return self

    @property
    def head_dim(self) -> int:
        return self.head_width or self.dim // self.n_head

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def image_width(self) -> int:
        """Width within the image head."""
        return self.head_dim_image or self.dim

    @property
    def decoder(self) -> Decoder:
        """What tells this trunk from other Llama-like ones."""
        return Decoder(
            dim=self.dim,
            layers=self.n_layer,
            heads=self.n_head,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            hidden=self.ffn_dim,
            eps=self.norm_eps,
            bias=self.bias,
        )

    @property
    def num_tokens(self) -> int:
        """Image tokens, ``grid * grid``."""
        return self.grid * self.grid

    @property
    def row_tokens(self) -> int:
        """Tokens from one position to the one below it."""
        return self.grid


class JanusGPT(nn.Module):
    """The target model. Its features are the states after the final norm."""

    #: Rows of an image have prompts of one length, padded alike: they share a mask and positions.
    own_prompts = False
    rope_cos: Tensor
    rope_sin: Tensor
    image_table: Tensor

    def __init__(self, config: JanusConfig, *, ops: TensorOps = REFERENCE) -> None:
        super().__init__()
        self.config = config
        self.ops = ops
        self.tok_embeddings = nn.Embedding(config.token_count, config.dim)
        self.gen_embed = nn.Embedding(config.vocab_size, config.code_dim)
        widths = [config.code_dim] + [config.dim] * config.aligner_depth
        self.aligner = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.layers = config.decoder.blocks()
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head_in = Projection(config.dim, config.image_width)
        self.output = Projection(config.image_width, config.vocab_size)
        self.place_tables(torch.get_default_device())

    def place_tables(self, device: torch.device) -> None:
        """Make what no checkpoint holds: rotary tables, float32, and the aligned embedding."""
        self._place_rotary(device)
        with torch.no_grad():
            x = self.gen_embed.weight
            for i, layer in enumerate(self.aligner):
                x = layer(F.gelu(x) if i else x)
        self.register_buffer("image_table", x, persistent=False)

    def _place_rotary(self, device: torch.device) -> None:
        c = self.config
        places = torch.arange(c.prefix_length + c.num_tokens, device="cpu")
        cos, sin = rotary_table(places, c.head_dim, c.rope_base, device)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)

    def fitted(self, prefix_length: int) -> JanusGPT:
        """Return this model for another prompt length; weights are shared."""
        if prefix_length == self.config.prefix_length:
            return self
        view = copy.copy(self)
        view._buffers = dict(self._buffers)
        view.config = self.config.model_copy(update={"prefix_length": prefix_length})
        view._place_rotary(self.output.weight.device)
        return view

    @property
    def weight(self) -> Tensor:
        """The head's matrix, whose dtype and device are the model's."""
        return self.output.weight

    def embed_tokens(self, codes: Tensor) -> Tensor:
        """Embed codes, int ``[R, T]``, as ``[R, T, D]``."""
        return F.embedding(codes, self.image_table)

    def embed_prefix(self, condition: Tensor) -> Tensor:
        """Embed the prompt's token ids, int ``[R, prefix]``, as ``[R, prefix, D]``."""
        return F.embedding(condition, self.tok_embeddings.weight)

    def allowed(self) -> Allowed | None:
        """Return which codes each image token may be; None: any."""
        return None

    def condition_buffer(self, rows: int) -> Tensor:
        """Return a zeroed buffer for the condition of ``rows`` rows, as :meth:`embed_prefix` takes."""
        shape = (rows, self.config.prefix_length)
        return torch.zeros(shape, dtype=self.ops.index, device=self.output.weight.device)

    def forward(self, x: Tensor, at: Pass, taps: Sequence[int] = ()) -> Tensor:
        """Run all blocks and the final norm on embeddings ``[R, T, D]``; same shape out.

        ``taps``: blocks, counted from 1, whose states come before the features: ``[R, T, (n + 1) D]``.
        """
        return self.config.decoder.run(self.ops, self.layers, x, at, self.norm, taps)

    def head(self, features: Tensor) -> Tensor:
        """Return float32 logits of codes ``[..., V]`` of features ``[..., D]``."""
        out: Tensor = self.output(F.gelu(self.head_in(features, self.ops)), self.ops)
        return out.float()

    def forward_dense(
        self,
        condition: Tensor,
        codes: Tensor,
        prefix_mask: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> Tensor:
        """Run prompt ids ``[R, p]`` and codes ``[R, n]`` in one pass without a cache: [R, p+n, D].

        ``prefix_mask``: bool ``[R, p]``, True where the prompt has a token; ``taps`` as in
        :meth:`forward`. Row ``p - 1 + n`` predicts token n. ``p`` need not be the configured length.
        """
        x = torch.cat((self.embed_prefix(condition), self.embed_tokens(codes)), dim=1)
        length, c = x.shape[1], self.config
        mask = None
        if prefix_mask is not None:
            mask = self.ops.mask(dense_visible(prefix_mask, length), x.dtype)
        places = torch.arange(length, device="cpu")
        cos, sin = rotary_table(places, c.head_dim, c.rope_base, x.device)
        at = Pass(cos.view(1, length, 1, -1), sin.view(1, length, 1, -1), mask)
        out: Tensor = self(x, at, taps)
        return out
