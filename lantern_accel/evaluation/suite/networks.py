"""Feature networks of FID, KID, the Inception score, precision and recall, from kept libraries.

``inception`` is torch-fidelity's, ``vgg16`` torchvision's; ``efficientnet`` is this package's own, whose
weights come with the extra ``quality``: it shows that a suite runs, and no paper's figure can be
compared with its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from lantern_accel.evaluation.suite.weights import Tell, Unavailable, weights_file
from lantern_accel.quality import features as lite

INSTALL = "pip install 'lantern-accel[metrics]'"


class FeatureNetwork(Protocol):
    """Pictures to features.

    ``name`` goes into the table; ``side`` is that of the input, None where the network resizes itself.
    """

    @property
    def name(self) -> str:
        """Of the network, in words."""

    @property
    def side(self) -> int | None:
        """Of its input, in pixels."""

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return features ``[n, d]`` and class logits (None: it has none) of uint8 ``[n, 3, h, w]``."""


class Inception:
    """The network of FID: TensorFlow's Inception-v3 of 2015, with its own resizing to 299 pixels."""

    name = "Inception-v3 (2015-12-05, torch-fidelity), 2048 features"
    side = 299

    def __init__(self, path: Path, device: torch.device) -> None:
        try:
            from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
        except ImportError as error:
            raise Unavailable(missing("torch_fidelity", error)) from None
        wanted = ["2048", "logits_unbiased"]
        try:
            torch.load(path, weights_only=True)  # the library would run a file that is a program
            self._net = FeatureExtractorInceptionV3(
                "lantern", wanted, feature_extractor_weights_path=str(path)
            ).to(device)
        except Exception as error:  # whatever a file that holds something else makes of it
            raise Unavailable(f"the weights {path} are not Inception's ({error})"[:300]) from None
        self._device = device

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        found, logits = self._net(images.to(self._device))
        return found.cpu(), logits.cpu()


class Vgg16:
    """The network of LANTERN's precision and recall: torchvision's VGG16 up to its second dense layer."""

    name = "VGG16 (torchvision, ImageNet), 4096 features of the second dense layer"
    side = 224
    _MEAN = (0.485, 0.456, 0.406)
    _DEVIATION = (0.229, 0.224, 0.225)

    def __init__(self, path: Path, device: torch.device) -> None:
        try:
            from torchvision.models import vgg16
        except (ImportError, RuntimeError) as error:
            raise Unavailable(missing("torchvision", error)) from None
        net: Any = vgg16()
        try:
            net.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        except Exception as error:  # whatever a file that holds something else makes of it
            raise Unavailable(f"the weights {path} are not VGG16's ({error})"[:300]) from None
        self._net, self._device = net.eval().requires_grad_(False).to(device), device

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        x = images.to(self._device).float() / 255.0
        mean, deviation = (
            torch.tensor(values, device=x.device).view(1, 3, 1, 1)
            for values in (self._MEAN, self._DEVIATION)
        )
        x = self._net.features((x - mean) / deviation).flatten(1)
        found: Tensor = self._net.classifier[:4](x)
        return found.cpu(), None


class EfficientNet:
    """EfficientNet-Lite0, whose weights a package carries: for trying a suite without a network."""

    name = lite.NETWORK
    side = lite.SIDE

    def __init__(self, device: torch.device) -> None:
        try:
            self._net = lite.load_network().to(device)
        except lite.FeaturesMissing as error:
            raise Unavailable(str(error)) from None
        self._device = device

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        x = (images.to(self._device).float() - 127.0) / 128.0
        if x.shape[-2:] != (lite.SIDE, lite.SIDE):
            x = F.interpolate(x, size=(lite.SIDE, lite.SIDE), mode="bilinear", antialias=True)
        found = self._net(x)
        return found.cpu(), self._net._fc(found).cpu()


def load_network(
    name: str, given: Mapping[str, Path], device: torch.device, tell: Tell
) -> FeatureNetwork:
    """Return a feature network by name; raises :class:`Unavailable` with the reason."""
    if name == "efficientnet":
        return EfficientNet(device)
    module = "torch_fidelity" if name == "inception" else "torchvision"
    check_library(module)  # before hundreds of megabytes
    path = weights_file(name, given, tell)
    return Inception(path, device) if name == "inception" else Vgg16(path, device)


def check_library(module: str) -> None:
    """Raise :class:`Unavailable` where a library cannot be imported."""
    import importlib

    try:
        importlib.import_module(module)
    except (ImportError, RuntimeError) as error:
        # RuntimeError: a torchvision that was built for another torch fails to register its operators.
        raise Unavailable(missing(module, error)) from None


def missing(module: str, error: Exception) -> str:
    """Return why a library cannot be used, and what brings it."""
    why = f"{module} cannot be imported ({error})"[:200]
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        of = "" if error.name.split(".")[0] == module else f", which {module} needs,"
        why = f"{error.name}{of} is not installed"
    return (
        f"{why}; `{INSTALL}` brings it, where PyTorch publishes a torchvision for your torch "
        "(https://pytorch.org/get-started)"
    )
