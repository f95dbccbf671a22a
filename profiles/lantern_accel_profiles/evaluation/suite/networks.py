"""The networks that judge a suite's images: features for FID and the like, and scores of prompts.

``inception`` is torch-fidelity's, ``vgg16`` torchvision's, CLIP and HPSv2 are read through open_clip.
"""

from __future__ import annotations

import importlib
import os
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Protocol

import torch
from PIL import Image
from torch import Tensor

from lantern_accel.errors import LanternError, ModelError, RequestError, did_you_mean
from lantern_accel.files import cache_dir
from lantern_accel.models import hub
from lantern_accel_profiles.evaluation.suite.protocol import WEIGHTS, Weights
from lantern_accel_profiles.evaluation.suite.protocol import Protocol as PaperProtocol

INSTALL = "pip install 'lantern-accel[metrics]'"
#: How long a server may take to answer at all.
REACH_SECONDS = 10
Reporter = Callable[[str], None]


class Unavailable(LanternError):
    """A figure cannot be measured here, and why."""


def library(module: str) -> ModuleType:
    """Import a library; raises :class:`Unavailable` with how to install it."""
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as error:
        # RuntimeError: a torchvision that was built for another torch fails to register its operators.
        raise Unavailable(
            f"{module.partition('.')[0]} cannot be imported ({error}); `{INSTALL}` installs it, where "
            "PyTorch publishes a torchvision for your torch (https://pytorch.org/get-started)"
        ) from None


@contextmanager
def weights_of(path: Path, network: str) -> Iterator[None]:
    """Raise :class:`Unavailable` for whatever a file that holds something else makes of loading it."""
    try:
        yield
    except Exception as error:
        raise Unavailable(f"the weights {path} are not {network}'s ({error})"[:300]) from None


# --- features -----------------------------------------------------------------------------------------


class FeatureNetwork(Protocol):
    """Images to features; ``name`` goes into the table, ``side`` is the input's, None: it takes any."""

    name: str
    side: int | None

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return features ``[n, d]`` and class logits (None: it has none) of uint8 ``[n, 3, h, w]``."""


class Inception:
    """The network of FID: TensorFlow's Inception-v3 of 2015, with its own resizing to 299 pixels."""

    name = "Inception-v3 (2015-12-05, torch-fidelity), 2048 features"
    side: int | None = 299

    def __init__(self, path: Path, device: torch.device) -> None:
        made = library("torch_fidelity.feature_extractor_inceptionv3").FeatureExtractorInceptionV3
        wanted = ["2048", "logits_unbiased"]
        with weights_of(path, "Inception"):
            torch.load(path, weights_only=True)  # the library would run a file that is a program
            self._net = made("lantern", wanted, feature_extractor_weights_path=str(path)).to(device)
        self._device = device

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        found, logits = self._net(images.to(self._device))
        return found.cpu(), logits.cpu()


class Vgg16:
    """The network of LANTERN's precision and recall: torchvision's VGG16 up to its second dense layer."""

    name = "VGG16 (torchvision, ImageNet), 4096 features of the second dense layer"
    side: int | None = 224
    _MEAN = (0.485, 0.456, 0.406)
    _DEVIATION = (0.229, 0.224, 0.225)

    def __init__(self, path: Path, device: torch.device) -> None:
        net = library("torchvision").models.vgg16()
        with weights_of(path, "VGG16"):
            net.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
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


def load_network(
    name: str, given: Mapping[str, Path], device: torch.device, tell: Reporter
) -> FeatureNetwork:
    """Return a feature network by name; raises :class:`Unavailable` with the reason."""
    library("torch_fidelity" if name == "inception" else "torchvision")  # before large files
    path = weights_file(name, given, tell)
    return Inception(path, device) if name == "inception" else Vgg16(path, device)


# --- scores ---------------------------------------------------------------------------------------------


class Scorer(Protocol):
    """Images and prompts to scores; ``name`` goes into the table, next to ``note``."""

    name: str
    note: str

    def __call__(self, images: Sequence[Image.Image], prompts: Sequence[str]) -> list[float]:
        """Return a score per image."""


