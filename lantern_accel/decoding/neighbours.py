"""Neighbour tables: for every code, its nearest codes in the codebook, itself excluded."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lantern_accel.errors import StrategyError

Space = Literal["decoder", "raw"]


def neighbour_table(codebook: Tensor, k: int, chunk: int = 1024) -> Tensor:
    """Return the ``k`` nearest codes of each code, nearest first, int32 ``[V, k]``.

    ``codebook``: ``[V, d]`` in the space in which distance is measured (Euclidean). Equal distances
    go to the lower code. Raises :class:`StrategyError` where k is not below V.
    """
    size = codebook.shape[0]
    if not 0 < k < size:
        raise StrategyError(
            f"k = {k} neighbours cannot be had from a codebook of {size} codes; k must be between 1 "
            f"and {size - 1}"
        )
    book = codebook.double()
    square = book.square().sum(-1)
    rows = []
    for start in range(0, size, chunk):
        part = book[start : start + chunk]
        distance = square[start : start + chunk, None] + square - 2 * part @ book.t()
        here = torch.arange(len(part))
        distance[here, start + here] = float("inf")
        rows.append(distance.sort(dim=-1, stable=True).indices[:, :k].int())
    return torch.cat(rows)


def cached_neighbour_table(
    codebook: Tensor, k: int, *, normalise: bool, cache: Path | None
) -> Tensor:
    """Return :func:`neighbour_table`, kept on disk under a hash of the codebook, the space and k.

    ``normalise`` measures on the unit sphere, the space that LlamaGen's decoder reads (the official
    tables are measured on the raw rows). A cache that cannot be written is not an error.
    """
    book = codebook.detach().float().cpu()
    book = F.normalize(book, dim=-1) if normalise else book
    if cache is None:
        return neighbour_table(book, k)
    digest = hashlib.sha256(book.contiguous().numpy().tobytes()).hexdigest()[:24]
    path = cache / "neighbours" / f"{digest}-k{k}.safetensors"
    from safetensors.torch import load_file, save

    if path.is_file():
        try:
            table = load_file(path)["neighbours"]
            if table.shape == (book.shape[0], k):
                return table
        except Exception:  # a damaged cache entry is made anew
            path.unlink(missing_ok=True)
    table = neighbour_table(book, k)
    try:
        from lantern_accel.files import write_whole

        write_whole(path, lambda stream: stream.write(save({"neighbours": table.contiguous()})))
    except OSError:
        pass
    return table
