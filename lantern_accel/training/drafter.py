"""Training the drafter by EAGLE's recipe, on the features of a frozen target.

The embedding comes from the target and stays frozen, as does the head. The loss is in
:mod:`lantern_accel.training.objective`.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lantern_accel.checkpoints.layouts import OWN_WEIGHTS
from lantern_accel.errors import DataError
from lantern_accel.families.base import Family
from lantern_accel.families.llamagen.drafter import DrafterConfig, EagleDrafter
from lantern_accel.families.llamagen.keys import load_float
from lantern_accel.files import write_json
from lantern_accel.quality.progress import Progress
from lantern_accel.training.common import read_made, seed_everything
from lantern_accel.training.device import TrainDevice
from lantern_accel.training.loop import Task, run
from lantern_accel.training.objective import (
    DrafterLoss,
    DrafterTrainConfig,
    Features,
    Teacher,
    neighbourhoods,
)
from lantern_accel.training.target import write_weights


class FeatureSource(Protocol):
    """What a drafter learns from: a frozen target, and batches of its states."""

    @property
    def gpt(self) -> Teacher: ...

    @property
    def family(self) -> Family: ...

    @property
    def key(self) -> str:
        """The target's identity: a checkpoint is continued only on the target it was made for."""
        ...

    def draw(
        self, size: int, rng: random.Random, *, heldout: bool, coupled: bool = False
    ) -> Features:
        """Return one batch; a training batch has its share of unconditional rows.

        ``coupled``: ``2 size`` rows, every image with its prompt, then every one without.
        """
        ...


