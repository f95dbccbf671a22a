"""Training of the emoji model's target; the moving average of its weights is what is kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from lantern_accel.families.llamagen.model import LlamaGenGPT
from lantern_accel.families.llamagen.text import TextEncoder
from lantern_accel.files import write_json
from lantern_accel.progress import Progress
from lantern_accel.training.device import TrainDevice
from lantern_accel.training.loop import Task, run
from lantern_emoji.averages import move_average
from lantern_emoji.batches import Batches
from lantern_emoji.folder import write_model
from lantern_emoji.target import TargetConfig, TextTarget


@torch.no_grad()
def evaluate(model: TextTarget, batches: Batches, device: TrainDevice, count: int = 256) -> float:
    """Return the mean negative log-likelihood of ``count`` examples, nats per token."""
    rng = random.Random(1234)
    was_training = model.training
    model.eval()
    total = 0.0
    for start in range(0, count, 32):
        size = min(32, count - start)
        ids, mask, codes = device.to(*batches.sample_batch(size, rng, plain=True))
        free = torch.zeros(size, dtype=torch.bool, device=device.device)
        with device.autocast():
            total += float(model(ids, mask, free, codes)) * size
    model.train(was_training)
    return total / count


class TargetTask(Task):
    """One target in training; the moving average of its weights is what is judged and kept."""

    label = "target"

    def __init__(
        self,
        config: TargetConfig,
        model: TextTarget,
        train: Batches,
        judged: Mapping[str, Batches],
        device: TrainDevice,
        draw: Callable[[TextTarget, Path], None],
        out: Path,
    ) -> None:
        """``draw(model, path)`` writes images of samples below ``out`` at every evaluation."""
        self.config, self.model, self.train, self.judged = config, model, train, judged
        self.device, self.draw, self.out = device, draw, out
        self.evaluate_every = config.evaluate_every
        self.average = {k: v.detach().clone() for k, v in model.named_parameters()}
        matrices = [p for p in model.parameters() if p.dim() == 2]
        vectors = [p for p in model.parameters() if p.dim() != 2]
        self.optimizer = device.adamw(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=(0.9, 0.95),
        )
        self.loss = device.prepare(model, compile=config.compile)

    def step(self, index: int, rate: float, done: float, rng: random.Random) -> dict[str, float]:
        """Take one optimizer step."""
        config = self.config
        batch = self.train.sample_batch(config.batch_size, rng)
        drop = torch.tensor([rng.random() < config.text_dropout for _ in range(len(batch[0]))])
        ids, mask, codes, dropped = self.device.to(*batch, drop)
        with self.device.autocast():
            loss = self.loss(ids, mask, dropped, codes)
        weights = dict(self.model.named_parameters())
        self.device.descend(self.optimizer, loss, weights.values(), rate, config.clip_norm)
        move_average(self.average, weights, config.ema, index)
        return {"loss": float(loss.detach())}

    def state(self) -> dict[str, Any]:
        """Weights, their average, and the optimizer."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": self.average,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from ``state``."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name, value in state["average"].items():
            self.average[name].copy_(value)

    def average_weights(self) -> TextTarget:
        """Return a copy of the model with the averaged weights."""
        own = self.model
        model = TextTarget(TextEncoder(own.text.config), LlamaGenGPT(own.gpt.config))
        model.load_state_dict(self.average, strict=False)
        return model.to(self.device.device).eval().requires_grad_(False)

    def evaluate(self, index: int) -> dict[str, float]:
        """Return the averaged model's likelihoods on held-out data, and make its samples."""
        model = self.average_weights()
        self.draw(model, self.out / "samples" / f"step-{index}.png")
        return {name: evaluate(model, data, self.device) for name, data in self.judged.items()}


def train_target(
    config: TargetConfig,
    model: TextTarget,
    train: Batches,
    judged: Mapping[str, Batches],
    out: Path,
    device: TrainDevice,
    progress: Progress | None = None,
    *,
    resume: bool = True,
    draw: Callable[[TextTarget, Path], None],
) -> dict[str, Any]:
    """Train, resuming ``out/checkpoint.pt``; write ``target.safetensors``, ``text.safetensors``.

    ``judged`` names the held-out batches whose likelihood is reported. ``draw(model, path)`` makes the
    images of samples. Returns the report that ``out/report.json`` holds. The weights that are
    written are the moving average.
    """
    task = TargetTask(config, model.to(device.device).train(), train, judged, device, draw, out)
    done = run(task, config, out, device, progress, resume=resume)
    nll = done.running.get("loss")
    report = done.report(config, device, model, train_nll=nll, **task.evaluate(done.step))
    kept = task.average_weights()
    write_model(kept.gpt, out, "target")
    write_model(kept.text, out, "text")
    write_json(out / "report.json", report)
    return report
