"""Chameleon's trunk, which Anole-7B and Lumina-mGPT-7B share, decoding images in the space of codes.

Source: facebookresearch/chameleon (arXiv 2405.09818), GAIR-NLP/anole, Alpha-VLLM/Lumina-mGPT. Queries and
keys are normalised head by head before the rotation. Text and image share one vocabulary; here an
image's token ``n`` is a *code*: ``id - image_first``, or, for a model whose rows end with a
newline token, the code after the last one. The head holds those rows only, so that what decodes
LlamaGen decodes this too.

Inside, rotations are of adjacent pairs; :mod:`lantern_accel.families.chameleon.official` permutes
checkpoints of the other pairing.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from lantern_accel.decoding.rows import Allowed, prefix_positions
from lantern_accel.device.operations import TensorOps
from lantern_accel.families.target import TrunkTarget
from lantern_accel.nn.decoder import Decoder
from lantern_accel.nn.rotary import RotaryNetwork
from lantern_accel.nn.sizes import LlamaSizes
from lantern_accel.nn.transformer import REFERENCE, Pass, Projection, dense_visible


class TrunkConfig(LlamaSizes):
    """Sizes of Chameleon's decoder blocks, of a target or of a drafter."""

    token_count: int = Field(65536, ge=2, description="the vocabulary of text and image tokens")
    swin_norm: bool = Field(False, description="norms after attention and feed-forward, not before")
    image_first: int = Field(4, ge=0, description="the id of code 0")
    image_codes: int = Field(8192, ge=2)
    newline_id: int | None = Field(None, description="the token that ends every row of the image")
    height: int = Field(32, ge=1, description="tokens from top to bottom")
    width: int = Field(32, ge=1, description="tokens from left to right, the newline not counted")

    @model_validator(mode="after")
    def _sizes_fit(self) -> TrunkConfig:
        if self.newline_id is not None and self.newline_id >= self.token_count:
            raise ValueError(
                f"the newline is token {self.newline_id}, but there are only {self.token_count}"
            )
        if self.image_first + self.image_codes > self.token_count:
            raise ValueError(
                f"image tokens {self.image_first} to {self.image_first + self.image_codes - 1} are "
                f"more than the vocabulary's {self.token_count}"
            )
        return self

    @property
    def decoder(self) -> Decoder:
        return Decoder.of(self, head_norm="layer", norms="after" if self.swin_norm else "before")

    @property
    def vocab_size(self) -> int:
        """Codes, and one for the newline where the model has it."""
        return self.image_codes + (self.newline_id is not None)

    @property
    def newline(self) -> int | None:
        """The newline's code, the last one; None where rows have no end."""
        return None if self.newline_id is None else self.image_codes

    @property
    def num_tokens(self) -> int:
        """Tokens of an image, the newlines included."""
        return self.height * self.row_tokens

    @property
    def above(self) -> None:
        """None: rows of one grid."""

    @property
    def row_tokens(self) -> int:
        """Tokens from one position to the one below it, the newline included."""
        return self.width + (self.newline_id is not None)

    def token_ids(self) -> list[int]:
        """Return the token id of every code."""
        ids = list(range(self.image_first, self.image_first + self.image_codes))
        return ids if self.newline_id is None else [*ids, self.newline_id]


class ChameleonConfig(TrunkConfig):
    """Sizes of a target."""

    max_positions: int = Field(4096, ge=2, description="prompt and image, as the model was trained")


class CodeEmbedding(nn.Module):
    """What target and drafter share: one table of all tokens, read by token id or by code."""

    code_ids: Tensor

    def __init__(self, config: TrunkConfig) -> None:
        super().__init__()
        self.first, self.codes = config.image_first, config.image_codes
        self.weight = nn.Parameter(torch.randn(config.token_count, config.dim))
        self.gather = config.newline_id is not None
        self.register_buffer("code_ids", torch.tensor(config.token_ids()), persistent=False)

    def forward(self, codes: Tensor) -> Tensor:
        if self.gather:  # the newline's row lies elsewhere
            ids = self.code_ids.index_select(0, codes.flatten()).view(codes.shape)
            return F.embedding(ids, self.weight)
        return F.embedding(codes, self.weight[self.first : self.first + self.codes])

    def tokens(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class CodeNetwork(RotaryNetwork):
    """What target and drafter share: a table of all tokens, and positions from a row's first token on."""

    #: The name of the table.
    table: ClassVar[str]

    def place_tables(self, device: torch.device) -> None:
        super().place_tables(device)
        ids = torch.tensor(self.config.token_ids(), dtype=self.ops.index, device=device)
        self.get_submodule(self.table).code_ids = ids

    def dense_pass(self, mask: Tensor | None, prefix: int, count: int, like: Tensor) -> Pass:
        """Return what a pass without a cache reads; left padding has no position."""
        if mask is None:
            mask = torch.ones(len(like), prefix, dtype=torch.bool, device=like.device)
        seen = F.pad(mask, (0, count), value=True)
        cos, sin = self.rotary_rows(prefix, count, like.device)
        place = prefix_positions(seen)
        visible = self.ops.mask(dense_visible(seen, prefix + count), like.dtype)
        return Pass(cos[place].unsqueeze(2), sin[place].unsqueeze(2), visible)


class ChameleonGPT(CodeNetwork, TrunkTarget):
    """The target model. Its features are the states after the final norm."""

    own_prompts, table = True, "tok_embeddings"
    config: ChameleonConfig
    tok_embeddings: CodeEmbedding

    def __init__(self, config: ChameleonConfig, *, ops: TensorOps = REFERENCE) -> None:
        super().__init__(config, ops)
        self.tok_embeddings = CodeEmbedding(config)
        self.make_layers()
        self.output = Projection(config.dim, config.vocab_size, bias=False)
        self.place_tables(torch.device("cpu"))

    def embed_tokens(self, codes: Tensor) -> Tensor:
        out: Tensor = self.tok_embeddings(codes)
        return out

    def embed_prefix(self, condition: Tensor) -> Tensor:
        return self.tok_embeddings.tokens(condition)

    def allowed_codes(self) -> Allowed | None:
        """Return which codes each token may be: the newline where a row ends, and nowhere else."""
        c = self.config
        if c.newline is None:
            return None
        device = self.output.weight.device
        kind = torch.zeros(c.height, c.width + 1, dtype=self.ops.index, device=device)
        kind[:, -1] = 1
        penalty = torch.full((2, c.vocab_size), float("-inf"), device=device)
        penalty[0, : c.image_codes] = 0
        penalty[1, c.newline] = 0
        return Allowed(kind.flatten().clone(), penalty)