class DrafterTask(Task):
    """One drafter in training; the weights with the best held-out top-3 agreement are kept."""

    label = "drafter"

    def __init__(
        self,
        config: DrafterTrainConfig,
        source: FeatureSource,
        device: TrainDevice,
        codebook: Tensor | None = None,
        *,
        start: EagleDrafter | None = None,
    ) -> None:
        self.config, self.source, self.device = config, source, device
        self.evaluate_every = config.evaluate_every
        near = None
        if config.objective == "lantern":
            if codebook is None:
                raise DataError("the lantern objective needs the codebook; this model has none")
            near = neighbourhoods(codebook, config.lantern_k)
        self.drafter: Any = source.family.fresh_drafter(source.gpt, config.n_layer, config.taps)
        if start is not None:
            self._begin_with(start)
        self.loss = DrafterLoss(self.drafter, source.gpt, config, near).to(device.device)
        self.trained = [p for p in self.drafter.parameters() if p.requires_grad]
        optimizer = device.adamw(
            self.trained, lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay
        )
        self.run, self.optimizer = device.prepare(self.loss, optimizer, compile=config.compile)
        self.best = -1.0
        self.kept = {k: v.clone() for k, v in self._weights().items()}

    def _begin_with(self, start: EagleDrafter) -> None:
        """Start from a trained drafter; blocks and taps that it lacks keep their random values."""
        ours, theirs = self.drafter.config, start.config
        more = {"n_layer": theirs.n_layer, "taps": theirs.taps}
        fitting = isinstance(ours, DrafterConfig) and theirs.n_layer <= ours.n_layer
        fitting = fitting and theirs.taps in ((), ours.taps)
        if not fitting or theirs != ours.model_copy(update=more):
            raise DataError(
                f"the drafter to start from is {theirs!r}; this target's is {ours!r}, and only n_layer "
                "may be less and taps be absent"
            )
        self.drafter.load_state_dict({**self.drafter.state_dict(), **start.state_dict()})

    def _weights(self) -> dict[str, Tensor]:
        """Return what is trained; the embedding, by far the largest part, belongs to the target."""
        frozen = {name for name, p in self.drafter.named_parameters() if not p.requires_grad}
        return {k: v for k, v in self.drafter.state_dict().items() if k not in frozen}

    def put(self, weights: dict[str, Tensor]) -> None:
        """Load weights; frozen ones that are not among them stay as they are."""
        self.drafter.load_state_dict({**self.drafter.state_dict(), **weights})

    def _mask(self, batch: Features) -> Tensor | None:
        seen = batch.mask is not None and self.drafter.config.mask_padding
        return batch.mask[:, :-1] if seen and batch.mask is not None else None

    def _own(self, batch: Features, generator: torch.Generator) -> Tensor | None:
        """Return which of an image's positions are fed predictions, as deeper drafts are."""
        if not self.config.predicted_share:
            return None
        pairs = 2 if self.config.coupled else 1
        rows, length = batch.states.shape[0] // pairs, batch.states.shape[1] - 1
        own = torch.rand(rows, length, generator=generator) < self.config.predicted_share
        own[:, : batch.states.shape[1] - batch.codes.shape[1] + 1] = False  # the prompt's are known
        return torch.cat([own] * pairs).to(self.device.device)

    def step(self, index: int, rate: float, done: float, rng: random.Random) -> dict[str, float]:
        """Take one optimizer step."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        config = self.config
        batch = self.source.draw(config.batch_size, rng, heldout=False, coupled=config.coupled)
        generator = torch.Generator().manual_seed(rng.getrandbits(62))
        drawn = torch.rand(batch.states.shape, generator=generator) - 0.5
        noise = (drawn * config.noise).to(self.device.device)
        own = self._own(batch, generator)
        with self.device.autocast():
            loss, figures = self.run(
                batch.codes, batch.states, noise, self._mask(batch), batch.condition, own
            )
        self.device.backward(loss)
        self.device.update(self.optimizer, self.trained, self.config.clip_norm)
        return {"loss": float(loss.detach()), "top3": float(figures[1])}

    def state(self) -> dict[str, Any]:
        """Weights, the best ones so far, and the optimizer."""
        return {
            "drafter": self._weights(),
            "optimizer": self.optimizer.state_dict(),
            "kept": self.kept,
            "best": self.best,
            "key": self.source.key,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from ``state``."""
        if state.get("key", self.source.key) != self.source.key:
            raise DataError(
                "the checkpoint in the training folder belongs to a drafter for another model; name "
                "another folder with --work, or begin anew with --restart"
            )
        self.put(state["drafter"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.best = state["best"]
        self.kept = {k: v.to(self.device.device) for k, v in state["kept"].items()}

    @torch.no_grad()
    def evaluate(self, index: int) -> dict[str, float]:
        """Return held-out agreement, and keep the weights where it is the best."""
        rng, count = random.Random(99), self.config.evaluate_batches
        total = torch.zeros(3)
        self.drafter.eval()
        for _ in range(count):
            batch = self.source.draw(
                self.config.batch_size, rng, heldout=True, coupled=self.config.coupled
            )
            with self.device.autocast():
                still = torch.zeros_like(batch.states)
                mask = self._mask(batch)
                figures = self.loss(batch.codes, batch.states, still, mask, batch.condition)[1]
            total += figures.cpu() / count
        self.drafter.train()
        top1, top3, refused = (float(x) for x in total)
        if top3 > self.best:
            self.best = top3
            self.kept = {k: v.clone() for k, v in self._weights().items()}
        found = {"heldout_top1": top1, "heldout_top3": top3}
        return found | ({"heldout_refused": refused} if self.loss.near is not None else {})


def train_drafter(
    config: DrafterTrainConfig,
    source: FeatureSource,
    out: Path,
    device: TrainDevice,
    progress: Progress | None = None,
    *,
    resume: bool = True,
    codebook: Tensor | None = None,
    start: EagleDrafter | None = None,
) -> dict[str, Any]:
    """Train on a frozen target, resuming ``out/checkpoint.pt``; write ``drafter.safetensors``.

    ``codebook [V, d]``, in the space in which neighbours are measured, is needed for the lantern
    objective. ``start``: the drafter to train on. The weights with the best held-out top-3 agreement
    are kept. Returns the report.
    """
    seed_everything(config.seed)
    task = DrafterTask(config, source, device, codebook, start=start)
    done = run(task, config, out, device, progress, resume=resume)
    last = task.evaluate(done.step)
    report = done.report(config, device, task.drafter, **last | {"heldout_top3": task.best})
    if device.main:
        task.put(task.kept)
        made = source.family.drafter_files(task.drafter)
        write_weights(made.weights, out / OWN_WEIGHTS)
        write_json(out / made.config_name, made.config)
        write_json(out / "report.json", report)
    return report


def read_drafter(folder: Path) -> EagleDrafter:
    """Read back what :func:`train_drafter` wrote, in float32; raises where it is not there."""
    drafter = EagleDrafter(read_made(DrafterConfig, folder / "drafter.json", "drafter"))
    load_float(drafter, folder / "drafter.safetensors")
    return drafter
