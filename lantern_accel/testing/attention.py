"""Attention over a cache and without one, against float64 on the host, with the mistakes often made."""

from __future__ import annotations

import itertools
from functools import partial

import torch
from torch import Tensor

from lantern_accel.decoding.trees import topology_of
from lantern_accel.device.backend import Backend
from lantern_accel.strategy.trees import TreeTables, parse_drafts, tree_paths
from lantern_accel.testing.result import Compared, Measured, doing
from lantern_accel.testing.tiny import fill_cache, normal, write_all
from lantern_accel.testing.tolerances import FLOAT32, MARGIN, ROUNDING, roundoff, short

#: Heads and widths: of a tiny model, LlamaGen's B and 3B, and of 7B models.
HEADS = ((3, 16), (5, 64), (2, 100), (3, 128))
LAYERS, ROWS, SLOTS = 2, 3, 93
#: Roundings of an exponential and of a quotient, which devices approximate.
EXPONENTIAL = 8


def attention_of(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None = None
) -> Tensor:
    """Return attention in float64: q [R, t, H, d], k and v [R, L, H, d], seen [R, 1, t, >= L]."""
    weights = _scores(q, k, seen, scale).softmax(-1)
    return torch.einsum("rhtl,rlhd->rthd", weights, v.double())


def _scores(q: Tensor, k: Tensor, seen: Tensor, scale: float | None = None) -> Tensor:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("rthd,rlhd->rhtl", q.double(), k.double()) * scale
    return scores.masked_fill(~seen[..., : k.shape[1]], float("-inf"))


