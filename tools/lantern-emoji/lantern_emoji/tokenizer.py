"""Training of the image tokenizer (VQ autoencoder), and the codes of the training images.

Loss: L1 + MSE + finite differences + commitment (VQ-VAE, arXiv 1711.00937), straight-through
gradients.
"""

from __future__ import annotations

import platform
import random
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from lantern_accel.errors import DataError
from lantern_accel.files import write_json
from lantern_accel.generation.result import image_grid, save_image
from lantern_accel.nn.vq import VQConfig, VQModel
from lantern_accel.progress import Progress
from lantern_accel.training.device import TrainDevice
from lantern_accel.training.loop import Task, TrainConfig, run, seed_everything
from lantern_accel_profiles.quality.features import MISSING, is_there, load_network
from lantern_emoji.augment import augment, to_float
from lantern_emoji.averages import CodebookAverage, move_average
from lantern_emoji.data import EmojiDataset
from lantern_emoji.encode import psnr, reconstruct
from lantern_emoji.folder import load_tokenizer, write_model
from lantern_emoji.render import SIZE
from lantern_emoji.scenes import Scene, draw_scenes, render_scene


def small_vq() -> VQConfig:
    """Return the bundled model's sizes: 64x64 pixels to 16x16 codes out of 2048."""
    return VQConfig(
        ch=32,
        ch_mult=(1, 2, 2),
        num_res_blocks=1,
        z_channels=64,
        codebook_size=2048,
        codebook_dim=8,
        l2_norm=True,
    )


class TokenizerConfig(TrainConfig):
    """How the tokenizer is trained."""

    steps: int = Field(default=4000, ge=1)
    vq: VQConfig = Field(default_factory=small_vq)
    commitment: float = Field(default=0.25, ge=0)
    codebook_decay: float = Field(
        default=0.98, gt=0, lt=1, description="of the codebook's moving average"
    )
    dead_below: float = Field(
        default=0.02, ge=0, description="a code used less often per batch, on average, is restarted"
    )
    quantize_from: float = Field(
        default=0.04, ge=0, lt=1, description="share of steps before quantising"
    )
    hue: float = Field(default=0.25, ge=0, le=1, description="share of images whose hue is turned")
    part: Literal["all", "decoder"] = Field(
        "all",
        description="decoder: train only the decoder of a finished tokenizer, whose codes stay",
    )
    scene_share: float = Field(0.25, ge=0, le=1, description="share of images that are scenes")
    perceptual: float = Field(
        0.0, ge=0, description="weight of the feature distance (needs the extra eval)"
    )
    ema: float = Field(
        0.99, ge=0, lt=1, description="decoder only: decay of the averaged weights that are kept"
    )

    @model_validator(mode="after")
    def _sizes_fit(self) -> TokenizerConfig:
        if SIZE % self.vq.downsample:
            raise ValueError(
                f"vq.ch_mult {list(self.vq.ch_mult)} makes a token of {self.vq.downsample} pixels, "
                f"which do not fit an image of {SIZE}"
            )
        return self


