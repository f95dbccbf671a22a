"""A draft head's guesses behind a pass, in three Triton kernels for each place of the window.

The first makes the logits of some codes, and the second their weights and the best code of each piece
under the noise of the place. The third joins the pieces, takes what a pass has chosen behind the token
that is there now, and writes the draft, which the next place reads. It is what
:class:`~lantern_accel.decoding.sources.head.HeadWindow` does by operators; sums may end in other bits,
so that a guess may differ, and the image does not.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from lantern_accel.device.plan import Buffers, GuessHead, WindowPlan
from lantern_accel_cuda.kernels.advance import best_of, find_earlier, join_pieces, pieces_of, scores
from lantern_accel_cuda.kernels.operators import operator
from lantern_accel_cuda.kernels.race import WARPS

#: The most of what makes the logits that a program has in its registers, and numbers of it at once.
MOST_RANK = 256
_AT_ONCE = 4096


@triton.jit
def _token(own, at, there, NONE: tl.constexpr):
    code = tl.load(own + tl.maximum(at, 0)).to(tl.int32)
    return tl.where(there, code, NONE).to(tl.int64)


@triton.jit(do_not_specialize=["ahead", "nodes", "depths", "hidden", "rank", "grid", "last"])
def _logits(
    table, places, start, mid, head, bias, known, seen, tokens, began, window, last_length, out, peak,
    ahead, nodes, depths, hidden, rank, grid, last,
    SIZE: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    image, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own = tokens + image * (last + 2)
    count = tl.maximum(tl.load(last_length + image), 0) + 1
    node = count + ahead - 1
    inside = node < nodes
    cell = tl.minimum(tl.load(began + image) + count + ahead, last)
    column = cell % grid
    left = _token(own, cell - 1, cell >= 1, SIZE)
    second = _token(own, cell - 2, cell >= 2, SIZE)
    above = _token(own, cell - grid, cell >= grid, SIZE)
    right_there = (cell >= grid) & (column < grid - 1)
    right = _token(own, cell - grid + 1, right_there, SIZE)
    corner = _token(own, cell - grid - 1, (cell >= grid + 1) & (column > 0), SIZE)
    node = tl.minimum(node, nodes - 1)
    saw = tl.where(inside, tl.load(window + image * nodes + node), SIZE).to(tl.int64)
    which = tl.minimum(ahead, depths) - 1
    pass_row = seen + (image * nodes + node) * (hidden + rank)
    r = tl.arange(0, BLOCK_R)
    state = tl.load(pass_row + hidden + r, mask=(r < rank) & inside, other=0.0)
    for h0 in range(0, hidden, BLOCK_H):
        h = h0 + tl.arange(0, BLOCK_H)
        live = h < hidden
        x = tl.load(pass_row + h, mask=live & inside, other=0.0)
        step = (SIZE + 1) * hidden
        x += tl.load(table + left * hidden + h, mask=live, other=0.0)
        x += tl.load(table + step + second * hidden + h, mask=live, other=0.0)
        x += tl.load(table + 2 * step + above * hidden + h, mask=live, other=0.0)
        x += tl.load(table + 3 * step + right * hidden + h, mask=live, other=0.0)
        x += tl.load(table + 4 * step + corner * hidden + h, mask=live, other=0.0)
        x += tl.load(table + 5 * step + saw * hidden + h, mask=live, other=0.0)
        x += tl.load(places + cell * hidden + h, mask=live, other=0.0)
        x += tl.load(start + which * hidden + h, mask=live, other=0.0)
        x += tl.load(known + (image * depths + which) * hidden + h, mask=live, other=0.0)
        x = x / (1.0 + tl.exp(-x))
        both = (r < rank)[:, None] & live[None, :]
        w = tl.load(mid + r[:, None] * hidden + h[None, :], mask=both, other=0.0)
        state += tl.sum(w * x[None, :], 1)
    v = piece * BLOCK_V + tl.arange(0, BLOCK_V)
    both = (v < SIZE)[:, None] & (r < rank)[None, :]
    w = tl.load(head + v[:, None] * rank + r[None, :], mask=both, other=0.0)
    logits = tl.sum(w * state[None, :], 1) + tl.load(bias + v, mask=v < SIZE, other=0.0)
    logits = tl.where(v < SIZE, logits, -float("inf"))
    tl.store(out + image * SIZE + v, logits, mask=v < SIZE)
    tl.store(peak + image * tl.num_programs(1) + piece, tl.max(logits, 0))


@triton.jit(do_not_specialize=["ahead", "peaks", "last"])
def _weigh(
    weights, peak, keys, began, last_length, best, codes, least, ahead, peaks, last,
    SIZE: tl.constexpr, HALF: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, BLOCK_P)
    most = tl.max(tl.load(peak + image * peaks + p, mask=p < peaks, other=-float("inf")), 0)
    own = weights + image * SIZE
    v = tl.program_id(1) * 2 * HALF + tl.arange(0, 2 * HALF)
    w = tl.exp(tl.load(own + v, mask=v < SIZE, other=-float("inf")) - most)
    tl.store(own + v, tl.where(w >= least, w, 0.0), mask=v < SIZE)
    tl.debug_barrier()
    count = tl.maximum(tl.load(last_length + image), 0) + 1
    cell = tl.minimum(tl.load(began + image) + count + ahead, last)
    best_of(own, keys + 3 * image, cell, best, codes, own, SIZE, HALF, False)


@triton.jit(
    do_not_specialize=["ahead", "nodes", "depths", "pieces", "last", "passes", "wide"],
)
def _settle(
    best, codes, tokens, began, window, chosen, last_length, step, row_keys, row_previous, row_tokens,
    ahead, nodes, depths, pieces, last, passes, wide,
    SIZE: tl.constexpr, RECALL: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    own = tokens + image * (last + 2)
    i = tl.arange(0, 2)  # one row, and one that is not there
    guess = join_pieces(best, codes, image, i, 1, pieces, SIZE, BLOCK_P)
    count = tl.maximum(tl.load(last_length + image), 0) + 1
    node = count + ahead - 1
    inside = node < nodes
    at = image * nodes + tl.minimum(node, nodes - 1)
    place = tl.load(began + image) + count + ahead
    left = tl.load(own + tl.minimum(place - 1, last + 1)).to(tl.int32)
    before = tl.load(own + tl.minimum(place - 2, last + 1)).to(tl.int32)
    saw = tl.where(inside, tl.load(window + at).to(tl.int32), SIZE)
    passed = tl.load(chosen + at).to(tl.int32)
    guess = tl.where(inside & (ahead > depths), passed, guess)
    if RECALL:
        want = place.to(tl.int64) * SIZE + left + tl.zeros([2], tl.int64)
        entry, worth = find_earlier(
            row_keys, row_previous, image, want, before + tl.zeros([2], tl.int32),
            tl.load(step), passes, wide, BLOCK_W,
        )  # fmt: skip
        held = row_tokens + image * passes * wide + entry
        guess = tl.where(worth > 0, tl.load(held, mask=worth > 0, other=0).to(tl.int32), guess)
    guess = tl.where(saw == left, passed, guess)
    to = own + tl.minimum(place, last + 1) + tl.zeros([2], tl.int64)
    tl.store(to, guess.to(tokens.dtype.element_ty), mask=i < 1)


class Guesses:
    """What a window's draft head does behind a pass, on static buffers; ``last`` of the image."""

    def __init__(self, buffers: Buffers, source: WindowPlan, count: int, last: int) -> None:
        self.buffers, self.source, self.count, self.last = buffers, source, count, last
        self.ahead = torch.arange(count, dtype=buffers.length.dtype, device=buffers.length.device)

    @property
    def rest(self) -> WindowPlan:
        """The window that the kernels of a step write: without fresh drafts, and without recall."""
        return replace(
            self.source, fresh="given", row_keys=None, row_previous=None, row_tokens=None
        )

    def changed_buffers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return what a step changes: lengths ``[B]``, the window ``[B, L]`` and the step's number."""
        began = self.buffers.length.clone()
        return began, self._read(began), self.buffers.step.clone()

    def _read(self, first: Tensor) -> Tensor:
        at = (first.unsqueeze(1) + self.ahead).clamp(max=self.last + 1)
        return self.buffers.tokens.gather(1, at)

    def __call__(self, noted: tuple[Tensor, Tensor, Tensor], guided: Tensor) -> None:
        """Guess behind a step that began with ``noted``, of states ``guided`` float32 ``[B, L, D]``."""
        (began, window, number), b, s = noted, self.buffers, self.source
        head, feature = s.head, s.feature
        assert head is not None and feature is not None and b.keys is not None
        kept = b.last_length.clamp(min=0).view(-1, 1, 1).expand(-1, 1, guided.shape[-1])
        feature.copy_(guided.gather(1, kept.long()).squeeze(1))
        if self.count == 1:
            return
        chosen = self._read(began + 1)
        _launch_guess(
            _weights(head), F.linear(feature, head.state), F.linear(guided, head.seen), b.keys, began,
            window, chosen, b.last_length, number, b.tokens, s.row_keys, s.row_previous, s.row_tokens,
            head.grid, head.least, self.last,
        )  # fmt: skip
        if s.row_keys is None or s.row_previous is None or s.row_tokens is None:
            return
        passes, wide = s.row_keys.shape[1:]
        at = number % passes * wide + self.ahead
        places = began.unsqueeze(1) + 1 + self.ahead
        previous = torch.cat((window[:, :1], window[:, :-1]), dim=1)
        key = places * head.bias.shape[0] + window
        for row, value in (
            (s.row_tokens, chosen), (s.row_keys, key), (s.row_previous, previous)
        ):  # fmt: skip
            row.view(len(row), -1).index_copy_(1, at, value)


