"""The EAGLE drafter of targets whose prompt is a row of token ids: blocks of the target's own kind.

Its blocks have the target's description (:class:`~lantern_accel.nn.decoder.Decoder`), norms before
attention included. Tables of words and codes and rotary positions are the target's own tensors: a file
has only what was trained. Drafter position ``p`` reads the target's feature at ``p`` and token ``p + 1``,
and stands where that token stands.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from lantern_accel.device.operations import TensorOps
from lantern_accel.errors import CheckpointError
from lantern_accel.families.manifest import TokenManifest
from lantern_accel.families.target import TrunkTarget
from lantern_accel.nn.drafter import EagleDrafter, EagleSizes
from lantern_accel.nn.transformer import REFERENCE, Decoder, HeadNorms, Norms

#: How many numbers of its target's table a drafter keeps to know it by, and of which row: the middle one.
MARK = 8
#: Numbers that were rounded to bfloat16 twice differ by less than this share of the largest.
MARK_ERROR = 2**-6


class PromptedDrafterConfig(EagleSizes):
    """Sizes of a drafter; all but its blocks, its taps and ``bias`` are its target's."""

    same = (
        "dim", "n_head", "kv_heads", "head_dim", "ffn_dim", "norm_eps", "qkv_bias", "head_norm",
        "norms", "token_count", "vocab_size",
    )  # fmt: skip
    dim: int = Field(ge=4)
    n_head: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2)
    ffn_dim: int = Field(ge=1)
    norm_eps: float = 1e-6
    qkv_bias: bool = Field(False, description="queries, keys and values have one")
    head_norm: HeadNorms = "none"
    norms: Norms = "before"
    token_count: int = Field(ge=2, description="the vocabulary of the target's prompts")
    vocab_size: int = Field(ge=2, description="image codes")
    mark: tuple[float, ...] = Field(
        (), description="numbers of the target's table, which tell models of one size apart"
    )

    @property
    def decoder(self) -> Decoder:
        return Decoder.of(self, bias=self.qkv_bias, head_norm=self.head_norm, norms=self.norms)

    @classmethod
    def of_target(cls, target: Any) -> dict[str, object]:
        one: Decoder = target.decoder
        blocks = {"qkv_bias": one.bias, "head_norm": one.head_norm, "norms": one.norms}
        return super().of_target(target) | blocks


class PromptedManifest(TokenManifest):
    """The manifest of a model whose drafters have its own blocks."""

    drafter: PromptedDrafterConfig | None = None


PromptedManifestT = TypeVar("PromptedManifestT", bound=PromptedManifest)


def mark_of(target: TrunkTarget) -> tuple[float, ...]:
    """Return some numbers of a target's table of words."""
    table = target.tok_embeddings.weight
    return tuple(table[len(table) // 2, :MARK].float().tolist())


class PromptedDrafter(EagleDrafter):
    """The drafter of one target, whose tables it reads."""

    sizes = PromptedDrafterConfig
    config: PromptedDrafterConfig
    words: Tensor
    codes: Tensor

    def __init__(self, config: PromptedDrafterConfig, *, ops: TensorOps = REFERENCE) -> None:
        super().__init__(config, ops)
        self.make_layers()
        for name in ("words", "codes", "rope_cos", "rope_sin"):
            self.register_buffer(name, None, persistent=False)
        #: The target, while the drafter is trained: in a tuple, so that it is not part of this module.
        self.teacher: tuple[TrunkTarget, ...] = ()

    def place_tables(self, device: torch.device) -> None:
        """Make nothing: :meth:`read` takes the target's."""

    def read(self, target: TrunkTarget) -> None:
        """Read the tables and the positions of ``target``; no table is copied.

        Raises :class:`CheckpointError` where the drafter was trained on another model of these sizes.
        """
        known = self.config.mark
        if known and not target.tok_embeddings.weight.is_meta:
            here = mark_of(target)
            most = MARK_ERROR * max(map(abs, (*known, *here)))
            if any(abs(a - b) > most for a, b in zip(known, here, strict=True)):
                raise CheckpointError(
                    "the drafter was trained on another model of the same sizes; name this model's own "
                    "with --use drafter=PATH, or decode without one: --use drafter=none"
                )
        self.words, self.codes = target.tok_embeddings.weight.detach(), target.code_table.detach()
        self._place(target)

    def adopt(self, target: TrunkTarget) -> None:
        """Read the tables of the target that it is trained with, and keep some numbers to know it by."""
        self.config = self.config.model_copy(update={"mark": mark_of(target)})
        self.read(target)
        self.teacher = (target,)

    def _place(self, target: TrunkTarget) -> None:
        """Take the target's positions from the second on; tensors of their own, as no view is kept."""
        self.rope_cos, self.rope_sin = target.rope_cos[1:].clone(), target.rope_sin[1:].clone()

    def for_target(self, target: TrunkTarget) -> PromptedDrafter:
        view = copy.copy(self)
        view._buffers = dict(self._buffers)
        view._place(target)
        return view

    def rotary_rows(self, prefix: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the rows of the target that is its teacher, from the second on."""
        (target,) = self.teacher
        cos, sin = target.rotary_rows(prefix + 1, count, device)
        return cos[1:], sin[1:]

    def embed(self, codes: Tensor) -> Tensor:
        return F.embedding(codes, self.codes)

    def embed_prompt(self, condition: Tensor | None, features: Tensor, length: int) -> Tensor:
        """Embed the prompt's own tokens behind the first."""
        assert condition is not None
        return F.embedding(condition[:, 1:], self.words)