class TokenizerReport(BaseModel):
    """The result of training; ``psnr`` is over held-out images, in dB, per image set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int
    seconds: float
    images_seen: int
    parameters: int
    psnr: dict[str, float]
    mean_psnr: float
    codes_used: int
    codebook_size: int
    environment: dict[str, str]


def reconstruction_loss(output: Tensor, target: Tensor) -> Tensor:
    """L1 + MSE + L1 of horizontal and vertical differences, of images ``[B, 3, H, W]``."""
    error = output - target
    loss = error.abs().mean() + error.square().mean()
    return loss + error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()


class TokenizerTask(Task):
    """The tokenizer in training."""

    label = "tokenizer"

    def __init__(
        self,
        config: TokenizerConfig,
        data: EmojiDataset,
        device: TrainDevice,
        out: Path,
        start: VQModel | None = None,
    ) -> None:
        self.config, self.data, self.device, self.out = config, data, device, out
        self.images = torch.from_numpy(data.images)
        self.weights = torch.from_numpy(data.sampling_weights())
        self.flippable = torch.tensor([record.flippable for record in data.records])
        self.heldout = data.images[data.split("heldout")[::7][:64]]
        self.evaluate_every = config.checkpoint_every if len(self.heldout) else None
        self.model = VQModel(config.vq).to(device.device)
        self.alone = config.part == "decoder"
        if start is not None:
            self.model.load_state_dict(start.state_dict())
        self.model.quantize.embedding.weight.requires_grad_(False)
        if self.alone:
            for part in (self.model.encoder, self.model.quant_conv):
                part.requires_grad_(False)
        self.learned = {k: p for k, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = device.adamw(
            list(self.learned.values()),
            lr=config.lr,
            betas=(0.9, 0.95),
            weight_decay=config.weight_decay,
        )
        self.average = CodebookAverage(self.model, config.codebook_decay, config.dead_below)
        self.smooth = {k: p.detach().clone() for k, p in self.learned.items()} if self.alone else {}
        self.quantising = self.alone
        self.scenes: list[Scene] = []
        if config.scene_share > 0 and data.coverage is not None:
            found = draw_scenes(data, 4000, config.seed + 1)
            self.scenes = [scene for scene in found if scene.split == "train"]
        self.net = load_network() if config.perceptual > 0 and is_there() else None
        if config.perceptual > 0 and self.net is None:
            raise DataError(MISSING)
        if self.net is not None:
            self.net.to(device.device)

    def state(self) -> dict[str, Any]:
        """Everything that a continuation needs."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "counts": self.average.counts,
            "sums": self.average.sums,
            "quantising": self.quantising,
            "smooth": self.smooth,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from ``state``."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.average.counts.copy_(state["counts"])
        self.average.sums.copy_(state["sums"])
        self.quantising = state["quantising"]
        for name, value in state["smooth"].items():
            self.smooth[name].copy_(value)

    def get_model(self) -> VQModel:
        """Return the model that is judged and kept; for a decoder alone, the averaged one."""
        if not self.smooth:
            return self.model
        model = VQModel(self.config.vq).to(self.device.device)
        model.load_state_dict({**self.model.state_dict(), **self.smooth})
        return model.eval().requires_grad_(False)

    def batch(self, rng: random.Random, generator: torch.Generator) -> Tensor:
        """Draw augmented training images ``[B, 3, H, W]`` in [-1, 1], some of them scenes."""
        count = self.config.batch_size
        index = torch.multinomial(self.weights, count, replacement=True, generator=generator)
        pixels = to_float(self.images[index])
        pixels = augment(pixels, self.flippable[index], generator, hue=self.config.hue)
        for i in range(count if self.scenes else 0):
            if rng.random() < self.config.scene_share:
                drawn = render_scene(self.data, rng.choice(self.scenes))
                pixels[i] = to_float(torch.from_numpy(drawn).unsqueeze(0))[0]
        return pixels.to(self.device.device)

    def step(self, index: int, rate: float, done: float, rng: random.Random) -> dict[str, float]:
        """Take one optimizer step."""
        self.model.train()
        generator = torch.Generator().manual_seed(rng.getrandbits(62))
        pixels = self.batch(rng, generator)
        with torch.set_grad_enabled(not self.alone), self.device.autocast():
            raw = self.model.encode_latents(pixels)
        unit = F.normalize(raw.float(), dim=1)
        flat = unit.detach().permute(0, 2, 3, 1).reshape(-1, unit.shape[1])
        if not self.quantising and done >= self.config.quantize_from:
            self.average.start(flat, generator)
            self.quantising = True
        metrics = {}
        through, commitment = unit, unit.new_zeros(())
        if self.quantising:
            codes = self.model.nearest_code(unit.detach())
            chosen = self.model.lookup(codes)
            through = unit + (chosen - unit).detach()
            commitment = (unit - chosen).square().sum(1).mean()
            if not self.alone:
                restarted = self.average.update(flat, codes.reshape(-1), generator)
                metrics["restarted"] = float(restarted)
        with self.device.autocast():
            output = self.model.decode_latents(through)
        loss = reconstruction_loss(output.float(), pixels)
        if not self.alone:
            loss = loss + self.config.commitment * commitment
        if self.net is not None:
            with self.device.autocast():
                gap = self.net.distance(output.clamp(-1.0, 1.0), pixels).float().mean()
            loss = loss + self.config.perceptual * gap
            metrics["perceptual"] = float(gap.detach())
        weights, clip = self.learned.values(), self.config.clip_norm
        self.device.descend(self.optimizer, loss, weights, rate, clip)
        move_average(self.smooth, self.learned, self.config.ema, index)
        return {"loss": float(loss.detach()), "commit": float(commitment.detach()), **metrics}

    def evaluate(self, index: int) -> dict[str, float]:
        """Return the PSNR of a few held-out images; draw some above what the tokenizer makes of them."""
        seen, _ = reconstruct(self.get_model(), self.heldout)
        _save_pairs(self.heldout[:24], seen[:24], self.out / "samples" / f"step-{index}.png")
        return {"heldout_psnr": float(psnr(self.heldout, seen).mean())}