def _weights(head: GuessHead) -> list[Tensor]:
    return [head.codes, head.place, head.start, head.mid, head.head, head.bias]


@operator(
    "guess_tokens(Tensor[] head, Tensor known, Tensor seen, Tensor keys, Tensor began, Tensor window,"
    " Tensor chosen, Tensor last_length, Tensor step, Tensor(a!) tokens, Tensor? row_keys,"
    " Tensor? row_previous, Tensor? row_tokens, int grid, float least, int last) -> ()"
)
def _launch_guess(
    head: list[Tensor], known: Tensor, seen: Tensor, keys: Tensor, began: Tensor, window: Tensor,
    chosen: Tensor, last_length: Tensor, step: Tensor, tokens: Tensor, row_keys: Tensor | None,
    row_previous: Tensor | None, row_tokens: Tensor | None, grid: int, least: float, last: int,
) -> None:  # fmt: skip
    images, nodes = window.shape
    table, places, start, mid, out, bias = head
    (rank, hidden), size, depths = mid.shape, len(bias), len(start)
    block_r = triton.next_power_of_2(max(rank, 2))
    block_v = max(_AT_ONCE // block_r, 16)
    peaks = triton.cdiv(size, block_v)
    half, pieces = pieces_of(size)
    best, codes = scores(images, pieces, known)
    logits, peak = known.new_empty(images, size), known.new_empty(images, peaks)
    recalls = row_keys is not None
    passes, wide = (1, 1) if row_keys is None else row_keys.shape[1:]
    with torch.cuda.device_of(known):
        for ahead in range(1, nodes):
            _logits[(images, peaks)](
                table, places, start, mid, out, bias, known, seen, tokens, began, window, last_length,
                logits, peak, ahead, nodes, depths, hidden, rank, grid, last,
                SIZE=size, BLOCK_V=block_v, BLOCK_R=block_r,
                BLOCK_H=min(triton.next_power_of_2(hidden), 32), num_warps=WARPS,
            )  # fmt: skip
            _weigh[(images, pieces)](
                logits, peak, keys, began, last_length, best, codes, least, ahead, peaks, last,
                SIZE=size, HALF=half, BLOCK_P=triton.next_power_of_2(peaks), num_warps=WARPS,
                enable_fp_fusion=False,
            )  # fmt: skip
            _settle[(images,)](
                best, codes, tokens, began, window, chosen, last_length, step,
                tokens if row_keys is None else row_keys,
                tokens if row_previous is None else row_previous,
                tokens if row_tokens is None else row_tokens,
                ahead, nodes, depths, pieces, last, passes, wide,
                SIZE=size, RECALL=recalls, BLOCK_P=triton.next_power_of_2(pieces),
                BLOCK_W=triton.next_power_of_2(wide), num_warps=1,
            )  # fmt: skip
