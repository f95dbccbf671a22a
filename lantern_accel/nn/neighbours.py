"""Neighbour tables: for every code, its nearest codes in the codebook, itself excluded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from lantern_accel.errors import StrategyError
from lantern_accel.files import read_tensors, write_tensors

#: Codebooks up to this size are sorted whole: fast enough, and no value is looked at.
SORTED = 4096
#: Distances that are held at once, 2 MB; sorting them takes a few times as much.
AT_ONCE = 2**18


def neighbour_table(codebook: Tensor, k: int) -> Tensor:
    """Return the ``k`` nearest codes of each code, nearest first, int32 ``[V, k]``.

    ``codebook``: ``[V, d]`` in the space in which distance is measured (Euclidean). Equal distances
    go to the lower code. Few rows are worked on at once, so that little memory is taken, whatever V
    is. Raises :class:`StrategyError` where k is not below V.
    """
    size = codebook.shape[0]
    if not 0 < k < size:
        raise StrategyError(
            f"k = {k} neighbours cannot be had from a codebook of {size} codes; k must be between 1 "
            f"and {size - 1}"
        )
    book = codebook.double()
    square = book.square().sum(-1)
    chunk = min(max(AT_ONCE // size, 8), 256)
    # Made first: rows kept from between the large temporary tensors would split the heap.
    table = torch.empty(size, k, dtype=torch.int32, device=codebook.device)
    for start in range(0, size, chunk):
        part = book[start : start + chunk]
        distance = square[start : start + chunk, None] + square
        distance -= 2 * part @ book.t()
        here = torch.arange(len(part))
        distance[here, start + here] = float("inf")
        if size <= SORTED:
            nearest = distance.sort(dim=-1, stable=True).indices[:, :k]
        else:
            nearest = _nearest(distance, k)
        table[start : start + chunk] = nearest
    return table


def _nearest(distance: Tensor, k: int) -> Tensor:
    """Return the columns of the ``k`` smallest of each row ``[n, V]``, equal ones by column."""
    # One more than asked for, to see whether equal distances straddle the last place.
    some = distance.topk(min(k + 1, distance.shape[1]), largest=False)
    by_column = some.indices.sort(dim=-1)
    values = some.values.gather(-1, by_column.indices)
    ordered = values.sort(dim=-1, stable=True)
    nearest = by_column.values.gather(-1, ordered.indices)[:, :k]
    if values.shape[1] > k:
        torn = (ordered.values[:, k - 1] == ordered.values[:, k]).nonzero().flatten()
        if torn.numel():
            full = distance.index_select(0, torn).sort(dim=-1, stable=True)
            nearest.index_copy_(0, torn, full.indices[:, :k])
    return nearest


def cached_neighbour_table(
    codebook: Tensor, k: int, *, normalise: bool, cache: Path | None
) -> Tensor:
    """Return :func:`neighbour_table`, kept on disk under a hash of the codebook, the space and k.

    ``normalise`` measures on the unit sphere, the space that LlamaGen's decoder reads (the official
    tables are measured on the raw rows). A damaged entry is made again.
    """
    book = codebook.detach().float().cpu()
    book = F.normalize(book, dim=-1) if normalise else book
    if cache is None:
        return neighbour_table(book, k)
    digest = hashlib.sha256(book.contiguous().numpy().tobytes()).hexdigest()[:24]
    path = cache / "neighbours" / f"{digest}-k{k}.safetensors"

    def fits(found: Mapping[str, Tensor]) -> bool:
        kept = found["neighbours"]
        right = kept.dtype == torch.int32 and kept.shape == (book.shape[0], k)
        return right and int(kept.min()) >= 0 and int(kept.max()) < book.shape[0]

    entry = read_tensors(path, fits)
    if entry is None:
        entry = {"neighbours": neighbour_table(book, k)}
        write_tensors(path, entry)
    return entry["neighbours"]
