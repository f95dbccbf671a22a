"""Images as a network sees them: prepared by the protocol's rule, kept, and real ones for reference.

Real ones come from a folder, from ADM's reference batch, or were stored before.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from lantern_accel.errors import DataError
from lantern_accel.files import read_bytes_file, write_whole
from lantern_accel.training.imageset import to_rgb
from lantern_accel_profiles.evaluation.suite.networks import FeatureNetwork
from lantern_accel_profiles.evaluation.suite.protocol import Preprocessing
from lantern_accel_profiles.quality.set_metrics import Reference

Features = NDArray[np.float32]
Advance = Callable[[int], None]
#: Files, or arrays uint8 ``[h, w, 3]``.
Pictures = Sequence[Path] | Sequence[NDArray[np.uint8]]
#: Images that a network sees together.
BATCH = 32
_FILTERS = {
    "lanczos": Image.Resampling.LANCZOS,
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
}


def read_image(path: Path) -> tuple[Image.Image, str | None]:
    """Return an image as RGB, and what it was where it was something else (``grey``, ``CMYK``).

    Raises :class:`DataError` naming a file that cannot be read.
    """
    try:
        with Image.open(io.BytesIO(read_bytes_file(path))) as opened:
            opened.load()
            return to_rgb(opened)
    except Exception as error:  # whatever a damaged image's decoder raises
        why = f"{type(error).__name__}: {error}"[:120]
        raise DataError(
            f"the image {path} cannot be read ({why}); replace it, or take it off the list"
        ) from None


def prepare_image(image: Image.Image, rule: Preprocessing, side: int | None) -> Image.Image:
    """Return an image as the rule wants it; ``side`` of the network's input, None: it takes any."""
    if rule.crop == "centre square":
        short = min(image.size)
        left, top = (image.width - short) // 2, (image.height - short) // 2
        image = image.crop((left, top, left + short, top + short))
    if rule.size is not None and image.size != (rule.size, rule.size):
        image = image.resize((rule.size, rule.size), _FILTERS[rule.resample])
    if rule.to_network != "network" and side is not None and image.size != (side, side):
        image = image.resize((side, side), _FILTERS[rule.to_network])
    return image


def batches(
    pictures: Pictures, rule: Preprocessing, side: int | None, size: int
) -> Iterator[tuple[Tensor, list[str]]]:
    """Yield images, uint8 ``[n, 3, h, w]``, in order, with the modes of those that were not RGB.

    A batch has ``size`` images, fewer where their shapes differ.
    """
    held: list[Tensor] = []
    modes: list[str] = []
    for one in pictures:
        image, mode = read_image(one) if isinstance(one, Path) else (Image.fromarray(one), None)
        pixels = torch.from_numpy(np.array(prepare_image(image, rule, side))).permute(2, 0, 1)
        if held and (len(held) == size or held[0].shape != pixels.shape):
            yield torch.stack(held), modes
            held, modes = [], []
        held.append(pixels)
        modes += [] if mode is None else [mode]
    if held:
        yield torch.stack(held), modes


@dataclass(frozen=True)
class Seen:
    """What a network makes of images: features ``[n, d]``, logits, and modes other than RGB."""

    features: Features
    logits: Features | None
    modes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Real:
    """The reference of a suite: features and their moments."""

    features: Features
    moments: Reference
    about: dict[str, object]


def features_of(
    pictures: Pictures,
    network: FeatureNetwork,
    rule: Preprocessing,
    advance: Advance = lambda count: None,
) -> Seen:
    """Return what a network sees in images; raises :class:`DataError` for unreadable files."""
    features, logits = [], []
    modes: Counter[str] = Counter()
    with torch.no_grad():
        for pixels, odd in batches(pictures, rule, network.side, BATCH):
            found, classes = network(pixels)
            features.append(found.float())
            logits += [] if classes is None else [classes.float()]
            modes.update(odd)
            advance(len(pixels))
    return Seen(
        torch.cat(features).numpy(), torch.cat(logits).numpy() if logits else None, dict(modes)
    )


def identity(network: FeatureNetwork, rule: Preprocessing) -> dict[str, object]:
    """Return what features depend on besides the images."""
    return {"network": network.name, "preprocessing": rule.model_dump(mode="json")}


def stats_of(paths: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Return what images are known by: names, sizes and times of change."""
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]


def cache_path(folder: Path, of: str, depends: list[object], suffix: str) -> Path:
    """Return the file that keeps what was made ``of`` images and ``depends`` on these values."""
    key = json.dumps(depends, sort_keys=True)
    return folder / f"{of}-{hashlib.sha256(key.encode()).hexdigest()[:16]}{suffix}"


def cached_features(
    paths: Sequence[Path],
    network: FeatureNetwork,
    rule: Preprocessing,
    folder: Path,
    of: str,
    advance: Advance = lambda count: None,
) -> Seen:
    """Return what a network sees in images, from ``folder`` where it was stored for the same ones.

    ``of`` says which images these are; they are known by their sizes and times of change.
    """
    path = cache_path(folder, of, [identity(network, rule), stats_of(paths)], ".npz")
    try:
        with np.load(path, allow_pickle=False) as stored:
            modes = json.loads(str(stored["modes"]))
            logits = stored.get("logits")
            return Seen(stored["features"], logits, modes)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        pass
    seen = features_of(paths, network, rule, advance)
    arrays: dict[str, Any] = {
        "features": seen.features,
        "modes": np.array(json.dumps(seen.modes)),
    }
    if seen.logits is not None:
        arrays["logits"] = seen.logits
    write_whole(path, lambda stream: np.savez(stream, **arrays))
    return seen


def read_reference(
    path: Path, network: FeatureNetwork, rule: Preprocessing, advance: Advance = lambda count: None
) -> Real:
    """Read ADM's reference batch (``arr_0``, with ``mu`` and ``sigma``).

    Its moments are those of Inception with its own resizing; another network or preprocessing has them
    from the images. Raises :class:`DataError` for a file that is not one.
    """
    try:
        with np.load(path, allow_pickle=False) as opened:
            arrays = dict(opened)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or "not an .npz of arrays"
        raise DataError(f"--reference {path} cannot be read ({why})") from None
    images = arrays.get("arr_0")
    if images is None:
        raise DataError(
            f"--reference {path} has {', '.join(sorted(arrays)) or 'nothing'}; it takes ADM's batch "
            "with arr_0"
        )
    if images.ndim != 4 or images.shape[-1] != 3 or images.dtype != np.uint8 or len(images) < 2:
        raise DataError(f"--reference {path}: arr_0 is not a set of images, uint8 [n, h, w, 3]")
    features = features_of(images, network, rule, advance).features
    official = "Inception" in network.name and rule.to_network == "network"
    stored = official and {"mu", "sigma"} <= arrays.keys()
    moments = (
        Reference.of_moments(arrays["mu"], arrays["sigma"])
        if stored
        else Reference.of_features(features)
    )
    about = {"source": path.name, "images": len(images), "moments": "stored" if stored else "ours"}
    return Real(features, moments, about)
