"""Trains a target: a text-conditional LlamaGen GPT on VQ tokens, with its text encoder.

The bundled model is trained by it, see ``tools/lantern-emoji``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from lantern_accel.families.llamagen.model import CaptionEmbedder, LlamaGenConfig, LlamaGenGPT
from lantern_accel.families.llamagen.text import TextEncoder, TextEncoderConfig
from lantern_accel.files import write_json
from lantern_accel.nn.sizes import PrefixRotary
from lantern_accel.progress import Progress
from lantern_accel.training.device import TrainDevice
from lantern_accel.training.folder import (
    read_model,
    write_model,
)
from lantern_accel.training.loop import (
    Task,
    TrainConfig,
    move_average,
    run,
)


class TargetConfig(TrainConfig):
    """Settings of the target trainer."""

    dim: int = Field(384, description="width of the transformer")
    n_layer: int = 8
    n_head: int = 6
    ffn_dim: int = 1024
    text_dim: int = 192
    text_layers: int = 2
    text_heads: int = 4
    prefix_length: int = 16
    repeat_caption: bool = Field(True, description="fill the prefix by repeating the caption")
    prefix_rotary: PrefixRotary = Field(
        "identity", description="identity: the image attends to the prompt by content"
    )
    dropout: float = Field(0.0, ge=0, lt=1)
    text_dropout: float = Field(
        0.1, ge=0, lt=1, description="share of unconditional examples (CFG)"
    )
    ema: float = Field(0.995, ge=0, lt=1, description="decay of the averaged weights that are kept")
    evaluate_every: int = Field(1000, ge=1)
    samples_every: int = Field(2000, ge=1, description="steps between images of samples")
    folder: str = Field("target", description="where in the training folder this target is kept")
    compile: bool = Field(True, description="torch.compile the loss; about twice as fast on CPU")

    @model_validator(mode="after")
    def _sizes_fit(self) -> TargetConfig:
        if self.dim % self.n_head or (self.dim // self.n_head) % 4:
            raise ValueError(
                f"dim {self.dim} must be n_head {self.n_head} times a head width that is a multiple "
                "of 4 (2D rotary positions)"
            )
        if self.text_dim % self.text_heads or (self.text_dim // self.text_heads) % 2:
            raise ValueError(
                f"text_dim {self.text_dim} must be text_heads {self.text_heads} times an even width"
            )
        return self


class Examples(Protocol):
    """Captioned images as a target learns them."""

    def draw(self, size: int, rng: random.Random, *, plain: bool = False) -> tuple[Tensor, ...]:
        """Return ``ids`` int64 and ``mask`` bool ``[size, prefix]``, and ``codes`` int64 ``[size, n]``.

        ``plain``: each image as it is, under its shortest caption, as held-out ones are judged.
        """
        ...


class TextTarget(nn.Module):
    """Text encoder and GPT, trained together."""

    def __init__(self, text: TextEncoder, gpt: LlamaGenGPT) -> None:
        super().__init__()
        self.text, self.gpt = text, gpt

    @classmethod
    def fresh(cls, config: TargetConfig, vocabulary: int, codes: int, grid: int) -> TextTarget:
        """Return an untrained model of the configured sizes, initialised as GPT-2 is."""
        text = TextEncoderConfig(
            vocab_size=vocabulary,
            dim=config.text_dim,
            n_layer=config.text_layers,
            n_head=config.text_heads,
            prefix_length=config.prefix_length,
            repeat=config.repeat_caption,
        )
        gpt = LlamaGenConfig(
            dim=config.dim,
            n_layer=config.n_layer,
            n_head=config.n_head,
            ffn_dim=config.ffn_dim,
            vocab_size=codes,
            grid=grid,
            prefix_length=config.prefix_length,
            caption_dim=config.text_dim,
            prefix_rotary=config.prefix_rotary,
        )
        model = cls(TextEncoder(text), LlamaGenGPT(gpt, dropout=config.dropout))
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)
            if name.endswith(("wo.weight", "w2.weight")):
                nn.init.normal_(weight, std=0.02 / (2 * config.n_layer) ** 0.5)
        model.spread_words()
        return model

    @torch.no_grad()
    def spread_words(self) -> None:
        """Start the text path with captions far apart.

        With GPT-2's small embeddings shared directions drown the words: captions come out
        nearly parallel (cosine 0.94 and more within two clusters).
        """
        nn.init.normal_(self.text.words.weight, std=1.0)
        nn.init.normal_(self.text.positions.weight, std=0.3)
        cls = self.gpt.cls_embedding
        assert isinstance(cls, CaptionEmbedder)
        for layer in (cls.cap_proj.fc1, cls.cap_proj.fc2):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)

    def features(
        self, ids: Tensor, mask: Tensor, drop: Tensor, codes: Tensor, taps: Sequence[int] = ()
    ) -> Tensor:
        """Return the states over prompt and image, ``[B, prefix + n - 1, D]``; ``taps``: the target's.

        Row ``prefix - 1 + n`` predicts token n.

        ``ids, mask [B, prefix]``, ``drop`` bool ``[B]`` marks unconditional rows, ``codes [B, n]``.
        """
        cond = self.text(ids, mask)
        free = self.gpt.unconditional(cond.shape[0]).to(cond.dtype)
        # As in LlamaGen, the unconditional branch keeps the caption's padding mask.
        cond = torch.where(drop.view(-1, 1, 1), free * mask.unsqueeze(-1), cond)
        return self.gpt.forward_dense(cond, codes[:, :-1], mask, taps)

    def forward(self, ids: Tensor, mask: Tensor, drop: Tensor, codes: Tensor) -> Tensor:
        """Return the mean cross-entropy of the codes, nats per token."""
        states = self.features(ids, mask, drop, codes)
        logits = self.gpt.head(states[:, self.gpt.config.prefix_length - 1 :])
        return F.cross_entropy(logits.flatten(0, 1), codes.flatten())


@torch.no_grad()
def evaluate(model: TextTarget, batches: Examples, device: TrainDevice, count: int = 256) -> float:
    """Return the mean negative log-likelihood of ``count`` examples, nats per token."""
    rng = random.Random(1234)
    was_training = model.training
    model.eval()
    total = 0.0
    for start in range(0, count, 32):
        size = min(32, count - start)
        ids, mask, codes = device.to(*batches.draw(size, rng, plain=True))
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
        train: Examples,
        judged: Mapping[str, Examples],
        device: TrainDevice,
        draw: Callable[[TextTarget, Path], None] | None = None,
    ) -> None:
        self.config, self.model, self.train, self.judged = config, model, train, judged
        self.device, self.draw = device, draw
        self.evaluate_every = config.evaluate_every
        self.samples_every = config.samples_every if draw is not None else None
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
        batch = self.train.draw(config.batch_size, rng)
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

    def averaged(self) -> TextTarget:
        """Return a copy of the model with the averaged weights."""
        own = self.model
        model = TextTarget(TextEncoder(own.text.config), LlamaGenGPT(own.gpt.config))
        model.load_state_dict(self.average, strict=False)
        return model.to(self.device.device).eval().requires_grad_(False)

    def evaluate(self, index: int) -> dict[str, float]:
        """Return the averaged model's likelihoods on held-out data."""
        model = self.averaged()
        return {name: evaluate(model, data, self.device) for name, data in self.judged.items()}

    def draw_samples(self, path: Path) -> None:
        """Generate the averaged model's images."""
        assert self.draw is not None  # else samples_every is None
        self.draw(self.averaged(), path)


