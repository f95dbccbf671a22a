"""Holds what the sampling kernels share: one program works on a row of codes, block by block.

A row is read again at each pass, which the cache serves; nothing is sorted, and every sum is made in
one order, so that equal rows give equal bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Codes that a program takes at once, and its warps.
BLOCK = 4096
WARPS = 8
#: The same of a filter's program times 2 or 4 (:func:`filter_shape`).
FILTER_BLOCK = 4096
#: Threads of a program at most.
MOST_THREADS = 1024

#: The rank of -inf.
LOWEST = tl.constexpr(-2139095041)


def block_of(size: int) -> int:
    """Return how many codes of a row of ``size`` a program takes at once."""
    return int(min(BLOCK, triton.next_power_of_2(size)))


def filter_shape(size: int, cut: bool, warp: int = 32) -> tuple[int, int]:
    """Return the codes that a filter's program takes at once, and its warps; ``cut``: with top-p.

    ``warp``: threads of a warp. As many threads as a multiprocessor has registers for: a filter passes
    over its row some thirty times, and a step has few rows. Without top-p a codebook of 16,384 is one
    piece.
    """
    whole = int(triton.next_power_of_2(size))
    most = (4 if whole == 4 * FILTER_BLOCK and not cut else 2) * FILTER_BLOCK
    block = min(whole, most)
    warps = 8 if block <= FILTER_BLOCK else 16 if cut else 32
    return block, min(warps, MOST_THREADS // warp)


@triton.jit
def rank(x):
    """Return integers in the order of float32 numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unrank(r):
    """Return the float32 number of a rank."""
    bits = r.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def scale_logits(logits, start, temperature, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the codes of a block and their logits over the temperature; -inf behind the row's end."""
    at = start + tl.arange(0, BLOCK)
    x = tl.load(logits + at, mask=at < SIZE, other=float("-inf"))
    return at, tl.div_rn(x, temperature)


@triton.jit
def top_k_bar(logits, temperature, k, low, most, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return a number that the k largest of a row, with all that equal the last, reach.

    At least k of them have rank ``low`` or more, which is returned where no others have.
    """
    high = rank(most).to(tl.int64) + 1
    near: tl.constexpr = 4 if BLOCK >= 4 else BLOCK
    while high - low > 1:
        # Three bars a pass, whose counts are one sum: half as many passes, and one wait in each.
        part = tl.maximum((high - low) >> 2, 1)
        one, two, three = unrank(low + part), unrank(low + 2 * part), unrank(low + 3 * part)
        count = tl.zeros([BLOCK], tl.int32)
        for start in range(0, SIZE, BLOCK):
            _, x = scale_logits(logits, start, temperature, SIZE, BLOCK)
            count += (x >= one).to(tl.int32) + ((x >= two).to(tl.int32) << 10)
            count += (x >= three).to(tl.int32) << 20
        # Neighbours, which one thread holds, are added before counts get wide: registers for a quarter.
        count = tl.sum(tl.reshape(count, [BLOCK // near, near]), 1)
        wide = (count & 1023).to(tl.int64) + ((count >> 10 & 1023).to(tl.int64) << 20)
        found = tl.sum(wide + ((count >> 20).to(tl.int64) << 40), 0)
        first = low
        for nth in tl.static_range(1, 4):
            bar = first + nth * part
            above = (found >> (20 * (nth - 1))) & 0xFFFFF
            low = tl.where((above >= k) & (bar < high), bar, low)
            high = tl.where((above < k) & (bar < high), bar, high)
            high = tl.where((above == k) & (bar < high), bar + 1, high)
    return unrank(low)


@triton.jit
def mass_above(
    logits, temperature, bar, least, most, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Return the weight, relative to the largest, of what is above ``bar`` and at least ``least``."""
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, SIZE, BLOCK):
        _, x = scale_logits(logits, start, temperature, SIZE, BLOCK)
        mass += tl.where((x > bar) & (x >= least), tl.exp(x - most), 0.0)
    return tl.sum(mass, 0)


@triton.jit
def top_p_bar(
    logits, temperature, p, least, most, total, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Return the smallest number above which at most ``p`` of the mass lies."""
    low = tl.full([], LOWEST - 1, tl.int64)
    high = rank(most).to(tl.int64)
    while high - low > 1:
        middle = (low + high) >> 1
        mass = mass_above(logits, temperature, unrank(middle), least, most, SIZE, BLOCK)
        inside = tl.div_rn(mass, total) <= p
        high = tl.where(inside, middle, high)
        low = tl.where(inside, low, middle)
    return unrank(high)


@triton.jit
def pick(weights, uniform, gone, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Sample a code of a row by inverse CDF; codes in the vector ``gone`` count for nothing.

    The first code with a weight whose running sum is above ``uniform`` times the whole; the last code
    of the row where none has a weight.
    """
    total = tl.full([], 0.0, tl.float32)
    for start in range(0, SIZE, BLOCK):
        at = start + tl.arange(0, BLOCK)
        w = tl.load(weights + at, mask=at < SIZE, other=0.0)
        w = tl.where(tl.sum((at[:, None] == gone[None, :]).to(tl.int32), 1) > 0, 0.0, w)
        total += tl.sum(w, 0)
    bar = uniform * total
    before = tl.full([], 0.0, tl.float32)
    code = tl.full([], SIZE - 1, tl.int32)
    found = tl.full([], 0, tl.int32)
    for start in range(0, SIZE, BLOCK):
        at = start + tl.arange(0, BLOCK)
        w = tl.load(weights + at, mask=at < SIZE, other=0.0)
        w = tl.where(tl.sum((at[:, None] == gone[None, :]).to(tl.int32), 1) > 0, 0.0, w)
        after = before + tl.sum(w, 0)
        here = (found == 0) & (after > bar)
        if here:
            above = (before + tl.cumsum(w, 0) > bar) & (w > 0)
            first = tl.min(tl.where(above, at, SIZE), 0)
            # The block's sum is above the bar, but the last running sum may be rounded below it.
            last = tl.max(tl.where(w > 0, at, 0), 0)
            code = tl.where(first < SIZE, first, last)
            found = tl.full([], 1, tl.int32)
        before = after
    return code
