"""A request's randomness: one stream an image, never 0 or 1, the same everywhere."""

from __future__ import annotations

import torch

from lantern_accel.device.noise import HEADROOM, draw_uniforms


def test_an_images_numbers_do_not_depend_on_its_batch() -> None:
    together = draw_uniforms(3, [0, 1, 2, 7], steps=5, columns=4)
    assert together.shape == (4, 5, 4) and together.dtype == torch.float32
    for row, image in enumerate([0, 1, 2, 7]):
        assert torch.equal(draw_uniforms(3, [image], 5, 4)[0], together[row])


def test_images_and_seeds_have_streams_of_their_own() -> None:
    rows = [draw_uniforms(seed, [image], 3, 3) for seed in (0, 1, 2**63) for image in (0, 1, 11)]
    assert len({tuple(row.flatten().tolist()) for row in rows}) == 9
    # Two seeds of which a hash to 32 bits made one.
    assert not torch.equal(draw_uniforms(14176, [0], 3, 3), draw_uniforms(105792, [0], 3, 3))
    # Seed 1 and image 11 is not seed 11 and image 1.
    assert not torch.equal(draw_uniforms(1, [11], 3, 3), draw_uniforms(11, [1], 3, 3))


def test_numbers_stay_inside_the_open_interval() -> None:
    drawn = draw_uniforms(0, list(range(8)), steps=500, columns=500)
    assert drawn.min() > 0 and drawn.max() <= 1 - HEADROOM
    assert 1 - HEADROOM < 1 and torch.tensor(1 - HEADROOM) < 1


def test_the_stream_is_pinned() -> None:
    # A change here changes every image that was ever made from a seed.
    drawn = draw_uniforms(42, [3], steps=1, columns=4)[0, 0]
    assert [round(float(u), 6) for u in drawn] == [0.181348, 0.594482, 0.800827, 0.662399]
