"""What follows the rows of a pass where noise decides, in two Triton kernels; two more draft afresh.

The first makes the noise of all positions and keeps the best code of each piece of a row; it stores the
rows that later drafts are sampled from. The second, one program an image, joins the pieces, compares a
window's drafts with the codes that were chosen, looks up what earlier passes chose behind other tokens,
and writes tokens, lengths and counters. The others draw the drafts that no pass has seen. All of it is
what :mod:`lantern_accel.decoding.sources.tree` does by operators, to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lantern_accel.device.plan import Buffers, NoDrafts, WindowPlan
from lantern_accel_cuda.kernels.counters import counters_of
from lantern_accel_cuda.kernels.operators import operator
from lantern_accel_cuda.kernels.race import PIECE, WARPS, exponential_of, score_of, threefry

#: Below every score; behind a row's end.
_NONE = tl.constexpr(-1.0)
#: Positions of a window, at most: a program has them all in its registers.
MOST_POSITIONS = 64


@triton.jit
def best_of(
    weights, keys, position, best, codes, to,
    SIZE: tl.constexpr, HALF: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Write the best score of a piece of a row and its code; with ``KEEP`` the piece itself."""
    piece = tl.program_id(1)
    key0 = tl.load(keys).to(tl.uint32, bitcast=True)
    key1 = tl.load(keys + 1).to(tl.uint32, bitcast=True)
    number = tl.load(keys + 2).to(tl.uint32, bitcast=True)
    half = piece * HALF + tl.arange(0, HALF)
    counter = (position.to(tl.int32).to(tl.uint32, bitcast=True) << 16) | half.to(
        tl.uint32, bitcast=True
    )
    even, odd = threefry(key0, key1, counter, tl.zeros([HALF], tl.uint32) + number)
    a = tl.load(weights + 2 * half, mask=2 * half < SIZE, other=0.0)
    b = tl.load(weights + 2 * half + 1, mask=2 * half + 1 < SIZE, other=0.0)
    if KEEP:
        tl.store(to + 2 * half, a, mask=2 * half < SIZE)
        tl.store(to + 2 * half + 1, b, mask=2 * half + 1 < SIZE)
    first = score_of(a, 2 * half, exponential_of(even), SIZE)
    second = score_of(b, 2 * half + 1, exponential_of(odd), SIZE)
    high = tl.max(tl.maximum(first, second), 0)
    lower = tl.where(second == high, 2 * half + 1, 2 * SIZE + 1)
    lower = tl.where(first == high, 2 * half, lower)
    place = tl.program_id(0) * tl.num_programs(1) + piece
    tl.store(best + place, high)
    tl.store(codes + place, tl.min(lower, 0))


@triton.jit
def join_pieces(best, codes, image, i, count, pieces, SIZE: tl.constexpr, BLOCK_P: tl.constexpr):
    """Return the codes of an image's rows ``i``: the best of their pieces, the lower of equal ones."""
    p = tl.arange(0, BLOCK_P)
    inside = ((i >= 0) & (i < count))[:, None] & (p < pieces)[None, :]
    at = (image * count + i)[:, None] * pieces + p[None, :]
    score = tl.load(best + at, mask=inside, other=_NONE - 1.0)
    code = tl.load(codes + at, mask=inside, other=2 * SIZE + 1)
    high = tl.max(score, 1)
    found = tl.min(tl.where(score == high[:, None], code, 2 * SIZE + 1), 1)
    return tl.minimum(found, SIZE - 1)


