"""Position-keyed noise: a random number for every (seed, image, position, code), made where it is used.

A token is ``argmax_i p_i / E_i``, with E standard exponential noise that only the request's seed, the
image, the token's position and the code i decide. That is a draw from p (the exponential race, which is
the Gumbel-max trick ``argmax log p + G`` with ``G = -log E``), and it depends on p and the key alone: not
on how the token was drafted, when, or in which batch. A draft is kept where it is that token, so that
drafts change the time and never the image (drafter-invariant speculative decoding, Daliri, Musco and
Suresh, arXiv 2408.07978).

The generator is Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2,
3", SC 2011): additions, rotations and exclusive-ors of 32-bit words, so that every device computes the
same bits without 64-bit products. No two seeds share an image, and an image is the same alone and in a
batch. The papers' tests take uniforms of the same generator, a row a step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Shift = Callable[[Tensor, int], Tensor]
Product = Callable[[Tensor, Tensor | float], Tensor]
#: Rotations of the rounds, four and four, and what the third word of the key is made with.
ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
PARITY = 0x1BD11BDA
#: Positions and codes that a counter tells apart: 16 bits of it are the position, 16 half the code.
MOST_POSITIONS, MOST_CODES = 1 << 16, 1 << 17
#: Uniforms stay this far below 1, so that ``u * total < total`` in float32.
HEADROOM = 2.0**-22
#: ln 2 and the series of ``atanh(t) / t`` in t squared, as float32 numbers.
LN2 = 0.693147182464599609375
SERIES = (1.0, 1 / 3, 1 / 5, 1 / 7, 1 / 9, 1 / 11, 1 / 13)


def noise_keys(seeds: int | Sequence[int], images: Sequence[int]) -> Tensor:
    """Return the keys of images, int32 ``[B, 3]``: low and high word of each seed, and the image.

    ``seeds`` 64-bit, taken modulo 2**64, of each image or one of all; ``images`` below 2**32. Two
    different pairs have different keys.
    """
    seeds = [seeds] * len(images) if isinstance(seeds, int) else seeds
    words = [
        (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, image & 0xFFFFFFFF)
        for seed, image in zip(seeds, images, strict=True)
    ]
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def sample_uniforms(
    seed: int | Sequence[int], images: Sequence[int], steps: int, columns: int
) -> Tensor:
    """Return float32 uniforms in (0, 1), ``[len(images), steps, columns]``, on the host.

    Those of step s and column c are the word that noise has at position s for code c.
    """
    low, high, image = (noise_keys(seed, images)[:, i].view(-1, 1, 1) for i in range(3))
    column = torch.arange((columns + 1) // 2, dtype=torch.int32)
    counter = (torch.arange(steps, dtype=torch.int32) << 16).unsqueeze(-1) | column
    words = torch.stack(threefry(low, high, counter, image), dim=-1).flatten(-2)[..., :columns]
    # Midpoints of a 2**-24 grid: never 0, so that a code without probability is never accepted.
    raw = (words >> 9) & ((1 << 23) - 1)
    return ((2 * raw + 1).double() / 2**24).clamp(max=1 - HEADROOM).float()


def _rotate_left(x: Tensor, by: int, shift: Shift) -> Tensor:
    """Rotate 32-bit words to the left."""
    return (x << by) | (shift(x, 32 - by) & ((1 << by) - 1))


def threefry(
    key0: Tensor, key1: Tensor, x0: Tensor, x1: Tensor, shift: Shift = operator.rshift
) -> tuple[Tensor, Tensor]:
    """Return the two words of Threefry-2x32-20 for a key and a counter, int32 tensors that broadcast.

    ``shift``: an arithmetic shift to the right, for devices where torch's is none.
    """
    keys = (key0, key1, key0 ^ key1 ^ PARITY)
    x0, x1 = x0 + key0, x1 + key1
    for number in range(20):
        x0 = x0 + x1
        x1 = _rotate_left(x1, ROTATIONS[number % 8], shift) ^ x0
        if number % 4 == 3:
            turn = number // 4 + 1
            x0 = x0 + keys[turn % 3]
            x1 = x1 + (keys[(turn + 1) % 3] + turn)
    return x0, x1


def _split_mantissa(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mantissa of float32 ``x`` in 1 to 2**32, in 1 to 2, and 33 less its exponent, float32.

    Halved step by step, which is exact: not every device can look at a number's bits. The last step is
    there twice for 2**32, to which the largest words round.
    """
    left = torch.full_like(x, 33.0)
    for by in (16, 8, 4, 2, 1, 1):
        more = x >= 1 << by  # a float would be compared as a double
        x = torch.where(more, x * 2.0**-by, x)
        left = torch.where(more, left - by, left)
    return x, left


def exponential_of(words: Tensor, product: Product = operator.mul) -> Tensor:
    """Turn random 32-bit words into standard exponential numbers, float32, right in both tails.

    A word r stands for ``u = (r + 1/2) / 2**32``, and E is ``-log u``; where u is above 1/2 it is
    computed as ``-log1p(-(1 - u))`` from the word's complement, so that small values keep their digits.
    The logarithm is one sequence of float32 operations, each rounded by itself: where no two of them are
    contracted into one, every device gets the same bits. ``product``: of two numbers that are at most 23,
    for compilers that would round it only together with the sum that it goes into.
    """
    upper = words < 0
    small = torch.where(upper, torch.bitwise_not(words), words).float() + 0.5
    mantissa, halvings = _split_mantissa(small * 2.0)
    share = small * 2.0**-32
    above = torch.where(upper, share, 1.0 - mantissa)
    below = torch.where(upper, 2.0 - share, 1.0 + mantissa)
    halvings = torch.where(upper, 0.0, halvings)
    t = above / below
    z = t * t
    series = product(z, SERIES[-1]) + SERIES[-2]
    for term in SERIES[-3::-1]:
        series = product(series, z) + term
    return product(halvings, LN2) + product(t + t, series)


def exponential(
    keys: Tensor,
    positions: Tensor,
    codes: int,
    shift: Shift = operator.rshift,
    product: Product = operator.mul,
) -> Tensor:
    """Return the noise of all codes at positions, float32 ``[B, T, codes]``.

    ``keys`` int32 ``[B, 3]`` (:func:`noise_keys`); ``positions`` integer ``[B, T]``, the index of each
    token in its image, from 0; ``shift`` and ``product`` as in :func:`threefry` and
    :func:`exponential_of`.
    """
    low, high, image = (keys[:, i].view(-1, 1, 1) for i in range(3))
    half = torch.arange((codes + 1) // 2, dtype=torch.int32, device=keys.device)
    counter = (positions.to(torch.int32) << 16).unsqueeze(-1) | half
    both = torch.stack(threefry(low, high, counter, image, shift), dim=-1).flatten(-2)
    return exponential_of(both[..., :codes], product)
