"""The weights of the metrics' networks: named with size and licence, found, fetched, or missing."""

from __future__ import annotations

import hashlib
import os
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from lantern_accel.errors import LanternError, ModelError, RequestError, did_you_mean
from lantern_accel.files import cache_dir, write_whole
from lantern_accel.models import hub

Tell = Callable[[str], None]
#: How long a server may take to answer at all.
REACH_SECONDS = 10


class Unavailable(LanternError):
    """A figure cannot be measured here, and why."""


@dataclass(frozen=True)
class Weights:
    """One file of weights: what it is, how large, under which licence, and where it is published."""

    key: str
    title: str
    size: str
    licence: str
    repo: str | None = None
    file: str = ""
    url: str = ""

    @property
    def named(self) -> str:
        """The weights in words."""
        where = f"{self.repo}: {self.file}" if self.repo else self.url
        return f"{self.title}, {self.size}, {self.licence} ({where})"


def _clip(key: str, model: str, repo: str, size: str) -> Weights:
    return Weights(
        key, f"CLIP {model} (OpenAI)", size, "MIT", repo=repo, file="open_clip_model.safetensors"
    )


WEIGHTS = {
    one.key: one
    for one in (
        Weights(
            "inception",
            "Inception-v3 of FID, as torch-fidelity converted it",
            "96 MB",
            "Apache-2.0",
            url="https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/"
            "weights-inception-2015-12-05-6726825d.pth",
        ),
        Weights(
            "vgg16",
            "VGG16, ImageNet (torchvision)",
            "553 MB",
            "BSD-3-Clause",
            url="https://download.pytorch.org/models/vgg16-397923af.pth",
        ),
        _clip("ViT-B-32", "ViT-B/32", "timm/vit_base_patch32_clip_224.openai", "605 MB"),
        _clip("ViT-B-16", "ViT-B/16", "timm/vit_base_patch16_clip_224.openai", "599 MB"),
        Weights(
            "hpsv2",
            "HPSv2.1 (a fine-tuned CLIP ViT-H/14)",
            "about 4 GB",
            "Apache-2.0",
            repo="xswu/HPSv2",
            file="HPS_v2.1_compressed.pt",
        ),
        Weights(
            "imagereward",
            "ImageReward 1.0",
            "1.8 GB",
            "Apache-2.0",
            repo="THUDM/ImageReward",
            file="ImageReward.pt",
        ),
    )
}


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


def weights_file(key: str, given: Mapping[str, Path], tell: Tell) -> Path:
    """Return a file of weights: the one that was named, the cached one, or one that is fetched now.

    Raises :class:`Unavailable` with what is missing, its size and licence, and how to name it.
    """
    if key in given:
        return given[key]
    one = WEIGHTS[key]
    try:
        return _from_hub(one.repo, one, tell) if one.repo else _from_url(one, tell)
    except (hub.Absent, ModelError) as error:
        raise Unavailable(
            f"{one.named} is not here and cannot be fetched ({error}); fetch it where there is a "
            f"network and name it with --metric-weights {key}=PATH"
        ) from None


def _from_hub(repo: str, one: Weights, tell: Tell) -> Path:
    found = hub.cached(repo, one.file)
    if found is None:
        hub.reach(repo, one.file)
        tell(f"fetching {one.named}")
        found = hub.download(repo, one.file)
    return found


def _from_url(one: Weights, tell: Tell) -> Path:
    path = cache_dir() / "metrics" / one.url.rpartition("/")[2]
    if path.is_file():
        return path
    _reach(one.url)
    tell(f"fetching {one.named}")

    def copy(stream: IO[bytes]) -> None:
        seen = hashlib.sha256()
        with urllib.request.urlopen(one.url, timeout=60) as answer:
            while part := answer.read(1 << 20):
                seen.update(part)
                stream.write(part)
        # As torch.hub has it: the name ends in the first digits of the content's hash.
        if not seen.hexdigest().startswith(path.stem.rpartition("-")[2]):
            raise OSError("what came is not what its name says")

    try:
        write_whole(path, copy)
    except OSError as error:
        raise hub.Absent(f"{type(error).__name__}: {error}") from None
    return path


def _reach(url: str) -> None:
    """Raise :class:`hub.Absent` where a server cannot be reached: one question, no retries."""
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        raise hub.Absent("HF_HUB_OFFLINE is set")
    try:
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=REACH_SECONDS):
            return
    except (OSError, ValueError):
        raise hub.Absent("no network") from None
