"""Trains a target of your own on a folder of captioned images, with another model's image tokenizer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lantern_accel.errors import DataError
from lantern_accel.families.llamagen.manifest import LlamaGenManifest
from lantern_accel.families.llamagen.text import PAD_ID, TextEncoderConfig, place
from lantern_accel.families.llamagen.words import normalise
from lantern_accel.families.tokenizer import read_tokenizer
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.quality.features import to_pixels
from lantern_accel.quality.imageset import read_images
from lantern_accel.quality.progress import Progress
from lantern_accel.quality.scoring import encode_images
from lantern_accel.training.common import held_out, seed_everything
from lantern_accel.training.device import TrainDevice
from lantern_accel.training.folder import save_tokenizer
from lantern_accel.training.target import TargetConfig, TextTarget, train_target
from lantern_accel.training.words import save_text_tokenizer, train_text_tokenizer


class Captioned:
    """Images by their codes, int64 ``[n, grid * grid]``, each with its caption."""

    def __init__(
        self, captions: Sequence[str], codes: Tensor, tokenizer: Any, text: TextEncoderConfig
    ) -> None:
        rows = [place(tokenizer.encode(normalise(one)).ids, text) for one in captions]
        self._ids, self._codes = torch.tensor(rows), codes

    def draw(self, size: int, rng: random.Random, *, plain: bool = False) -> tuple[Tensor, ...]:
        """Return ``ids, mask, codes`` of images drawn at random."""
        rows = [rng.randrange(len(self._codes)) for _ in range(size)]
        ids = self._ids[rows]
        return ids, ids != PAD_ID, self._codes[rows]


def run_captioned_target(
    pipeline: Pipeline,
    config: TargetConfig,
    work: Path,
    images: Path,
    device: TrainDevice,
    progress: Progress | None = None,
    *,
    resume: bool = True,
) -> dict[str, Any]:
    """Train a target in ``work/target`` on the images of a folder; return the report.

    ``pipeline``: a loaded text-conditional model of LlamaGen's family, whose image tokenizer turns
    the images into codes; it is copied to ``work/tokenizer`` for the bundle. 5 % of the images, one
    at least, are held out. Raises :class:`DataError` for another family, for class ids in place of
    captions, and for fewer than two images.
    """
    say = Progress() if progress is None else progress
    manifest = pipeline.model.manifest
    if not isinstance(manifest, LlamaGenManifest):
        raise DataError(
            f"targets are trained with the image tokenizer of a LlamaGen model, and {manifest.name!r} "
            "is not one; name another with --model"
        )
    side = manifest.image_size
    found = read_images(images, side)
    for name, why in found.skipped.items():
        say.log(f"skipped {name}: {why}")
    captions = [str(one) for one in found.prompts if isinstance(one, str)]
    if len(captions) < len(found.prompts) or len(captions) < 2:
        raise DataError(
            f"{images} holds {len(captions)} images with captions of words out of "
            f"{len(found.prompts)}; a text-conditional target needs 2 or more, and words for all"
        )
    codes = encode_images(pipeline, to_pixels(torch.from_numpy(found.pixels)))
    path = work / "text_tokenizer.json"
    if device.main and not (resume and path.is_file()):
        save_text_tokenizer(train_text_tokenizer(captions), path)
    if device.main:
        save_tokenizer(pipeline.model.vq, work / "tokenizer")
    device.wait()
    tokenizer = read_tokenizer(path)
    seed_everything(config.seed)
    model = TextTarget.fresh(
        config, tokenizer.get_vocab_size(), manifest.vq.codebook_size, manifest.target.grid
    )
    heldout, train = (
        Captioned([captions[i] for i in part], codes[part], tokenizer, model.text.config)
        for part in held_out(len(captions), config.seed)
    )
    return train_target(
        config,
        model,
        train,
        {"heldout_nll": heldout},
        work / config.folder,
        device,
        progress,
        resume=resume,
    )
