"""An image as the first frame of a video, for MoVQ tokenizers of videos."""

from __future__ import annotations

import torch
from torch.testing import assert_close

from lantern_accel.nn.movq import MoVQ, MoVQConfig


def test_the_first_frame_needs_the_last_tap_alone() -> None:
    """What is folded for a picture is what the convolution over all frames gives first."""
    vq = MoVQ(MoVQConfig(ch=32, ch_mult=(2, 1), num_res_blocks=1, codebook_size=64, halvings=2))
    zq = vq.lookup(torch.arange(25).view(1, 5, 5))
    assert_close(vq.post_quant_conv(zq.unsqueeze(2))[:, :, 0], vq.post_quant_conv(zq))
    step = vq.decoder.get_submodule("time_conv.0")
    frames = torch.stack((zq, torch.randn_like(zq)), dim=2)
    assert_close(step(frames)[:, :, 0], step(zq))
    assert (step(frames)[:, :, 1] - step(zq)).abs().max() > 0.1  # a later frame reads more
