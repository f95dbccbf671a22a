"""Training a drafter for any model that the pipeline loads: an own one, or official LlamaGen files.

The images come from a folder of captioned ones, or the target draws them itself: then a drafter needs
nothing but prompts, or the class ids.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lantern_accel.errors import DataError
from lantern_accel.evaluation.scoring import conditions, encode_images, unconditional
from lantern_accel.files import write_whole
from lantern_accel.models.llamagen import LlamaGenGPT
from lantern_accel.pipeline import Pipeline
from lantern_accel.training.augment import to_float
from lantern_accel.training.device import TrainDevice
from lantern_accel.training.drafter import DrafterTrainConfig, Features, train_drafter
from lantern_accel.training.imageset import read_images
from lantern_accel.training.progress import NullProgress, Progress

HELD_OUT_SHARE = 0.05
CODES = "codes.pt"
#: Memory for encoded prompts; what goes beyond is encoded when it is drawn.
KEPT_BYTES = 1 << 30

Prompt = str | int


class ModelFeatures:
    """Features of a loaded model's target on given prompts and codes."""

    def __init__(
        self,
        pipeline: Pipeline,
        prompts: Sequence[Prompt],
        codes: Tensor,
        device: TrainDevice,
        *,
        text_dropout: float,
    ) -> None:
        if len(prompts) < 2:
            raise DataError(
                f"{len(prompts)} images are too few to train a drafter on; give 2 or more"
            )
        self.pipeline, self.prompts, self.codes = pipeline, list(prompts), codes
        self._device, self._dropout = device, text_dropout
        held = max(1, round(HELD_OUT_SHARE * len(prompts)))
        order = list(range(len(prompts)))
        random.Random(0).shuffle(order)
        self._rows = {True: order[:held], False: order[held:]}
        # Encoded once, so that a prompt without a known word is refused before any work, and a
        # large text encoder does not run in every step.
        self._known: dict[Prompt, tuple[Tensor, Tensor]] = {}
        for prompt in dict.fromkeys(self.prompts):
            condition, mask = conditions(pipeline, [prompt])
            if len(self._known) * condition.nbytes < KEPT_BYTES:
                self._known[prompt] = condition, mask

    def _conditions(self, prompts: Sequence[Prompt]) -> tuple[Tensor, Tensor]:
        rows = [
            self._known[prompt] if prompt in self._known else conditions(self.pipeline, [prompt])
            for prompt in prompts
        ]
        return torch.cat([row[0] for row in rows]), torch.cat([row[1] for row in rows])

    @property
    def gpt(self) -> LlamaGenGPT:
        target: LlamaGenGPT = self.pipeline.model.target
        return target

    @torch.no_grad()
    def draw(self, size: int, rng: random.Random, *, heldout: bool) -> Features:
        """Return one batch; see :class:`lantern_accel.training.drafter.FeatureSource`."""
        rows = [rng.choice(self._rows[heldout]) for _ in range(size)]
        condition, mask = self._conditions([self.prompts[i] for i in rows])
        free = unconditional(self.pipeline, condition, mask)
        share = 0.0 if heldout else self._dropout
        drop = torch.tensor([rng.random() < share for _ in range(size)], device=condition.device)
        condition = torch.where(drop.view(-1, *([1] * (condition.dim() - 1))), free, condition)
        seen = mask if condition.dim() == 3 else None
        codes = self.codes[rows].to(condition.device)
        states = self.gpt.forward_dense(condition, codes[:, :-1], seen)
        return Features(codes, states.float(), seen)


def own_images(
    pipeline: Pipeline,
    prompts: Sequence[Prompt],
    seed: int,
    progress: Progress,
    path: Path,
    batch: int = 8,
) -> Tensor:
    """Let the target draw an image a prompt; int64 ``[n, tokens]``, kept in ``path`` as it grows."""
    digest = hashlib.sha256(json.dumps([list(prompts), seed]).encode())
    digest.update(pipeline.model.weights_hash.encode())
    key = digest.hexdigest()
    done: list[Tensor] = []
    if path.is_file():
        stored = torch.load(path, weights_only=True)
        if stored["key"] == key:
            done = list(stored["codes"])
    progress.start("drawing images to learn from", len(prompts))
    progress.advance(len(done))
    for start in range(len(done), len(prompts), batch):
        here = list(prompts[start : start + batch])
        made = pipeline.generate(here, strategy="vanilla", seed=seed + start).tokens
        done.extend(made)
        progress.advance(len(here))
        if (start // batch) % 16 == 15 or start + batch >= len(prompts):
            kept = torch.stack(done)
            write_whole(path, lambda stream, k=kept: torch.save({"key": key, "codes": k}, stream))  # type: ignore[misc]
    progress.finish()
    return torch.stack(done)


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
) -> dict[str, Any]:
    """Train a drafter for a loaded model in ``out``; write ``drafter.safetensors`` and its config.

    ``images``: a folder of captioned images (:mod:`lantern_accel.training.imageset`). Without one the
    target draws ``samples`` images of ``prompts`` (of random classes where it takes classes).
    """
    say = progress if progress is not None else NullProgress()
    model = pipeline.model
    manifest = model.manifest
    if not isinstance(model.target, LlamaGenGPT):
        raise DataError(
            f"drafters are trained for LlamaGen targets; {manifest.name!r} is of another family"
        )
    named: list[Prompt]
    if images is not None:
        found = read_images(images, manifest.image_size)
        if found.skipped:
            listed = ", ".join(f"{name} ({why})" for name, why in found.skipped.items())
            say.log(f"skipped {len(found.skipped)} images: {listed}")
        named = found.prompts
        codes = encode_images(pipeline, to_float(torch.from_numpy(found.pixels)))
    else:
        rng = random.Random(config.seed)
        if manifest.target.conditioning == "class":
            named = [rng.randrange(manifest.target.num_classes) for _ in range(samples)]
        elif prompts:
            named = [prompts[i % len(prompts)] for i in range(samples)]
        else:
            raise DataError(
                "there is nothing to train on: name a folder of captioned images (--images), or a "
                "file with a prompt a line (--prompts) that the target then draws"
            )
        codes = own_images(pipeline, named, config.seed, say, out / CODES)
    source = ModelFeatures(pipeline, named, codes, device, text_dropout=config.text_dropout)
    vq = model.vq
    book = vq.codebook() if manifest.neighbour_space == "decoder" else vq.quantize.embedding.weight
    return train_drafter(config, source, out, device, progress, resume=resume, codebook=book)
