"""What a loaded model is shown while something learns from it: prompts, and images as their tokens.

The images come from a folder of captioned ones, or the target generates them itself, which takes
nothing but prompts or class ids.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lantern_accel.errors import DataError
from lantern_accel.families.base import Conditions, Size
from lantern_accel.files import read_tensors, write_tensors
from lantern_accel.generation.pipeline import Pipeline, Prompt
from lantern_accel.progress import Progress
from lantern_accel.records import digest
from lantern_accel.strategy.values import Strategy
from lantern_accel.training.imageset import encode_images, read_images

#: Memory for encoded prompts; those that do not fit are encoded each time they are used.
KEPT_BYTES = 1 << 30


class Encoded:
    """The conditions of prompts for one size of image.

    Every prompt is encoded once, so that one that the model cannot take is refused before any work,
    and a large text encoder does not run in every step.
    """

    def __init__(
        self, pipeline: Pipeline, prompts: Sequence[Prompt], size: Size | None = None
    ) -> None:
        self._pipeline, self._size = pipeline, size
        self._known: dict[Prompt, Conditions] = {}
        for prompt in dict.fromkeys(prompts):
            made = pipeline.conditions([prompt], size)
            self.shape = made.shape
            if len(self._known) * made.condition.nbytes < KEPT_BYTES:
                self._known[prompt] = made

    def of(self, prompts: Sequence[Prompt]) -> Conditions:
        """Return the conditions of some of the prompts."""
        model = self._pipeline.model
        found = (self._known.get(prompt) for prompt in prompts)
        made = [
            self._pipeline.conditions([prompt], self._size) if one is None else one
            for prompt, one in zip(prompts, found, strict=True)
        ]
        joined: Conditions = model.family.join(model, made)
        return joined


def chosen_prompts(
    pipeline: Pipeline, seed: int, prompts: Sequence[Prompt], samples: int
) -> list[Prompt]:
    """Return the prompts of ``samples`` images: ``prompts`` in turn; classes at random of such a model.

    Raises :class:`DataError` where there are none.
    """
    manifest = pipeline.model.manifest
    if manifest.conditioning == "class":
        rng = random.Random(seed)
        return [rng.randrange(manifest.target.num_classes) for _ in range(samples)]
    if not prompts:
        raise DataError(
            "there is nothing to train on: name a folder of captioned images (--images), or a "
            "file with one prompt per line (--prompts), which the target then generates"
        )
    return [prompts[i % len(prompts)] for i in range(samples)]


def generate_batch(
    pipeline: Pipeline,
    encoded: Encoded,
    prompts: Sequence[Prompt],
    batch: int,
    strategy: Strategy,
    seed: int,
    observer: Callable[..., object] | None = None,
) -> Tensor:
    """Return the tokens of one image per prompt, int64 ``[n, tokens]``.

    They are generated ``batch`` together, so that the last few need no engine of their own.
    ``observer`` sees every step of all.
    """
    filled = [*prompts, *[prompts[-1]] * (batch - len(prompts))]
    sampling = pipeline.sampling()
    conditions = encoded.of(filled)
    rows = pipeline.model.family.rows(pipeline.model, conditions, sampling)
    seeds = [(seed, number) for number in range(batch)]
    made, _ = pipeline.decode_rows(
        lambda: (rows, conditions.shape), strategy, sampling, seeds, observer=observer
    )
    return made.tokens if observer is not None else made.tokens[: len(prompts)]


def part_of(folder: Path, first: int) -> Path:
    """Return the file of the batch that begins with image ``first``."""
    return folder / f"{first:06d}.safetensors"


def record_batches(
    prompts: Sequence[Prompt],
    batch: int,
    folder: Path,
    progress: Progress,
    draw: Callable[[Sequence[Prompt], int], dict[str, Tensor]],
) -> dict[str, Tensor]:
    """Return what is learned from, by name, the batches' tensors one after another.

    ``draw``: makes those of some prompts, of which the first has the given index. ``folder`` keeps every
    batch, so that a run which was killed goes on with the next.
    """
    parts: list[dict[str, Tensor]] = []
    progress.start("generating images to learn from", len(prompts))
    for first in range(0, len(prompts), batch):
        here, path = prompts[first : first + batch], part_of(folder, first)
        if (part := read_tensors(path, bool)) is None:
            try:
                part = draw(here, first)
            except BaseException:
                progress.log(f"{first} images are kept in {folder}; the same command continues")
                raise
            write_tensors(path, part, must=True)
        parts.append(part)
        progress.advance(len(here))
    progress.finish()
    return {name: torch.cat([one[name] for one in parts]) for name in parts[0]}


def own_images(
    pipeline: Pipeline,
    prompts: Sequence[Prompt],
    seed: int,
    progress: Progress,
    folder: Path,
    batch: int = 8,
    size: Size | None = None,
) -> Tensor:
    """Let the target generate an image per prompt: int64 ``[n, tokens]``, kept in ``folder``."""
    key = digest([list(prompts), seed, pipeline.model.weights_hash, size, batch])[:16]
    plain, encoded = pipeline.strategy("vanilla"), Encoded(pipeline, prompts, size)
    together = min(batch, len(prompts))

    def generate(here: Sequence[Prompt], first: int) -> dict[str, Tensor]:
        return {"codes": generate_batch(pipeline, encoded, here, together, plain, seed + first)}

    return record_batches(prompts, batch, folder / f"images-{key}", progress, generate)[
        "codes"
    ].long()


def recorded_images(
    pipeline: Pipeline,
    folder: Path,
    seed: int,
    progress: Progress,
    *,
    images: Path | None = None,
    prompts: Sequence[Prompt] = (),
    samples: int = 256,
    size: Size | None = None,
    batch: int = 8,
) -> tuple[list[Prompt], Tensor, Encoded]:
    """Return prompts, the tokens of an image each, int64 ``[n, tokens]``, and the prompts encoded.

    ``images``: a folder of captioned images (:mod:`lantern_accel.training.imageset`). Without one the
    target generates ``samples`` images of ``prompts`` (of random classes where it takes classes),
    ``batch`` together, and ``folder`` keeps them. Raises :class:`DataError` where there is nothing
    to learn from.
    """
    model = pipeline.model
    manifest = model.manifest
    if images is not None:
        if not hasattr(model.vq, "encode"):
            raise DataError(
                f"the model {manifest.name!r} comes without what turns images into codes, so that it "
                "cannot learn from --images; name a file of --prompts, whose images it generates itself"
            )
        width, height = model.family.image_size(manifest, size)
        found = read_images(images, width, height)
        if found.skipped:
            listed = ", ".join(f"{name} ({why})" for name, why in found.skipped.items())
            progress.log(f"skipped {len(found.skipped)} images: {listed}")
        encoded = Encoded(pipeline, found.prompts, size)
        down = manifest.vq.downsample
        flat = encode_images(pipeline, found.pixels)
        tokens = model.family.tokens(model, flat.view(-1, height // down, width // down))
        return found.prompts, tokens, encoded
    chosen = chosen_prompts(pipeline, seed, prompts, samples)
    encoded = Encoded(pipeline, chosen, size)
    return chosen, own_images(pipeline, chosen, seed, progress, folder, batch, size), encoded
