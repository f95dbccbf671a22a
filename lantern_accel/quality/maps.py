"""Distances between pictures as a network sees them: EfficientNet-Lite0, trained on ImageNet.

The network is :mod:`lantern_accel.quality.features`'s; the extra ``eval`` brings its weights.
Without them, feature distances are left out and pixel distances remain.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from lantern_accel.quality import features as network

NETWORK = f"{network.NETWORK} (kid); maps of its five resolutions (distance)"
MISSING = (
    "the network of feature distances is not installed; `pip install lantern-accel[eval]` brings it"
)
#: Side that pictures are enlarged to for their maps: small ones would vanish in the strides.
SIDE = 128


class FeatureNet:
    """Pictures to feature maps, and distances between them."""

    def __init__(self, net: network.EfficientNetLite0) -> None:
        self._net = net

    @classmethod
    def load(cls) -> FeatureNet | None:
        """Return the network, or None where its package is not installed."""
        return cls(network.load_network()) if network.is_there() else None

    def to(self, device: torch.device) -> FeatureNet:
        """Move the network."""
        self._net.to(device)
        return self

    def maps(self, pixels: Tensor) -> list[Tensor]:
        """Return the last map of each resolution, of pixels ``[B, 3, H, W]`` in [-1, 1]."""
        net = self._net
        x = F.interpolate(pixels, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
        x = F.relu6(net._bn0(net._conv_stem(x)))
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

    def vectors(self, images: Tensor) -> NDArray[np.float64]:
        """Return one vector per image, float64 ``[n, 1280]``, of uint8 ``[n, H, W, 3]``."""
        return network.features(self._net, images).double().numpy()


def in_parts(function: Callable[..., Tensor], *pixels: Tensor, size: int = 32) -> Tensor:
    """Apply a function of pixel batches part by part."""
    # No gradients: nothing is trained through these pictures.
    with torch.no_grad():
        parts = zip(*(torch.split(p, size) for p in pixels), strict=True)
        return torch.cat([function(*chunk) for chunk in parts])


def to_pixels(images: Tensor) -> Tensor:
    """Return uint8 ``[n, H, W, 3]`` as float32 ``[n, 3, H, W]`` in [-1, 1]."""
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1.0
