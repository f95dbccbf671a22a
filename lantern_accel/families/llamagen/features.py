"""Caption features as LlamaGen takes them: valid ones at the right end, zeros before, and a mask.

Also a source of features that needs no text encoder here: a file made elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lantern_accel.errors import RequestError
from lantern_accel.families.base import TextSource


def left_pad(features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate right-padded features to the right end and zero the pads; ``[n, T, C]`` and bool ``[n, T]``.

    ``mask`` has ones first, as T5's tokenizer gives it. LlamaGen's ``sample_t2i.py`` does the same: the
    first ``valid`` rows move behind the rest, the mask is flipped, and the two are multiplied.
    """
    mask = mask.bool()
    length = mask.shape[1]
    index = (torch.arange(length, device=mask.device) + mask.sum(1, keepdim=True)) % length
    turned = features.gather(1, index.unsqueeze(-1).expand_as(features))
    flipped = mask.flip(1)
    return turned * flipped.unsqueeze(-1).to(turned.dtype), flipped


def fit_prefix(features: Tensor, mask: Tensor, prefix: int) -> tuple[Tensor, Tensor]:
    """Pad left-padded features to ``prefix`` positions; raises :class:`RequestError` if longer."""
    extra = prefix - mask.shape[1]
    if extra < 0:
        raise RequestError(
            f"the features have {mask.shape[1]} positions, the model's prefix holds {prefix}; cut them "
            "before padding"
        )
    return F.pad(features, (0, 0, extra, 0)), F.pad(mask, (extra, 0))


class FeatureFile(TextSource):
    """Features of prompts from a ``.safetensors`` or ``.npz`` file, in place of a text encoder.

    The file holds ``embeddings [n, T, C]`` and ``mask [n, T]`` (1: a token), padded on either side, a
    row a prompt in the order in which the prompts are given.
    """

    def __init__(self, path: Path, prefix: int, width: int) -> None:
        found = _read(path)
        names = {"embeddings", "mask"}
        if not names <= set(found):
            raise RequestError(
                f"{path} holds {', '.join(sorted(found)) or 'nothing'}; it needs embeddings [n, T, C] "
                "and mask [n, T]"
            )
        features, mask = found["embeddings"].float(), found["mask"].bool()
        if features.dim() != 3 or mask.shape != features.shape[:2]:
            raise RequestError(
                f"{path}: embeddings {list(features.shape)} and mask {list(mask.shape)} do not fit; "
                "they are [n, T, C] and [n, T]"
            )
        if features.shape[2] != width:
            raise RequestError(
                f"{path}: the features have width {features.shape[2]}, the model takes {width}; make "
                "them with the model's own text encoder"
            )
        if not features[mask].isfinite().all():
            raise RequestError(
                f"{path}: the features are not finite, so they were damaged; make them again"
            )
        if not mask.any(1).all():
            raise RequestError(f"{path}: a row of the mask has no token; every prompt needs one")
        self.path = path
        self.features, self.mask = fit_prefix(*_align(path, features, mask), prefix)

    def encode(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return the file's rows; raises :class:`RequestError` where it has another number of them."""
        if len(prompts) != len(self.mask):
            raise RequestError(
                f"{self.path} has features of {len(self.mask)} prompts, but {len(prompts)} were given; "
                "give one prompt a row, in the file's order"
            )
        return self.features, self.mask


def _align(path: Path, features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    ordered = mask.int()
    if bool((ordered.diff(dim=1) <= 0).all()):  # ones first
        return left_pad(features, mask)
    if bool((ordered.diff(dim=1) >= 0).all()):  # ones last
        return features * mask.unsqueeze(-1), mask
    raise RequestError(f"{path}: the mask has gaps; its ones must be together, at one side")


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise RequestError(f"there is no file of embeddings {path}; check the path")
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(path))
    except Exception as error:
        raise RequestError(f"{path} cannot be read as embeddings: {error}") from None
    raise RequestError(
        f"{path} is not a .safetensors or .npz file; save the embeddings as one of them"
    )
