"""Chameleon's trunk, which Anole-7B and Lumina-mGPT-7B share, its drafter and its manifest.

Source: facebookresearch/chameleon (arXiv 2405.09818), GAIR-NLP/anole, Alpha-VLLM/Lumina-mGPT. Queries and
keys are normalised head by head before the rotation. Text and image share one vocabulary; here an
image's token ``n`` is a *code*: ``id - image_first``, or, for a model whose rows end with a
newline token, the code after the last one. The head holds those rows only, so that what decodes
LlamaGen decodes this too.

Inside, rotations are of adjacent pairs; :mod:`lantern_accel.families.chameleon.official` permutes
checkpoints of the other pairing.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from lantern_accel.decoding.rows import Allowed, prefix_positions
from lantern_accel.device.operations import TensorOps
from lantern_accel.errors import RequestError
from lantern_accel.families.chameleon.text import ChameleonIds
from lantern_accel.families.manifest import TokenManifest
from lantern_accel.families.target import TrunkTarget
from lantern_accel.nn.drafter import EagleDrafter, EagleSizes
from lantern_accel.nn.rotary import RotaryNetwork
from lantern_accel.nn.sizes import LlamaSizes
from lantern_accel.nn.transformer import REFERENCE, Decoder, Pass, Projection, dense_visible
from lantern_accel.nn.vq import VQConfig
from lantern_accel.strategy.choose import ModelDefaults
from lantern_accel.strategy.trees import MC_SIM_7B_63, NAIVE_EXTEND_57
from lantern_accel.strategy.values import Sampling


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


class ChameleonDrafterConfig(EagleSizes, TrunkConfig):
    """Sizes of a drafter; prompt length, image and codes are its target's."""

    same = ("dim", "token_count", "image_codes", "newline_id")
    n_layer: int = Field(1, ge=1, le=1)
    taps: tuple[int, ...] = Field((), max_length=0, description="they read the last states alone")


class ChameleonDrafter(CodeNetwork, EagleDrafter):
    """The EAGLE drafter of Anole or Lumina-mGPT: one block, with a table of all tokens of its own.

    Source: jadohu/LANTERN ``models/drafters/cnets_anole.py``. Unlike LlamaGen's drafter it has a norm
    before attention and norms of queries and keys, it reads the prompt's own tokens, and its positions
    are those of a line of text.
    """

    table, sizes = "embed_tokens", ChameleonDrafterConfig
    config: ChameleonDrafterConfig

    def __init__(self, config: ChameleonDrafterConfig, *, ops: TensorOps = REFERENCE) -> None:
        super().__init__(config, ops)
        # Its own table: the published drafters' embeddings were frozen, but not tied.
        self.embed_tokens = CodeEmbedding(config)
        self.make_layers()
        self.place_tables(torch.device("cpu"))

    def for_target(self, target: ChameleonGPT) -> ChameleonDrafter:
        return self.resize(**target.config.model_dump(include={"prefix_length", "height", "width"}))

    def embed(self, codes: Tensor) -> Tensor:
        out: Tensor = self.embed_tokens(codes)
        return out

    def embed_prompt(self, condition: Tensor | None, features: Tensor, length: int) -> Tensor:
        """Embed the prompt's own tokens behind the first."""
        assert condition is not None
        return self.embed_tokens.tokens(condition[:, 1:])

    def forward_dense(self, ids: Tensor, features: Tensor, mask: Tensor) -> Tensor:
        """Run token ids ``[R, n]`` without a cache; ``mask`` bool ``[R, n]``, False at left padding."""
        at = self.dense_pass(mask, ids.shape[1], 0, features)
        return self.run(self.embed_tokens.tokens(ids), features, at)


Variant = Literal["anole", "lumina"]
#: No side of Lumina's training images was longer than this many times the other.
MAX_RATIO = 4.0


class ChameleonManifest(TokenManifest):
    """``model.json`` of Chameleon's family: Anole and Lumina-mGPT.

    ``side``: codes along the side of the square image that the model was trained for.
    """

    #: Codes along a unit of the grid, which size tokens count.
    unit: ClassVar[int] = 2
    family: str = "chameleon"
    variant: Variant = "anole"
    side: int = Field(32, ge=2)
    ids: ChameleonIds = ChameleonIds()
    target: ChameleonConfig
    drafter: ChameleonDrafterConfig | None = None
    vq: VQConfig

    @model_validator(mode="after")
    def _parts_fit(self) -> ChameleonManifest:
        if (self.variant == "lumina") != (self.target.newline_id is not None):
            raise ValueError("Lumina's rows end in a newline token, Anole's do not")
        return self

    def grid(self, size: tuple[int, int] | None) -> tuple[int, int]:
        """Return rows and columns of codes of an image ``(width, height)`` in pixels; None: the default.

        Raises :class:`RequestError` for a size that the model was not trained for.
        """
        if size is None or self.variant == "anole":
            return super().grid(size)
        width, height = size
        patch, most = self.unit * self.token_pixels, (self.side // self.unit) ** 2
        wide, high = width // patch, height // patch
        fits = (
            (wide * patch, high * patch) == size
            and 1 <= wide * high <= most
            and max(wide, high) <= MAX_RATIO * min(wide, high)
        )
        if not fits:
            whole = self.side * self.token_pixels
            raise RequestError(
                f"the model {self.name!r} cannot make {width}x{height} pixels: sides are multiples of "
                f"{patch}, one at most {MAX_RATIO:g} times the other, with no more pixels than "
                f"{whole}x{whole}; ask for such a size",
                field="size",
            )
        return self.unit * high, self.unit * wide

    def start(self, rows: int = 0, columns: int = 0) -> list[int]:
        """Return what starts an image: its mark, and a Lumina's tokens of its height and width.

        All that a Lumina's row without a prompt sees.
        """
        sizes = [self.ids.grid + side // self.unit for side in (rows, columns)]
        return (
            [self.ids.image_start, *sizes] if self.variant == "lumina" else [self.ids.image_start]
        )


#: LANTERN's command line for Anole; Lumina-mGPT's README. Both filter by top-k 2000 of the codes.
DEFAULTS: dict[Variant, ModelDefaults] = {
    "anole": ModelDefaults(
        sampling=Sampling(cfg_scale=3.0, top_k=2000), static_tree=NAIVE_EXTEND_57
    ),
    "lumina": ModelDefaults(sampling=Sampling(cfg_scale=4.0, top_k=2000), static_tree=MC_SIM_7B_63),
}
