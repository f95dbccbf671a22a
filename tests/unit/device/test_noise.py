"""Position-keyed noise: the generator's published vectors, the law of its numbers, and the race."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chi_square import misfit

from lantern_accel.device.noise import (
    HEADROOM,
    exponential,
    exponential_of,
    noise_keys,
    sample_uniforms,
    threefry,
)
from lantern_accel.device.operations import TensorOps


def words(*values: int) -> list[torch.Tensor]:
    return [torch.tensor([v], dtype=torch.int64).to(torch.int32) for v in values]


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_vectors_of_random123(key, counter, expected):
    found = threefry(*words(*key), *words(*counter))
    assert [int(x) & 0xFFFFFFFF for x in found] == list(expected)


def test_exponential_agrees_with_float64_at_both_ends():
    near_ends = [0, 1, 2, 2**30, 2**31 - 2, 2**31 - 1]
    edges = [*near_ends, *(2**32 - 1 - one for one in near_ends)]
    generator = torch.Generator().manual_seed(1)
    more = torch.randint(0, 2**32, (200_000,), generator=generator)
    near = torch.randint(0, 2**12, (1000,), generator=generator)
    r = torch.cat((torch.tensor(edges), more, near, 2**32 - 1 - near))
    found = exponential_of(r.to(torch.int32)).double()
    low = r < 2**31
    v = (torch.where(low, r, 2**32 - 1 - r).double() + 0.5) / 2**32
    expected = torch.where(low, -v.log(), -torch.log1p(-v))
    # Six roundings of float32 in a row, each half a unit in the last place at most.
    assert ((found - expected).abs() / expected).max() < 6 * 2.0**-24
    assert found.min() > 0


def digest(noise):
    return hashlib.sha256(noise.view(torch.int32).numpy().tobytes()).hexdigest()[:16]


def test_noise_of_known_keys_is_known_to_the_bit():
    """Written down when noise was made by bits: pictures of a seed must stay what they were."""
    powers = 2 ** torch.arange(33).unsqueeze(1) + torch.arange(-70, 71)
    ends = torch.cat((torch.arange(2**17), 2**32 - 1 - torch.arange(2**17)))
    middle = 2**31 + torch.arange(-(2**17), 2**17)
    words = torch.cat((powers.flatten().clamp(0, 2**32 - 1), ends, middle))
    assert digest(exponential_of(words.to(torch.int32))) == "0ead7a9f150274b1"
    keys, positions = noise_keys([7, 2**63 + 11], [0, 3]), torch.arange(0, 2**16, 4099).repeat(2, 1)
    assert digest(exponential(keys, positions, 4097)) == "93b0c7854d9f3a73"


def test_gumbel_has_mean_variance_and_tails():
    count, rows = 0, []
    keys = noise_keys([5], [0])
    sums = torch.zeros(2, dtype=torch.float64)
    high = low = 0
    for first in range(0, 64, 8):
        noise = exponential(keys, torch.arange(first, first + 8).unsqueeze(0), 16384)
        g = -noise.double().log()
        sums += torch.stack((g.sum(), g.square().sum()))
        count += g.numel()
        high += int((g > 9.0).sum())
        low += int((g < -1.8).sum())
        rows.append(g)
    mean, square = (sums / count).tolist()
    variance = square - mean**2
    # Five standard errors of each; a Gumbel number has mean gamma, variance pi^2 / 6, kurtosis 5.4.
    assert abs(mean - 0.5772156649) < 5 * math.sqrt(math.pi**2 / 6 / count)
    assert abs(variance - math.pi**2 / 6) < 5 * (math.pi**2 / 6) * math.sqrt(4.4 / count)
    for seen, share in ((high, 1 - math.exp(-math.exp(-9.0))), (low, math.exp(-math.exp(1.8)))):
        assert abs(seen - count * share) < 5 * math.sqrt(count * share)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_keys_hold_all_bits(seed, image):
    low, high, index = (int(x) & 0xFFFFFFFF for x in noise_keys([seed], [image])[0])
    assert (high << 32 | low, index) == (seed, image)


def test_every_part_of_the_key_makes_other_noise():
    seeds, images = [7, 8, 7 + 2**32, 7], [0, 0, 0, 1]
    noise = exponential(noise_keys(seeds, images), torch.tensor([[0, 1]] * 4), 64)
    rows = noise.flatten(0, 1)
    assert len({tuple(row.tolist()) for row in rows}) == 8
    assert len(set(rows[0].tolist())) == 64


def test_a_row_draws_the_same_alone_and_in_a_batch():
    generator = torch.Generator().manual_seed(2)
    weights = torch.rand(3, 4, 50, generator=generator)
    keys, positions = noise_keys([1, 1, 2**40], [0, 1, 0]), torch.arange(12).view(3, 4)
    ops = TensorOps()
    all_of_them = ops.race(weights, keys, positions)
    for row in range(3):
        one = slice(row, row + 1)
        for column in range(4):
            at = slice(column, column + 1)
            alone = ops.race(weights[one, at], keys[one], positions[one, at])
            assert int(alone) == int(all_of_them[row, column])


def test_race_follows_the_weights():
    p = torch.tensor([0.5, 0.25, 0.15, 0.1, 0.0])
    images = 20_000
    keys = noise_keys([11] * images, list(range(images)))
    drawn = TensorOps().race(p.expand(images, 1, 5), keys, torch.zeros(images, 1).int())
    assert misfit(torch.bincount(drawn.flatten(), minlength=5), p) < 4.9


def test_ties_go_to_the_lower_code(monkeypatch):
    monkeypatch.setattr(
        "lantern_accel.device.sampling.exponential",
        lambda keys, positions, codes: torch.ones(*positions.shape, codes),
    )
    weights = torch.tensor([[[0.1, 0.4, 0.4, 0.1]]])
    assert int(TensorOps().race(weights, noise_keys([0], [0]), torch.zeros(1, 1).int())) == 1


def test_siblings_begin_with_the_race_and_differ():
    weights = torch.rand(2, 3, 40, generator=torch.Generator().manual_seed(4))
    keys, positions = noise_keys([1, 2], [0, 0]), torch.arange(6).view(2, 3)
    ops = TensorOps()
    found = ops.race(weights, keys, positions, 4)
    assert torch.equal(found[..., 0], ops.race(weights, keys, positions))
    assert all(len(set(row.tolist())) == 4 for row in found.flatten(0, 1))


# --- uniforms, where the seed does not decide every token ---------------------------------------------


def test_an_images_uniforms_are_its_own_pinned_and_inside_the_open_interval():
    together = sample_uniforms(3, [0, 1, 2, 7], steps=5, columns=4)
    assert together.shape == (4, 5, 4) and together.dtype == torch.float32
    for row, image in enumerate([0, 1, 2, 7]):
        assert torch.equal(sample_uniforms(3, [image], 5, 4)[0], together[row])
    # Seed 1 and image 11 is not seed 11 and image 1; two of the seeds were one in a hash to 32 bits.
    pairs = [(seed, image) for seed in (0, 1, 2**63) for image in (0, 1, 11)]
    pairs += [(11, 1), (14176, 0), (105792, 0)]
    rows = {tuple(sample_uniforms(s, [i], 3, 3).flatten().tolist()) for s, i in pairs}
    assert len(rows) == len(pairs)
    drawn = sample_uniforms(0, list(range(8)), steps=500, columns=500)
    assert drawn.min() > 0 and drawn.max() <= 1 - HEADROOM < 1
    middles = (drawn * 2.0**24 % 2 == 1) | (drawn == 1 - HEADROOM)
    assert middles.all(), "no number is 0, whatever is drawn"
    # A change here changes every image that was ever made from a seed.
    first = sample_uniforms(42, [3], steps=1, columns=4)[0, 0].tolist()
    assert first == pytest.approx([0.181348, 0.594482, 0.800827, 0.662399], abs=1e-6)