def train_target(
    config: TargetConfig,
    model: TextTarget,
    train: Examples,
    judged: Mapping[str, Examples],
    out: Path,
    device: TrainDevice,
    progress: Progress | None = None,
    *,
    resume: bool = True,
    draw: Callable[[TextTarget, Path], None] | None = None,
) -> dict[str, Any]:
    """Train, resuming ``out/checkpoint.pt``; write ``target.safetensors``, ``text.safetensors``.

    ``judged`` names the held-out batches whose likelihood is reported. ``draw(model, path)`` makes the
    images of samples. Returns the report that ``out/report.json`` holds. The weights that are
    written are the moving average.
    """
    task = TargetTask(config, model.to(device.device).train(), train, judged, device, draw)
    done = run(task, config, out, device, progress, resume=resume)
    nll = done.running.get("loss")
    report = done.report(config, device, model, train_nll=nll, **task.evaluate(done.step))
    kept = task.averaged()
    write_model(kept.gpt, out, "target")
    write_model(kept.text, out, "text")
    write_json(out / "report.json", report)
    if draw is not None:
        draw(kept, out / "samples.png")
    return report


def read_target(folder: Path) -> TextTarget:
    """Read back what :func:`train_target` wrote, in float32; raises where it is not there."""
    text = read_model(TextEncoder, TextEncoderConfig, folder, "text", "target")
    return TextTarget(text, read_model(LlamaGenGPT, LlamaGenConfig, folder, "target", "target"))
