"""The image tokenizers of released files: their names of tensors, their sizes, and decoding with them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from lantern_accel.checkpoints.layouts import explain_sizes
from lantern_accel.checkpoints.weights import Checkpoint
from lantern_accel.errors import CheckpointError, ModelError
from lantern_accel.families.base import Family, Model
from lantern_accel.families.keys import Rule, rename_keys
from lantern_accel.families.manifest import ManifestT
from lantern_accel.nn.movq import MoVQConfig
from lantern_accel.nn.vq import VQConfig, chameleon_pixels_to_uint8

#: From the names that Meta's and transformers' files have for tensors to ours, which are LlamaGen's.
VQ_RULES: tuple[Rule, ...] = (
    (r"\.mid\.block_1\.", ".mid.0."),
    (r"\.mid\.attn_1\.", ".mid.1."),
    (r"\.mid\.block_2\.", ".mid.2."),
    (r"^(encoder\.down|decoder\.up)\.(\d+)\.block\.", r"\1.\2.res."),
    (r"^encoder\.down\.", "encoder.conv_blocks."),
)
#: Of a decoder whose level 0 is the lowest resolution, as ours is; Meta counts from the highest.
LOWEST_FIRST: Rule = (r"^decoder\.up\.", "decoder.conv_blocks.")
#: A level of a decoder that counts from the highest resolution.
_UP = r"\bdecoder\.up\.(\d+)\."


def tokenizer_names(
    names: Iterable[str], prefix: str = "", rules: Iterable[Rule] = ()
) -> dict[str, str]:
    """Return our name of every tensor of a tokenizer with Meta's names, with its key.

    ``prefix``: a pattern of what keys begin with where a file holds other parts too; then those keys
    alone count. ``rules`` make Meta's names of others.
    """
    there = list(names)
    keys = [key for key in there if prefix and re.match(prefix, key)] or there
    made = rename_keys(keys, ((rf"^(?:{prefix})", ""), *rules))
    last = max((int(found[1]) for name in made if (found := re.match(_UP, name))), default=0)
    highest_first: Rule = (_UP, lambda found: f"decoder.conv_blocks.{last - int(found[1])}.")
    ours = rename_keys(made, (*VQ_RULES, highest_first))
    return {name: made[one] for name, one in ours.items()}


def vq_sizes(
    checkpoint: Checkpoint,
    names: Mapping[str, str],
    whose: str,
    *,
    attend: bool = True,
    l2_norm: bool = True,
) -> VQConfig:
    """Return the sizes of an image tokenizer, read off shapes.

    ``names``: our names with their keys; ``whose``: what it should be, for errors; ``attend`` and
    ``l2_norm``: as that has them. Raises :class:`CheckpointError` where a part is absent, too much or of
    a size that none has.
    """
    path, sizes = checkpoint.path, _sizes(checkpoint, names, whose)
    if any(".attn." in name for name in names) > attend:
        raise CheckpointError(
            f"{path} has attention outside the middle, so it is not {whose}; use that one"
        )
    if any(".conv_y." in name for name in names):
        raise CheckpointError(
            f"{path} has norms that read the codes, so it is not {whose}; use that one"
        )
    with explain_sizes(f"{path} is a tokenizer of an unsupported size", f"use {whose}"):
        return VQConfig(**sizes, l2_norm=l2_norm)


def movq_sizes(checkpoint: Checkpoint, names: Mapping[str, str], whose: str) -> MoVQConfig:
    """Return the sizes of a MoVQ tokenizer, read off shapes; see :func:`vq_sizes`."""
    path, sizes = checkpoint.path, _sizes(checkpoint, names, whose)
    if "decoder.norm_out.norm_layer.weight" not in names:
        raise CheckpointError(
            f"{path} has no norms that read the codes, so it is not {whose}; use that one"
        )
    levels = range(_count(names, _LEVEL))
    attention = (i for i in levels if f"encoder.conv_blocks.{i}.attn.0.q.weight" in names)
    halvings = _count(names, "decoder.time_conv.{}.conv.conv.weight")
    with explain_sizes(f"{path} is a tokenizer of an unsupported size", f"use {whose}"):
        return MoVQConfig(**sizes, attention=tuple(attention), halvings=halvings)


#: The first tensor of an encoder's level.
_LEVEL = "encoder.conv_blocks.{}.res.0.conv1.weight"


def check_codebook(
    path: Path, vq: VQConfig | MoVQConfig, model: object, codes: int, whose: str
) -> None:
    """Raise :class:`CheckpointError` for an image tokenizer whose codes are not those of ``model``."""
    if vq.codebook_size != codes:
        raise CheckpointError(
            f"{path} is of another codebook: it has {vq.codebook_size} codes, {model} has {codes}; name "
            f"{whose} with --use vq=PATH"
        )


def _count(names: Mapping[str, str], pattern: str) -> int:
    return next(i for i in itertools.count() if pattern.format(i) not in names)


def _sizes(checkpoint: Checkpoint, names: Mapping[str, str], whose: str) -> dict[str, object]:
    """Return what the tokenizers' sizes have in common, read off shapes."""

    def shape(name: str) -> tuple[int, ...]:
        if name not in names:
            raise CheckpointError(
                f"{checkpoint.path} lacks {name}, so it is not {whose}, or a part of it is absent; fetch "
                "it again"
            )
        return checkpoint.shape(names[name])

    ch, channels = shape("encoder.conv_in.weight")[:2]
    widths = [shape(_LEVEL.format(i))[0] for i in range(max(_count(names, _LEVEL), 1))]
    codes, width = shape("quantize.embedding.weight")
    return {
        "in_channels": channels,
        "ch": ch,
        "ch_mult": tuple(one // ch for one in widths),
        "num_res_blocks": _count(names, "encoder.conv_blocks.0.res.{}.conv1.weight"),
        "z_channels": shape("encoder.conv_out.weight")[0],
        "codebook_size": codes,
        "codebook_dim": width,
    }


def finite_pixels(pixels: Tensor) -> Tensor:
    """Return pixels as they are; raises :class:`ModelError` where one is not a number.

    For :meth:`Family.pixels`: integers no longer show it, and an image of NaN looks like one of black.
    """
    if pixels.is_meta or bool(pixels.isfinite().all()):
        return pixels
    raise ModelError(
        "the image tokenizer's pixels are not finite, so there is no image: its weights are damaged or "
        "their values overflow; fetch them again and compare their checksum"
    )


class VQFamily(Family[ManifestT]):
    """A family whose images a :class:`~lantern_accel.nn.vq.VQModel` decodes from tokens alone."""

    #: Pixels of the images that are decoded together.
    pixels_at_once: ClassVar[int]
    #: How pixels in [-1, 1] become integers.
    to_uint8 = staticmethod(chameleon_pixels_to_uint8)
    #: What keys of Meta's image tokenizers begin with in a file of all parts; None: they are LlamaGen's.
    vq_prefix: ClassVar[str | None] = None

    def names(self, part: str, checkpoint: Checkpoint, manifest: ManifestT) -> dict[str, str]:
        if part != "vq" or self.vq_prefix is None:
            return super().names(part, checkpoint, manifest)
        return tokenizer_names(checkpoint, self.vq_prefix, self.rules.get(part, ()))

    def pixels(self, model: Model[ManifestT], tokens: Tensor, shape: Hashable = None) -> Tensor:
        """Decode codes in float32, whatever the target's dtype; what ends a row is dropped."""
        own = model.manifest.grid(None)
        rows, columns = shape[1:] if isinstance(shape, tuple) else own
        codes = tokens.view(len(tokens), rows, -1)[:, :, :columns]
        parts = torch.split(codes, self.pixels_together(model))
        return torch.cat([self.to_uint8(finite_pixels(model.vq.decode(p))) for p in parts])

    def pixels_together(self, model: Model[ManifestT]) -> int:
        """Bound the decoder's activations, which would take more than decoding the tokens did."""
        width, height = self.image_size(model.manifest)
        return max(1, self.pixels_at_once // (width * height))

    def codebook(self, model: Model[ManifestT]) -> tuple[Tensor, bool]:
        return model.vq.quantize.embedding.weight, model.vq.config.l2_norm
