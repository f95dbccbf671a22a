"""Training a drafter for any model that the pipeline loads: your own, or a published one.

The images come from a folder of captioned ones, or the target draws them itself, which takes
nothing but prompts or class ids.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lantern_accel.errors import DataError
from lantern_accel.families.base import Conditions, Family, Size
from lantern_accel.families.llamagen.manifest import LlamaGenManifest
from lantern_accel.files import write_whole
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.quality.imageset import read_images
from lantern_accel.quality.progress import Progress
from lantern_accel.quality.scoring import GUIDED, encode_images
from lantern_accel.strategy.values import Sampling
from lantern_accel.training.device import TrainDevice
from lantern_accel.training.drafter import (
    DrafterTrainConfig,
    Features,
    Teacher,
    read_drafter,
    train_drafter,
)
from lantern_accel.training.loop import held_out

CODES = "codes.pt"
GIB = 1 << 30
#: Memory for encoded prompts; those that do not fit are encoded each time they are drawn.
KEPT_BYTES = GIB

Prompt = str | int


class Encoded:
    """The conditions of prompts for one size of picture.

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
        made = [
            self._known[prompt]
            if prompt in self._known
            else self._pipeline.conditions([prompt], self._size)
            for prompt in prompts
        ]
        joined: Conditions = model.family.join(model, made)
        return joined