@triton.jit
def find_earlier(
    row_keys, row_previous, image, want, earlier, number, passes, wide, BLOCK_W: tl.constexpr
):
    """Return where earlier passes chose behind the pasts ``want, earlier``, and what each is worth."""
    e = tl.arange(0, BLOCK_W)
    held = image * passes * wide
    worth = tl.zeros_like(want)
    entry = tl.zeros_like(want)
    for order in range(passes):
        at = held + order * wide + e
        key = tl.load(row_keys + at, mask=e < wide, other=-1).to(tl.int64)
        past = tl.load(row_previous + at, mask=e < wide, other=-1).to(tl.int32)
        age = (order - number - 1) % passes
        age = tl.where(age < 0, age + passes, age)
        hit = (key[None, :] == want[:, None]) & (e < wide)[None, :]
        agrees = past[None, :] == earlier[:, None]
        value = tl.where(hit, tl.where(agrees, 1 + age + passes, 1 + age), 0).to(tl.int64)
        high = tl.max(value, 1)
        first = tl.min(tl.where(value == high[:, None], e[None, :], BLOCK_W), 1)
        entry = tl.where(high > worth, order * wide + first, entry)
        worth = tl.maximum(worth, high)
    return entry, worth


@triton.jit(do_not_specialize=["count", "rows"])
def _choose(
    weights, keys, length, place, q, best, codes, count, rows,
    SIZE: tl.constexpr, HALF: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    image = row // count
    position = tl.load(length + image) + 1 + row % count
    to = q
    if KEEP:
        to = q + (image * rows + tl.load(place + position)) * SIZE
    best_of(weights + row * SIZE, keys + 3 * image, position, best, codes, to, SIZE, HALF, KEEP)


@triton.jit(
    do_not_specialize=[
        "images",
        "count",
        "pieces",
        "last",
        "bins",
        "passes",
        "wide",
    ]
)
def _advance(
    best, codes, weights, tokens, length, newest, root, step, steps, histogram, last_length,
    finite, holds, report, row_keys, row_previous, row_tokens, lock,
    images, count, pieces, last, bins, passes, wide,
    SIZE: tl.constexpr, WINDOW: tl.constexpr, RECALL: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_L)
    live = i < count
    own = tokens + image * (
        last + 2
    )  # positions up to ``last``, and one for what is past the image
    chosen = join_pieces(best, codes, image, i, count, pieces, SIZE, BLOCK_P)
    number = tl.load(step)
    n = tl.load(length + image)
    # One number that is none makes a whole row so.
    sample = tl.load(weights + (image * count + i) * SIZE, mask=live, other=0.0)
    total = tl.sum(sample, 0)
    nothing = total - total
    sound = (tl.load(holds + image).to(tl.int32) > 0) & (nothing == nothing)
    passed = tl.load(finite + image) + sound.to(tl.int32)
    # The window as the pass saw it, and what each draft has on its right.
    x = tl.load(own + tl.minimum(n + i, last + 1), mask=live, other=0).to(tl.int32)
    after = tl.load(own + tl.minimum(n + i + 1, last + 1), mask=live, other=0).to(tl.int32)
    refused = (i < count - 1) & (after != chosen)
    kept = tl.min(tl.where(refused, i, count - 1), 0)
    result = chosen
    if RECALL:
        known = tl.load(own + n).to(tl.int32)
        one = join_pieces(best, codes, image, i - 1, count, pieces, SIZE, BLOCK_P)
        two = join_pieces(best, codes, image, i - 2, count, pieces, SIZE, BLOCK_P)
        left = tl.where(i == 0, known, one)
        earlier = tl.where(i <= 1, known, two)
        want = (n + 1 + i).to(tl.int64) * SIZE + left
        held = image * passes * wide
        entry, worth = find_earlier(
            row_keys, row_previous, image, want, earlier, number, passes, wide, BLOCK_W
        )
        again = tl.load(row_tokens + held + entry, mask=worth > 0, other=0).to(tl.int32)
        behind = live & (i > kept) & (left != x) & (worth > 0)
        result = tl.where(behind, again, chosen)
        before = tl.load(own + tl.maximum(tl.minimum(n + i - 1, last + 1), n), mask=live, other=0)
        tl.debug_barrier()
        at = held + (number % passes) * wide + i
        tl.store(row_tokens + at, chosen.to(row_tokens.dtype.element_ty), mask=live)
        here = (n + 1 + i).to(tl.int64) * SIZE + x
        tl.store(row_keys + at, here.to(row_keys.dtype.element_ty), mask=live)
        tl.store(row_previous + at, before, mask=live)
    tl.debug_barrier()
    to = own + tl.minimum(n + 1 + i, last + 1)
    tl.store(to, result.to(tokens.dtype.element_ty), mask=live)
    open_ = n < last
    now = tl.minimum(n + kept + 1, last)
    gained = now - n
    if gained > 0:
        bin_ = histogram + image * bins + gained - 1
        tl.store(bin_, tl.load(bin_) + 1)
    tl.store(steps + image, tl.load(steps + image) + open_.to(tl.int32))
    tl.store(last_length + image, gained - 1)
    tl.store(length + image, now)
    tl.store(holds + image, sound)
    tl.store(finite + image, passed)
    tl.store(report + image, now)
    tl.store(report + images + image, passed)
    if WINDOW:
        seen = tl.maximum(tl.load(newest + image), n + count)
        tl.store(newest + image, seen)
    else:
        if open_:
            tl.store(root + image, tl.sum(tl.where(i == 0, chosen, 0), 0).to(root.dtype.element_ty))
    tl.debug_barrier()
    if tl.atomic_add(lock, 1, sem="acq_rel") == images - 1:
        tl.store(lock, 0)
        tl.store(step, number + 1)


@triton.jit
def _source(newest, target, last, width, turns):
    """Return the position that a fresh draft of ``target`` is taken from."""
    seen = tl.minimum(newest, last)
    above = tl.minimum(target, last) - width
    for _ in range(turns):  # a window of several rows
        above = tl.where(above > seen, above - width, above)
    return tl.where(above < 0, seen, above)


@triton.jit(do_not_specialize=["count", "rows", "last", "width", "turns"])
def _fresh(
    q, keys, newest, place, best, codes, count, rows, last, width, turns,
    SIZE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    image = row // count
    seen = tl.load(newest + image)
    target = seen + 1 + row % count
    near = _source(seen, target, last, width, turns)
    weights = q + (image * rows + tl.load(place + near)) * SIZE
    best_of(weights, keys + 3 * image, target, best, codes, weights, SIZE, HALF, False)


@triton.jit(do_not_specialize=["count", "pieces", "last"])
def _best_drafts(
    best, codes, newest, tokens, count, pieces, last,
    SIZE: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_L)
    code = join_pieces(best, codes, image, i, count, pieces, SIZE, BLOCK_P)
    to = tl.minimum(tl.load(newest + image) + 1 + i, last + 1)
    at = tokens + image * (last + 2) + to
    tl.store(at, code.to(tokens.dtype.element_ty), mask=i < count)


@dataclass(frozen=True)
class Advance:
    """A step behind its rows, on static buffers: ``count`` positions an image, ``last`` of the image.

    ``source``: a window without a head, or no drafts.
    """

    buffers: Buffers
    source: NoDrafts | WindowPlan
    count: int
    last: int

    def __call__(self, weights: Tensor) -> None:
        """Choose tokens from ``weights``, float32 ``[B, T, V]``, and write what follows from them."""
        b, s = self.buffers, self.source
        assert b.keys is not None  # else the plan is refused
        place = newest = root = b.length  # what a step does not have is not read
        q: Tensor | None = None
        recall: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
        if isinstance(s, WindowPlan):
            place, newest, q = s.place, s.newest, s.q
            if self.count > 1:
                recall = s.row_keys, s.row_previous, s.row_tokens
        else:
            root = s.root
        counters = [b.step, b.steps, b.histogram, b.last_length, b.finite, b.holds, b.report]
        _launch_choose(
            weights, b.keys, b.length, place, q, b.tokens, newest, root, counters, *recall,
            self.count, self.last, isinstance(s, WindowPlan),
        )  # fmt: skip
        if isinstance(s, WindowPlan) and self.count > 1 and s.fresh != "given":
            assert s.q is not None
            _launch_sample(
                s.q, b.keys, s.newest, s.place, b.tokens, self.count - 1, self.last, s.width
            )


def pieces_of(size: int) -> tuple[int, int]:
    """Return half the codes of a piece, and the pieces of a row."""
    half = min(PIECE, triton.next_power_of_2(max(size, 2))) // 2
    return half, int(triton.cdiv(size, 2 * half))


def scores(rows: int, pieces: int, like: Tensor) -> tuple[Tensor, Tensor]:
    best = torch.empty(rows * pieces, dtype=torch.float32, device=like.device)
    return best, torch.empty(rows * pieces, dtype=torch.int32, device=like.device)


@operator(
    "choose_tokens(Tensor weights, Tensor keys, Tensor(a!) length, Tensor place, Tensor(b!)? q,"
    " Tensor(c!) tokens, Tensor(d!) newest, Tensor(e!) root, Tensor(f!)[] counters,"
    " Tensor(g!)? row_keys, Tensor(h!)? row_previous, Tensor(i!)? row_tokens, int count, int last,"
    " bool window) -> ()"
)
def _launch_choose(
    weights: Tensor, keys: Tensor, length: Tensor, place: Tensor, q: Tensor | None, tokens: Tensor,
    newest: Tensor, root: Tensor, counters: list[Tensor], row_keys: Tensor | None,
    row_previous: Tensor | None, row_tokens: Tensor | None, count: int, last: int, window: bool,
) -> None:  # fmt: skip
    weights = weights.contiguous()
    images, size = len(weights), weights.shape[-1]
    half, pieces = pieces_of(size)
    best, codes = scores(images * count, pieces, weights)
    step, steps, histogram, last_length, finite, holds, report = counters
    recalls = row_keys is not None
    passes, wide = (1, 1) if row_keys is None else row_keys.shape[1:]
    with torch.cuda.device_of(weights):
        _choose[(images * count, pieces)](
            weights, keys, length, place, weights if q is None else q, best, codes,
            count, 1 if q is None else q.shape[1],
            SIZE=size, HALF=half, KEEP=q is not None, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        _advance[(images,)](
            best, codes, weights, tokens, length, newest, root, step, steps, histogram, last_length,
            finite, holds, report, tokens if row_keys is None else row_keys,
            tokens if row_previous is None else row_previous,
            tokens if row_tokens is None else row_tokens, counters_of(weights.device, 1),
            images, count, pieces, last, histogram.shape[1], passes, wide,
            SIZE=size, WINDOW=window, RECALL=recalls,
            BLOCK_L=triton.next_power_of_2(count), BLOCK_P=triton.next_power_of_2(pieces),
            BLOCK_W=triton.next_power_of_2(wide), num_warps=4,
        )  # fmt: skip


@operator(
    "draft_tokens(Tensor q, Tensor keys, Tensor newest, Tensor place, Tensor(a!) tokens, int count,"
    " int last, int width) -> ()"
)
def _launch_sample(
    q: Tensor, keys: Tensor, newest: Tensor, place: Tensor, tokens: Tensor, count: int, last: int,
    width: int,
) -> None:  # fmt: skip
    images, rows, size = q.shape
    half, pieces = pieces_of(size)
    best, codes = scores(images * count, pieces, q)
    with torch.cuda.device_of(q):
        _fresh[(images * count, pieces)](
            q, keys, newest, place, best, codes, count, rows, last, width, count // width,
            SIZE=size, HALF=half, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        _best_drafts[(images,)](
            best, codes, newest, tokens, count, pieces, last,
            SIZE=size, BLOCK_L=triton.next_power_of_2(count),
            BLOCK_P=triton.next_power_of_2(pieces), num_warps=4,
        )  # fmt: skip