class OpenClip:
    """Cosine similarity of an image and a text in an open_clip model, times ``scale``."""

    def __init__(
        self,
        model: str,
        path: Path,
        device: torch.device,
        *,
        name: str,
        note: str = "",
        prefix: str = "",
        scale: float = 1.0,
        quick_gelu: bool = False,
        whole: bool = False,
    ) -> None:
        """``whole``: the longer side is resized to the input and the rest padded; else it is cropped."""
        open_clip = library("open_clip")
        with weights_of(path, model):
            net, _, self._prepare = open_clip.create_model_and_transforms(
                model,
                pretrained=None,
                force_quick_gelu=quick_gelu,
                image_resize_mode="longest" if whole else None,
            )
            open_clip.load_checkpoint(net, str(path))
        self._net = net.eval().requires_grad_(False).to(device)
        self._tokens = open_clip.get_tokenizer(model)
        self._device, self._prefix, self._scale = device, prefix, scale
        self.name, self.note = name, note

    @torch.no_grad()
    def __call__(self, images: Sequence[Image.Image], prompts: Sequence[str]) -> list[float]:
        pixels = torch.stack([self._prepare(image) for image in images]).to(self._device)
        text = self._tokens([self._prefix + prompt for prompt in prompts]).to(self._device)
        seen = self._net.encode_image(pixels, normalize=True)
        read = self._net.encode_text(text, normalize=True)
        return [float(one) for one in (self._scale * (seen * read).sum(dim=-1)).cpu()]


def load_scorer(
    key: str,
    protocol: PaperProtocol,
    given: Mapping[str, Path],
    device: torch.device,
    tell: Reporter,
) -> Scorer:
    """Return the scorer of ``clip`` or ``hpsv2``; raises :class:`Unavailable`."""
    library("open_clip")
    prefix, model = protocol.clip_prefix, protocol.clip
    if key == "hpsv2":
        return OpenClip(
            "ViT-H-14",
            weights_file(key, given, tell),
            device,
            name="HPSv2.1 (CLIP ViT-H/14 through open_clip)",
            note="cosine similarity; the package hpsv2 resizes tensors, open_clip images",
            whole=True,
        )
    return OpenClip(
        model,
        weights_file(model, given, tell),
        device,
        name=f"CLIP {model} (OpenAI's weights through open_clip)",
        note="cosine similarity times 100" + (f", captions after {prefix!r}" if prefix else ""),
        prefix=prefix,
        scale=100.0,
        quick_gelu=True,
    )


# --- their weights --------------------------------------------------------------------------------------


def read_given(words: list[str]) -> dict[str, Path]:
    """Read ``NAME=PATH`` pairs; raises :class:`RequestError` for what is none."""
    found = {}
    for word in words:
        key, equals, path = word.partition("=")
        if not equals or not path:
            raise RequestError(
                f"--metric-weights takes NAME=PATH, such as inception=inception.pth, not {word[:80]!r}"
            )
        if key not in WEIGHTS:
            raise RequestError(f"no metric has weights named {key!r}{did_you_mean(key, WEIGHTS)}")
        if not Path(path).is_file():
            raise RequestError(f"--metric-weights {key}: there is no file {path}; name another")
        found[key] = Path(path)
    return found


def weights_file(key: str, given: Mapping[str, Path], tell: Reporter) -> Path:
    """Return a file of weights: the one that was named, the cached one, or one that is fetched now.

    Raises :class:`Unavailable` with what is missing, its size and licence, and how to name it.
    """
    if key in given:
        return given[key]
    one = WEIGHTS[key]
    try:
        if not one.repo:
            return _from_url(one, tell)
        if (found := hub.find_cached(one.repo, one.file)) is not None:
            return found
        hub.reach(one.repo, one.file)
        tell(f"fetching {one}")
        return hub.download(one.repo, one.file)
    except (hub.Absent, ModelError, OSError, RuntimeError, ValueError) as error:
        raise Unavailable(
            f"{one} is not here and cannot be fetched ({error}); fetch it where there is a "
            f"network and name it with --metric-weights {key}=PATH"
        ) from None


def _from_url(one: Weights, tell: Reporter) -> Path:
    path = cache_dir() / "metrics" / one.url.rpartition("/")[2]
    if path.is_file():
        return path
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        raise hub.Absent("HF_HUB_OFFLINE is set")
    # One question without retries: torch's download waits for ever where there is no network.
    request = urllib.request.Request(one.url, method="HEAD")
    with urllib.request.urlopen(request, timeout=REACH_SECONDS):
        tell(f"fetching {one}")
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name ends in the first digits of the content's hash; what has another is not kept.
    torch.hub.download_url_to_file(one.url, str(path), path.stem.rpartition("-")[2], progress=False)
    return path