class ModelFeatures:
    """Features of a loaded model's target on given prompts and codes.

    States are kept in ``kept_bytes`` of the host's memory, in the target's dtype: the target, which
    is nearly all of a step's work, then runs once per image. States that do not fit are computed
    again.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        prompts: Sequence[Prompt],
        codes: Tensor,
        device: TrainDevice,
        *,
        text_dropout: float,
        encoded: Encoded | None = None,
        kept_bytes: int = 0,
        taps: Sequence[int] = (),
    ) -> None:
        if len(prompts) < 2:
            raise DataError(
                f"{len(prompts)} images are too few to train a drafter on; give 2 or more"
            )
        self.pipeline, self.prompts, self.codes = pipeline, list(prompts), codes
        self.family: Family = pipeline.model.family
        self.key = pipeline.model.weights_hash
        # Without guidance no row lacks its prompt in decoding either.
        self._sampling = GUIDED if self.family.guided else Sampling()
        self._device, self._dropout = device, text_dropout if self.family.guided else 0.0
        held, trained = held_out(len(prompts), 0)
        self._rows = {True: held, False: trained}
        self._encoded = encoded or Encoded(pipeline, self.prompts)
        self._kept: dict[tuple[int, bool, int], Tensor] = {}
        self._room = kept_bytes
        self._taps = {"taps": tuple(taps)} if taps else {}  # which not every family's target has

    @cached_property
    def gpt(self) -> Teacher:
        """The target for this size of picture; prompts may be of any length."""
        target: Teacher = self.family.target_for_shape(self.pipeline.model, self._encoded.shape)[0]
        return target

    @torch.no_grad()
    def draw(
        self, size: int, rng: random.Random, *, heldout: bool, coupled: bool = False
    ) -> Features:
        """Return one batch; see :class:`lantern_accel.training.drafter.FeatureSource`."""
        chosen = [rng.choice(self._rows[heldout]) for _ in range(size)]
        share = 0.0 if heldout else self._dropout
        dropped = [rng.random() < share for _ in range(size)]
        made = self._encoded.of([self.prompts[i] for i in chosen])
        rows = self.family.rows(self.pipeline.model, made, self._sampling)
        target: Any = self.gpt
        # Each image with its prompt, or without it, as guidance's unconditional branch sees it.
        picks = [i + size * without for i, without in enumerate(dropped)]
        if coupled:
            chosen, picks = chosen * 2, list(range(2 * size))
        condition = rows.condition[picks]
        mask = rows.mask if target.own_prompts else torch.cat((rows.mask, rows.mask))
        seen = mask[picks] if mask.shape[1] > 1 else None
        codes = self.codes[chosen].to(condition.device)
        # A prompt is as long as the longest of its batch.
        keys = [(i, j >= size, mask.shape[1]) for i, j in zip(chosen, picks, strict=True)]
        states = self._states(keys, target, condition, codes, seen)
        return Features(codes, states.float(), seen, condition)

    def _states(
        self,
        keys: Sequence[tuple[int, bool, int]],
        target: Any,
        condition: Tensor,
        codes: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """Return the states of the rows, computing those that are not kept.

        ``keys``: of each row its image, whether it lacks its prompt, and the prompt's positions.
        """
        found = [self._kept.get(key) for key in keys]
        new = [i for i, one in enumerate(found) if one is None]
        if new:
            # A few batch sizes, since some devices compile each.
            rows = (new + new[:1] * len(keys))[: min(1 << (len(new) - 1).bit_length(), len(keys))]
            seen = None if mask is None else mask[rows]
            made = target.forward_dense(condition[rows], codes[rows, :-1], seen, **self._taps)
            for i, row in zip(new, made, strict=False):
                found[i] = row
                if keys[i] not in self._kept and row.nbytes <= self._room:
                    self._kept[keys[i]] = row.to("cpu", copy=True)
                    self._room -= row.nbytes
        return torch.stack([one.to(condition.device) for one in found if one is not None])


def own_images(
    pipeline: Pipeline,
    prompts: Sequence[Prompt],
    seed: int,
    progress: Progress,
    path: Path,
    batch: int = 8,
    size: Size | None = None,
) -> Tensor:
    """Let the target draw one image per prompt: int64 ``[n, tokens]``, saved in ``path`` on the way."""
    asked = [list(prompts), seed, *([list(size)] if size is not None else [])]
    digest = hashlib.sha256(json.dumps(asked).encode())
    digest.update(pipeline.model.weights_hash.encode())
    key = digest.hexdigest()
    done: list[Tensor] = []
    if path.is_file():
        try:
            stored = torch.load(path, weights_only=True)
            if stored["key"] == key:
                done = list(stored["codes"].long())[: len(prompts)]
        except Exception:  # whatever a damaged file makes torch raise; its images are drawn again
            done = []
    sampling, plain = pipeline.sampling(), pipeline.strategy("vanilla")
    progress.start("drawing images to learn from", len(prompts))
    progress.advance(len(done))
    for start in range(len(done), len(prompts), batch):
        here = list(prompts[start : start + batch])
        # As many as the others have, so that the last few need no engine of their own.
        filled = here + here[-1:] * (min(batch, len(prompts)) - len(here))
        conditions = pipeline.conditions(filled, size)
        rows = pipeline.model.family.rows(pipeline.model, conditions, sampling)
        made = pipeline.draw_tokens(
            rows, conditions.shape, plain, sampling, seed + start, range(len(filled))
        )
        done.extend(made[: len(here)])
        progress.advance(len(here))
        if (start // batch) % 16 == 15 or start + batch >= len(prompts):
            kept = torch.stack(done)
            write_whole(path, lambda stream, k=kept: torch.save({"key": key, "codes": k}, stream))  # type: ignore[misc]
    progress.finish()
    return torch.stack(done)


def _drawn_together(
    pipeline: Pipeline,
    prompts: Sequence[Prompt],
    seed: int,
    progress: Progress,
    out: Path,
    device: TrainDevice,
    size: Size | None,
    batch: int,
) -> Tensor:
    """Let every process draw its share of the images; all of them return all."""
    world = device.world
    if len(prompts) < world:
        raise DataError(f"{len(prompts)} images are too few for {world} processes; ask for more")

    def share(rank: int, say: Progress) -> Tensor:
        path = out / (CODES if world == 1 else f"{rank}-of-{world}-{CODES}")
        first = seed + rank * len(prompts)
        return own_images(pipeline, prompts[rank::world], first, say, path, batch, size)

    mine = share(device.rank, progress if device.main else Progress())
    device.wait()
    codes = torch.empty(len(prompts), mine.shape[1], dtype=mine.dtype)
    for rank in range(world):
        codes[rank::world] = share(rank, Progress())
    return codes


def run_model_drafter(
    pipeline: Pipeline,
    config: DrafterTrainConfig,
    out: Path,
    device: TrainDevice,
    progress: Progress | None = None,
    *,
    resume: bool = True,
    images: Path | None = None,
    prompts: Sequence[Prompt] = (),
    samples: int = 256,
    size: Size | None = None,
) -> dict[str, Any]:
    """Train a drafter for a loaded model in ``out``; write ``drafter.safetensors`` and its config.

    ``images``: a folder of captioned images (:mod:`lantern_accel.quality.imageset`). Without one the
    target draws ``samples`` images of ``prompts`` (of random classes where it takes classes).
    ``size``: width and height in pixels, for a model that draws several sizes; None: its own.
    """
    say = Progress() if progress is None else progress
    model = pipeline.model
    manifest = model.manifest
    start = None
    if config.start_from is not None:
        if not isinstance(manifest, LlamaGenManifest):
            raise DataError(
                f"start_from continues drafters of LlamaGen targets, and {manifest.name!r} is not one; "
                "leave it out"
            )
        start = read_drafter(out.parent / config.start_from)
    if config.coupled and not model.family.guided:
        raise DataError(
            f"coupled training learns guided distributions, and {manifest.name!r} is drawn without "
            "guidance; leave coupled out"
        )
    if images is not None and not hasattr(model.vq, "encode"):
        raise DataError(
            f"the model {manifest.name!r} comes without what turns pictures into codes, so that it "
            "cannot learn from --images; name a file of --prompts, whose pictures it draws itself"
        )
    width, height = model.family.picture(manifest, size)
    named: list[Prompt]
    if images is not None:
        found = read_images(images, width, height)
        if found.skipped:
            listed = ", ".join(f"{name} ({why})" for name, why in found.skipped.items())
            say.log(f"skipped {len(found.skipped)} images: {listed}")
        named = found.prompts
        encoded = Encoded(pipeline, named, size)
        down = manifest.vq.downsample
        flat = encode_images(pipeline, found.pixels)
        codes = model.family.tokens(model, flat.view(-1, height // down, width // down))
    else:
        rng = random.Random(config.seed)
        if getattr(manifest.target, "conditioning", "text") == "class":
            named = [rng.randrange(manifest.target.num_classes) for _ in range(samples)]
        elif prompts:
            named = [prompts[i % len(prompts)] for i in range(samples)]
        else:
            raise DataError(
                "there is nothing to train on: name a folder of captioned images (--images), or a "
                "file with one prompt per line (--prompts), which the target then draws"
            )
        encoded = Encoded(pipeline, named, size)
        codes = _drawn_together(
            pipeline, named, config.seed, say, out, device, size, config.images_at_once
        )
    source = ModelFeatures(
        pipeline, named, codes, device, text_dropout=config.text_dropout, encoded=encoded,
        kept_bytes=int(config.kept_gib * GIB), taps=config.taps,
    )  # fmt: skip
    book, on_sphere = model.family.codebook(model)
    if on_sphere and manifest.neighbour_space == "decoder":
        book = F.normalize(book.float(), dim=-1)
    return train_drafter(
        config, source, out, device, progress, resume=resume, codebook=book, start=start
    )
