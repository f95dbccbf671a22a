"""Scores of a picture and its prompt: CLIP, HPSv2 (both through open_clip) and ImageReward."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image

from lantern_accel.evaluation.suite.networks import check_library, missing
from lantern_accel.evaluation.suite.protocol import Protocol as PaperProtocol
from lantern_accel.evaluation.suite.weights import Tell, Unavailable, weights_file


class Scorer(Protocol):
    """Pictures and prompts to scores; ``name`` goes into the table, next to ``note``."""

    @property
    def name(self) -> str:
        """Of the scorer, in words."""

    @property
    def note(self) -> str:
        """What a reader of its column must know."""

    def __call__(self, images: Sequence[Image.Image], prompts: Sequence[str]) -> list[float]:
        """Return a score per picture."""


class OpenClip:
    """Cosine similarity of a picture and a text in an open_clip model, times ``scale``."""

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
        try:
            import open_clip
        except (ImportError, RuntimeError) as error:
            raise Unavailable(missing("open_clip", error)) from None
        try:
            made = open_clip.create_model_and_transforms(
                model,
                pretrained=None,
                force_quick_gelu=quick_gelu,
                image_resize_mode="longest" if whole else None,
            )
            net, self._prepare = made[0], made[2]
            open_clip.load_checkpoint(net, str(path))
        except Exception as error:  # whatever a file that holds something else makes of it
            raise Unavailable(f"the weights {path} are not {model}'s ({error})"[:300]) from None
        self._net: Any = net.eval().requires_grad_(False).to(device)
        self._tokens = open_clip.get_tokenizer(model)
        self._device, self._prefix, self._scale = device, prefix, scale
        self.name, self.note = name, note

    def __call__(self, images: Sequence[Image.Image], prompts: Sequence[str]) -> list[float]:
        pixels = torch.stack([self._prepare(image) for image in images]).to(self._device)
        text = self._tokens([self._prefix + prompt for prompt in prompts]).to(self._device)
        with torch.no_grad():
            seen = self._net.encode_image(pixels, normalize=True)
            read = self._net.encode_text(text, normalize=True)
            scores = self._scale * (seen * read).sum(dim=-1)
        return [float(one) for one in scores.cpu()]


class ImageReward:
    """ImageReward's own package, which nobody keeps up: used where it is installed and works."""

    name = "ImageReward 1.0"
    note = "the package image-reward"

    def __init__(self, path: Path, device: torch.device) -> None:
        try:
            import ImageReward as package

            self._model: Any = package.load(str(path), device=str(device))
        except Exception as error:  # it needs old releases of others, and fails in many ways
            raise Unavailable(f"the package image-reward cannot be used ({error})"[:300]) from None

    def __call__(self, images: Sequence[Image.Image], prompts: Sequence[str]) -> list[float]:
        pairs = zip(images, prompts, strict=True)
        with torch.no_grad():
            return [float(self._model.score(prompt, image)) for image, prompt in pairs]


def load_scorer(
    key: str,
    protocol: PaperProtocol,
    given: Mapping[str, Path],
    device: torch.device,
    tell: Tell,
) -> Scorer:
    """Return the scorer of ``clip``, ``hpsv2`` or ``imagereward``; raises :class:`Unavailable`."""
    if key == "imagereward":
        if importlib.util.find_spec("ImageReward") is None:
            raise Unavailable("the package image-reward, which nobody keeps up, is not installed")
        return ImageReward(weights_file("imagereward", given, tell), device)
    check_library("open_clip")
    if key == "hpsv2":
        return OpenClip(
            "ViT-H-14",
            weights_file("hpsv2", given, tell),
            device,
            name="HPSv2.1 (CLIP ViT-H/14 through open_clip)",
            note="cosine similarity; the package hpsv2 resizes tensors, open_clip pictures",
            whole=True,
        )
    prefix = protocol.clip_prefix
    return OpenClip(
        protocol.clip,
        weights_file(protocol.clip, given, tell),
        device,
        name=f"CLIP {protocol.clip} (OpenAI's weights through open_clip)",
        note="cosine similarity times 100" + (f", captions after {prefix!r}" if prefix else ""),
        prefix=prefix,
        scale=100.0,
        quick_gelu=True,
    )