def _save_pairs(images: NDArray[np.uint8], seen: NDArray[np.uint8], path: Path) -> None:
    """Save images above what the tokenizer makes of them."""
    pairs = np.concatenate([images, seen], axis=1)
    save_image(image_grid([*map(Image.fromarray, pairs)], 12), path)


def train_tokenizer(
    config: TokenizerConfig,
    data: EmojiDataset,
    out: Path,
    device: TrainDevice,
    progress: Progress | None = None,
    *,
    resume: bool = True,
    start: VQModel | None = None,
) -> TokenizerReport:
    """Train the tokenizer and write ``vq.safetensors``, ``vq.json``, ``report.json`` and a picture.

    ``start``: the finished tokenizer whose decoder alone is trained on (``config.part``).

    ``out/checkpoint.pt`` is continued where an earlier run was stopped. Raises ``DataError`` where
    the checkpoint is of another configuration.
    """
    if (config.part == "decoder") != (start is not None):
        raise DataError(
            "a decoder alone starts from a finished tokenizer, a whole tokenizer does not"
        )
    if start is not None and start.config != config.vq:
        raise DataError(
            f"the finished tokenizer has the sizes {start.config!r}, the configuration asks for "
            f"{config.vq!r}; give both the same"
        )
    seed_everything(config.seed)
    task = TokenizerTask(config, data, device, out, start)
    done = run(task, config, out, device, progress, resume=resume)
    write_model(task.get_model(), out, "vq")
    model = load_tokenizer(out, device.device)
    return _report(model, data, out, done.step, done.elapsed, config.batch_size)


def _report(
    model: VQModel, data: EmojiDataset, out: Path, step: int, seconds: float, batch: int
) -> TokenizerReport:
    heldout = data.split("heldout") or data.split("train")[:64]
    images = data.images[heldout]
    seen, codes = reconstruct(model, images)
    quality = psnr(images, seen)
    styles = np.array([data.records[i].style for i in heldout])
    train = data.split("train")
    _, more = reconstruct(model, data.images[train[:: max(1, len(train) // 1000)]])
    report = TokenizerReport(
        steps=step,
        seconds=round(seconds, 1),
        images_seen=step * batch,
        parameters=sum(p.numel() for p in model.parameters()),
        psnr={s: round(float(quality[styles == s].mean()), 2) for s in sorted(set(styles))},
        mean_psnr=round(float(quality.mean()), 2),
        codes_used=len(np.union1d(codes, more)),
        codebook_size=model.config.codebook_size,
        environment={
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "machine": platform.machine(),
            "threads": str(torch.get_num_threads()),
        },
    )
    write_json(out / "report.json", report.model_dump(mode="json"))
    shown = list(range(0, len(images), max(1, len(images) // 60)))[:60]
    _save_pairs(images[shown], seen[shown], out / "reconstructions.png")
    return report
