"""Rotary positions against float64 on the host: the rotation, and the write to the cache behind it."""

from __future__ import annotations

import itertools
from functools import partial

import torch
from torch import Tensor

from lantern_accel.device.backend import Backend
from lantern_accel.nn.rotary import rotary_table
from lantern_accel.testing.result import Compared, Failed, Measured, compare, doing
from lantern_accel.testing.tiny import fill_cache, normal
from lantern_accel.testing.tolerances import roundoff, short

#: Heads and their widths: of LlamaGen's B and 3B, of 7B models, and of a tiny one.
HEADS = ((12, 64), (5, 100), (3, 128), (2, 16))
ROWS, LAYERS, CAPACITY = 2, 2, 80
#: Positions of a pass: a token, a tree, a window with its prompt.
COUNTS = (1, 9, 64)


def angles(count: int, width: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return ``cos, sin``, float32 ``[rows, count, 1, d/2]``, of other positions in each row."""
    starts = (3 * torch.arange(rows)).unsqueeze(1)
    positions = (7 + starts + 11 * torch.arange(count)).flatten()
    tables = rotary_table(positions, width, 10000.0, torch.device("cpu"))
    cos, sin = (table.view(rows, count, 1, -1) for table in tables)
    return cos, sin


def rotation_of(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return adjacent pairs of ``x [R, T, ..., d]`` rotated in float64; angles ``[R, T, ..., d/2]``."""
    a, b = x.double()[..., ::2], x.double()[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


def _mistakes(x: Tensor, cos: Tensor, sin: Tensor, side: int | None = None) -> dict[str, Tensor]:
    """Return rotations as they are often got wrong; ``side``: of queries (0) or keys (1) alone."""
    half = x.shape[-1] // 2
    mixed = torch.stack((x[..., :half], x[..., half:]), dim=-1).flatten(-2)
    halves = rotation_of(mixed, cos, sin).view(*x.shape[:-1], half, 2).transpose(-1, -2).flatten(-2)
    found = {
        "the sign of the rotation: it turns the other way": rotation_of(x, cos, -sin),
        "pairs are (i, i + d/2), not neighbours": halves,
        "cosines and sines are exchanged": rotation_of(x, sin, cos),
        "angles are those of the next position": rotation_of(x, cos.roll(-1, 1), sin.roll(-1, 1)),
        "angles are those of the position before": rotation_of(x, cos.roll(1, 1), sin.roll(1, 1)),
        "every row has the first one's angles": rotation_of(
            x, cos[:1].expand_as(cos), sin[:1].expand_as(sin)
        ),
        "nothing is turned": x.double(),
    }
    return found if side is None else {name: value[:, :, side] for name, value in found.items()}


def _near(x: Tensor, want: Tensor, dtype: torch.dtype) -> Tensor:
    """Bound a rotation: two products and a sum in float32, stored once."""
    pairs = x.double().abs().reshape(*x.shape[:-1], -1, 2)
    both = pairs.sum(-1, keepdim=True).expand_as(pairs).flatten(-2)
    return roundoff(both, torch.float32, 3) + roundoff(want, dtype)


def rotate(backend: Backend) -> Measured:
    """Compare rotations of all head widths, with angles for all rows and angles of each row."""
    checked = Compared(backend, "rotary", "rotate")
    for dtype, (heads, width), count, rows in itertools.product(
        checked.dtypes, HEADS, COUNTS, (1, ROWS)
    ):
        what = f"rotation of {count} positions, {heads} heads of {width}, in {short(dtype)}"
        doing(what)
        x = normal(width + count, ROWS, count, 2, heads, width).to(dtype)
        cos, sin = (table.unsqueeze(2) for table in angles(count, width, rows))
        form = backend.rotary(cos.to(backend.device), sin.to(backend.device))
        got, want = backend.rotate(x.to(backend.device), form), rotation_of(x, cos, sin)
        causes = partial(_mistakes, x, cos, sin)
        checked.hold(got, want, _near(x, want, dtype), what, dtype, causes)
    return checked.to_measured("rotations")


def rotate_write(backend: Backend) -> Measured:
    """Compare queries and keys that are rotated and stored at once; all other slots and layers stay."""
    checked, device = Compared(backend, "rotate_write"), backend.device
    for dtype, (heads, width) in itertools.product(checked.dtypes, HEADS):
        first = [normal(seed, ROWS, CAPACITY, heads, width).to(dtype) for seed in (1, 2)]
        cache = fill_cache(backend, *(one.expand(LAYERS, *one.shape) for one in first))
        every = torch.arange(CAPACITY, device=device).expand(ROWS, -1)
        old = first
        for count in COUNTS:
            what = f"{count} positions, {heads} heads of {width}, in {short(dtype)}"
            doing(what)
            qkv = normal(count, ROWS, count, 3, heads, width).to(dtype)
            cos, sin = (table.unsqueeze(2) for table in angles(count, width, ROWS))
            slots = torch.stack((torch.arange(count) + 9, torch.arange(count).flip(0) + 3))
            q = backend.rotate_write(
                qkv.to(device),
                backend.rotary(cos.to(device), sin.to(device)),
                cache,
                1,
                backend.address(cache, slots.to(device, backend.index)),
            )
            want = rotation_of(qkv[:, :, :2], cos, sin)
            near = _near(qkv[:, :, :2], want, dtype)
            k, v = (one[..., :width].cpu() for one in cache.read(1, every))
            index = slots.view(ROWS, count, 1, 1).expand(-1, -1, heads, width)
            for side, (name, got) in enumerate({"queries": q, "keys": k.gather(1, index)}.items()):
                causes = partial(_mistakes, qkv[:, :, :2], cos, sin, side)
                limits = want[:, :, side], near[:, :, side]
                checked.hold(got, *limits, f"{name} of {what}", dtype, causes)
            given, values = qkv[:, :, 2], v.gather(1, index)
            if not torch.equal(values, given):
                wrong = {
                    "values are rotated as well": rotation_of(given, cos[:, :, 0], sin[:, :, 0]),
                    "keys are stored in their place": qkv[:, :, 1].double(),
                }
                limit = roundoff(given.double(), dtype) + 1e-30
                compare(values, given.double(), limit, f"values of {what}", causes=wrong)
                raise Failed(f"values of {what} are not those given, bit for bit")
            old = [old[0].scatter(1, index, k.gather(1, index)), old[1].scatter(1, index, given)]
            if not (torch.equal(old[0], k) and torch.equal(old[1], v)):
                raise Failed(f"{what}: other slots of the layer were written")
        other = [one[..., :width].cpu() for one in cache.read(0, every)]
        if not all(torch.equal(one, two) for one, two in zip(other, first, strict=True)):
            raise Failed(f"{heads} heads of {width}: another layer than the given one was written")
    return checked.to_measured("rotated queries and stored keys")