def bound_error(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Bound attention's error, of what :func:`attention_of` takes: ``[R, t, H, d]``.

    A score is off by its sum's roundings in float32 and by one to the dtype; a weight by what its score
    is off, a stored weight by a rounding more; and the output, a weighted mean, by what its weights are.
    """
    width = q.shape[-1]
    parts = torch.einsum("rthd,rlhd->rhtl", q.double().abs(), k.double().abs()) * width**-0.5
    scores = _scores(q, k, seen)
    weights = scores.softmax(-1)
    finite = scores.masked_fill(~scores.isfinite(), 0.0).abs()
    off = MARGIN * width**0.5 * FLOAT32 * parts + 2 * ROUNDING[dtype] * finite
    off = off.masked_fill(weights == 0, 0.0).amax(-1, keepdim=True)
    length = k.shape[1]
    each = 2 * off + 2 * ROUNDING[dtype] + MARGIN * FLOAT32 * (EXPONENTIAL + length**0.5)
    spread = torch.einsum("rhtl,rlhd->rthd", weights * each, v.double().abs())
    return spread + roundoff(attention_of(q, k, v, seen), dtype)


def mistakes(
    got: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    other: tuple[Tensor, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return attention as it is often got wrong; what hidden slots would weigh in ``got`` is worked out.

    ``other``: keys and values of another layer.
    """
    masks = {
        "not used": torch.ones_like(seen),
        "turned round (True: may be seen)": ~seen,
        "shifted by one slot: each slot has the next one's": seen.roll(-1, -1),
        "shifted by one slot: each slot has the one before's": seen.roll(1, -1),
        "shifted by one query": seen.roll(1, -2),
    }
    found = {f"the mask is {how}": attention_of(q, k, v, mask) for how, mask in masks.items()}
    found |= {
        "scores are not divided by the root of the head's width": attention_of(q, k, v, seen, 1.0),
        "scores are divided by the head's width, not its root": attention_of(
            q, k, v, seen, 1.0 / q.shape[-1]
        ),
        "every head is the first one": attention_of(
            q, k[:, :, :1].expand_as(k), v[:, :, :1].expand_as(v), seen
        ),
        "values of the slot before are read": attention_of(q, k, v.roll(1, 1), seen),
        "keys and values are exchanged": attention_of(q, v, k, seen),
    }
    if other is not None:
        found["another layer's cache is read"] = attention_of(q, other[0], other[1], seen)
    share, leaked = _find_leak(got, q, k, v, seen)
    if leaked is not None:
        found[
            f"hidden slots are not hidden enough: one weighs {share:.2g} of what it would were it seen"
        ] = leaked
    return found


def _find_leak(
    got: Tensor, q: Tensor, k: Tensor, v: Tensor, seen: Tensor
) -> tuple[float, Tensor | None]:
    """Return the weight of hidden slots, of what it would be were they seen, that explains ``got``."""
    seen = seen[..., : k.shape[1]]
    if got.shape != q.shape or not bool((~seen).any()):
        return 0.0, None
    scores = _scores(q, k, torch.ones_like(seen))
    each = (scores - scores.amax(-1, keepdim=True)).exp()
    sums, totals = [], []
    for part in (each * seen, each * ~seen):
        sums.append(torch.einsum("rhtl,rlhd->rthd", part, v.double()))
        totals.append(part.sum(-1).transpose(1, 2).unsqueeze(-1))
    found = got.detach().cpu().double()
    # found (T + s t) = S + s x, for one share s of all: least squares.
    left, right = found * totals[1] - sums[1], sums[0] - found * totals[0]
    share = float((left * right).sum() / left.square().sum())
    if not 0 < share < 0.99:  # all of it: the mask is not used
        return share, None
    return share, (sums[0] + share * sums[1]) / (totals[0] + share * totals[1])


def _compare(
    checked: Compared, got: Tensor, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, what: str,
    other: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Compare attention with float64, of what :func:`attention_of` takes."""
    causes = partial(mistakes, got, q, k, v, seen, other)
    want, near = attention_of(q, k, v, seen), bound_error(q, k, v, seen, q.dtype)
    checked.hold(got, want, near, what, q.dtype, causes)


def cached_attention(backend: Backend) -> Measured:
    """Compare attention of a token, a tree and a window with float64, over a cache written twice."""
    checked = Compared(backend, "attend", "mask")
    tables = TreeTables(tree_paths(parse_drafts("0,1,2,00,01,10,000")))
    (tree,) = topology_of(tables, 1, torch.device("cpu"))["visible"]
    causal = torch.ones(33, 33, dtype=torch.bool).tril()
    for dtype, (heads, width) in itertools.product(checked.dtypes, HEADS):
        k, v = (normal(n, LAYERS, ROWS, SLOTS, heads, width).to(dtype) for n in (1, 2))
        cache = fill_cache(backend, v, k)
        write_all(backend, cache, k, v)  # a copy that attention reads must follow
        capacity = cache.layout.capacity
        # A bucket of the first slots, and the whole cache.
        for kind, block, length in (
            ("a token", causal[:1, :1], 40),
            ("a tree", tree, capacity),
            ("a window", causal, capacity),
        ):
            what = f"attention of {kind}, {heads} heads of {width}, in {short(dtype)}"
            doing(what)
            nodes = len(block)
            seen = torch.zeros(ROWS, 1, nodes, length, dtype=torch.bool)
            for row in range(ROWS):  # rows of other lengths, with a hidden slot in between
                seen[row, ..., : 11 + row] = True
                seen[row, ..., 12 + row : 12 + row + nodes] = block
            q = normal(5, ROWS, nodes, heads, width).to(dtype)
            mask = backend.mask(seen.to(backend.device), dtype)
            got = backend.attend(q.to(backend.device), cache, 1, mask)
            at = min(length, SLOTS)
            (k0, k1), (v0, v1) = k[:, :, :at], v[:, :, :at]
            _compare(checked, got, q, k1, v1, seen[..., :at], what, (k0, v0))
    return checked.to_measured("passes")


def dense(backend: Backend) -> Measured:
    """Compare attention without a cache, causal and under a mask."""
    checked, to = Compared(backend, "attend_dense"), backend.device
    for dtype, (heads, width), length in itertools.product(checked.dtypes, HEADS, (1, 33)):
        what = f"dense attention over {length}, {heads} heads of {width}, in {short(dtype)}"
        doing(what)
        q, k, v = (normal(n, ROWS, length, heads, width).to(dtype) for n in (1, 2, 3))
        causal = torch.ones(length, length, dtype=torch.bool).tril().expand(ROWS, 1, -1, -1)
        holes = (normal(4, ROWS, 1, length, length) > 0.5) | torch.eye(length, dtype=torch.bool)
        for seen, masked in ((causal, False), (holes & causal, True)):
            mask = backend.mask(seen.to(to), dtype) if masked else None
            got = backend.attend_dense(q.to(to), k.to(to), v.to(to), mask)
            _compare(checked, got, q, k, v, seen, what)
    return checked.to_measured("passes without a cache")
