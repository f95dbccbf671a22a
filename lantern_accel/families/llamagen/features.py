"""Caption features as LlamaGen takes them: valid ones at the right end, zeros before, and a mask.

Also a source of features that needs no text encoder here: a file made elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lantern_accel.errors import RequestError
from lantern_accel.families.base import TextSource


def align_right(rows: Sequence[Tensor], prefix: int) -> tuple[Tensor, Tensor]:
    """Return features ``[valid, C]`` of each prompt behind zeros, ``[n, prefix, C]``, and their mask.

    LlamaGen's ``sample_t2i.py`` turns T5's right-padded features in the same way.
    """
    features = torch.zeros(len(rows), prefix, rows[0].shape[1])
    mask = torch.zeros(len(rows), prefix, dtype=torch.bool)
    for i, row in enumerate(rows):
        features[i, prefix - len(row) :] = row
        mask[i, prefix - len(row) :] = True
    return features, mask


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
        if (mask.int().diff(dim=1) != 0).sum(dim=1).max() > 1:
            raise RequestError(f"{path}: the mask has gaps; its ones must be together, at one side")
        longest = int(mask.sum(dim=1).max())
        if longest > prefix:
            raise RequestError(
                f"{path}: a prompt has features of {longest} tokens, the model's prefix holds {prefix}; "
                "cut its text, and make them again"
            )
        self.path = path
        rows = [row[seen] for row, seen in zip(features, mask, strict=True)]
        self.features, self.mask = align_right(rows, prefix)

    def encode(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return the file's rows; raises :class:`RequestError` where it has another number of them."""
        if len(prompts) != len(self.mask):
            raise RequestError(
                f"{self.path} has features of {len(self.mask)} prompts, but {len(prompts)} were given; "
                "give one prompt a row, in the file's order"
            )
        return self.features, self.mask


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
