"""Features of a target that was trained here, for its drafter."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lantern_accel.families.llamagen.model import LlamaGenGPT
from lantern_accel.families.registry import family
from lantern_accel.training.device import TrainDevice
from lantern_accel.training.drafter import Features
from lantern_emoji.batches import Batches
from lantern_emoji.target import TextTarget


class TextTargetFeatures:
    """Features of a target that was trained here, on its own training mixture."""

    def __init__(
        self,
        target: TextTarget,
        train: Batches,
        heldout: Batches,
        device: TrainDevice,
        *,
        text_dropout: float,
        compile: bool,
        taps: Sequence[int] = (),
    ) -> None:
        self.family = family("llamagen")
        self.key = "own"  # one folder holds one target
        self.target = target.to(device.device).eval().requires_grad_(False)
        self._batches = {False: train, True: heldout}
        self._device, self._dropout, self._taps = device, text_dropout, taps
        device.adopt(target)
        states: Callable[..., Tensor] = target.features
        self._states = torch.compile(states, dynamic=False) if compile else states

    @property
    def gpt(self) -> LlamaGenGPT:
        return self.target.gpt

    def sample_batch(
        self, size: int, rng: random.Random, *, heldout: bool, coupled: bool = False
    ) -> Features:
        """Return one batch; held-out ones are plain names of concepts never trained on."""
        batch = self._batches[heldout].sample_batch(size, rng, plain=heldout)
        share = 0.0 if heldout or coupled else self._dropout
        drop = torch.tensor([rng.random() < share for _ in range(size)])
        if coupled:
            batch = tuple(torch.cat((part, part)) for part in batch)
            drop = torch.cat((drop, ~drop))
        ids, mask, codes, dropped = self._device.to(*batch, drop)
        with torch.no_grad(), self._device.autocast():
            states = self._states(ids, mask, dropped, codes, self._taps)
        return Features(codes, states.detach().float(), mask)
