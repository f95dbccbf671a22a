"""Training a drafter for any model that the pipeline loads: your own, or a published one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from lantern_accel.errors import DataError
from lantern_accel.families.base import Family, Size
from lantern_accel.families.target import TrunkTarget
from lantern_accel.generation.pipeline import Pipeline, Prompt
from lantern_accel.progress import Progress
from lantern_accel.strategy.values import Sampling
from lantern_accel.training.device import TrainDevice
from lantern_accel.training.drafter import DrafterTrainConfig, Features, start_of, train_drafter
from lantern_accel.training.loop import CHECKPOINT, held_out, load_checkpoint
from lantern_accel.training.recording import Encoded, recorded_images


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
        # Any guidance makes the rows without a prompt; without it no row lacks its prompt in decoding.
        self._sampling = Sampling(cfg_scale=2.0) if self.family.guided else Sampling()
        self._dropout = text_dropout if self.family.guided else 0.0
        held, trained = held_out(len(prompts), 0)
        self._rows = {True: held, False: trained}
        self._encoded = encoded or Encoded(pipeline, self.prompts)
        self._kept: dict[tuple[int, bool, int], Tensor] = {}
        self._room = kept_bytes
        self._taps = tuple(taps)

    @cached_property
    def gpt(self) -> TrunkTarget:
        """The target for this size of image; prompts may be of any length."""
        target: TrunkTarget = self.family.target_for_shape(
            self.pipeline.model, self._encoded.shape
        )[0]
        return target

    @torch.no_grad()
    def sample_batch(
        self, size: int, rng: random.Random, *, heldout: bool, coupled: bool = False
    ) -> Features:
        """Return one batch; see :class:`lantern_accel.training.drafter.FeatureSource`."""
        chosen = [rng.choice(self._rows[heldout]) for _ in range(size)]
        share = 0.0 if heldout else self._dropout
        dropped = [rng.random() < share for _ in range(size)]
        made = self._encoded.of([self.prompts[i] for i in chosen])
        rows = self.family.rows(self.pipeline.model, made, self._sampling)
        # Each image with its prompt, or without it, as guidance's unconditional branch sees it.
        picks = [i + size * without for i, without in enumerate(dropped)]
        if coupled:
            chosen, picks = chosen * 2, list(range(2 * size))
        condition = rows.condition[picks]
        mask = rows.mask if self.gpt.own_prompts else torch.cat((rows.mask, rows.mask))
        seen = mask[picks] if mask.shape[1] > 1 else None
        codes = self.codes[chosen].to(condition.device)
        # A prompt is as long as the longest of its batch.
        keys = [(i, j >= size, mask.shape[1]) for i, j in zip(chosen, picks, strict=True)]
        states = self._states(keys, condition, codes, seen)
        return Features(codes, states.float(), seen, condition)

    def _states(
        self,
        keys: Sequence[tuple[int, bool, int]],
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
            made = self.gpt.forward_dense(condition[rows], codes[rows, :-1], seen, self._taps)
            for i, row in zip(new, made, strict=False):
                found[i] = row
                if keys[i] not in self._kept and row.nbytes <= self._room:
                    self._kept[keys[i]] = row.to("cpu", copy=True)
                    self._room -= row.nbytes
        return torch.stack([one.to(condition.device) for one in found if one is not None])


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
) -> dict[str, object]:
    """Train a drafter for a loaded model in ``out``; write ``drafter.safetensors`` and its config.

    ``images``, ``prompts``, ``samples``: what it learns from, as :func:`.recording.recorded_images` takes
    them. ``size``: width and height in pixels, for a model that generates several sizes; None: its own.
    """
    start = start_of(config, out)
    if resume:  # before hours of generation, and again when the run goes on
        load_checkpoint(out / CHECKPOINT, config)
    if config.coupled and not pipeline.model.family.guided:
        raise DataError(
            f"coupled training learns guided distributions, and {pipeline.model.manifest.name!r} "
            "decodes without guidance; leave coupled out"
        )
    named, codes, encoded = recorded_images(
        pipeline, out, config.seed, Progress() if progress is None else progress,
        images=images, prompts=prompts, samples=samples, size=size, batch=config.images_at_once,
    )  # fmt: skip
    source = ModelFeatures(
        pipeline, named, codes, text_dropout=config.text_dropout, encoded=encoded,
        kept_bytes=int(config.kept_gib * (1 << 30)), taps=config.taps,
    )  # fmt: skip
    return train_drafter(config, source, out, device, progress, resume=resume, start=start)
