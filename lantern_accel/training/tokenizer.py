"""Training of the image tokenizer (VQ autoencoder), and the codes of the training images.

Loss: L1 + MSE + finite differences + commitment (VQ-VAE, arXiv 1711.00937), straight-through
gradients.
"""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn import functional as F

from lantern_accel.errors import DataError
from lantern_accel.files import write_json, write_whole
from lantern_accel.models.vq import VQConfig, VQModel
from lantern_accel.training.augment import augment, flip, random_place, to_float, to_uint8
from lantern_accel.training.codebook import CodebookAverage
from lantern_accel.training.common import (
    NullProgress,
    Progress,
    TrainConfig,
    fraction_done,
    learning_rate,
    load_checkpoint,
    save_checkpoint,
    seed_everything,
)
from lantern_accel.training.data import EmojiDataset


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
    precision: Literal["bf16", "fp32"] = "bf16"
    commitment: float = Field(default=0.25, ge=0)
    codebook_decay: float = Field(
        default=0.98, gt=0, lt=1, description="of the codebook's moving average"
    )
    dead_below: float = Field(
        default=0.02, ge=0, description="mean uses per batch that restart a code"
    )
    quantize_from: float = Field(
        default=0.04, ge=0, lt=1, description="share of steps before quantising"
    )
    hue: float = Field(default=0.25, ge=0, le=1, description="share of images whose hue is turned")


class TokenizerReport(BaseModel):
    """What training came to; ``psnr`` is over held-out images, in dB, per image set."""

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


def psnr(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return the peak signal-to-noise ratio of each image pair ``[n, H, W, 3]``, in dB."""
    mse = ((a.astype(np.float64) - b.astype(np.float64)) ** 2).mean(axis=(1, 2, 3))
    return np.asarray(10.0 * np.log10(255.0**2 / np.maximum(mse, 1e-3)), dtype=np.float64)


@torch.no_grad()
def reconstruct(
    model: VQModel, images: NDArray[np.uint8], batch: int = 64
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return images uint8 ``[n, H, W, 3]`` through the tokenizer, and their codes ``[n, h, w]``."""
    model.eval()
    device = next(model.parameters()).device
    out, codes = [], []
    for start in range(0, len(images), batch):
        part = torch.from_numpy(images[start : start + batch]).to(device)
        code = model.encode(to_float(part))
        codes.append(code.cpu().numpy())
        out.append(to_uint8(model.decode_codes(code)).cpu().numpy())
    return np.concatenate(out), np.concatenate(codes)


class _Trainer:
    def __init__(self, config: TokenizerConfig, data: EmojiDataset, device: torch.device) -> None:
        self.config, self.device = config, device
        self.images = torch.from_numpy(data.images)
        self.weights = torch.from_numpy(data.sampling_weights())
        self.flippable = torch.tensor([record.flippable for record in data.records])
        self.heldout = data.images[data.split("heldout")[::7][:64]]
        self.generator = torch.Generator().manual_seed(config.seed)
        self.model = VQModel(config.vq).to(device)
        self.model.quantize.embedding.weight.requires_grad_(False)
        learned = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            learned, lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay
        )
        self.average = CodebookAverage(self.model, config.codebook_decay, config.dead_below)
        self.quantising = False

    def state(self) -> dict[str, Any]:
        """Everything that a continuation needs."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "counts": self.average.counts,
            "sums": self.average.sums,
            "quantising": self.quantising,
            "generator": self.generator.get_state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from ``state``."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.average.counts.copy_(state["counts"])
        self.average.sums.copy_(state["sums"])
        self.quantising = state["quantising"]
        self.generator.set_state(state["generator"])

    def batch(self) -> Tensor:
        """Draw augmented training images ``[B, 3, H, W]`` in [-1, 1]."""
        count = self.config.batch_size
        index = torch.multinomial(self.weights, count, replacement=True, generator=self.generator)
        pixels = to_float(self.images[index])
        pixels = augment(pixels, self.flippable[index], self.generator, hue=self.config.hue)
        return pixels.to(self.device)

    def step(self, rate: float, done: float) -> dict[str, float]:
        """Take one optimizer step at learning rate ``rate``; ``done`` is the share of training."""
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        pixels = self.batch()
        amp = torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"
        )
        with amp:
            raw = self.model.encode_latents(pixels)
        unit = F.normalize(raw.float(), dim=1)
        flat = unit.detach().permute(0, 2, 3, 1).reshape(-1, unit.shape[1])
        if not self.quantising and done >= self.config.quantize_from:
            self.average.start(flat, self.generator)
            self.quantising = True
        metrics = {}
        through, commitment = unit, unit.new_zeros(())
        if self.quantising:
            codes = self.model.nearest_code(unit.detach())
            chosen = self.model.lookup(codes)
            through = unit + (chosen - unit).detach()
            commitment = (unit - chosen).square().sum(1).mean()
            metrics["restarted"] = float(
                self.average.update(flat, codes.reshape(-1), self.generator)
            )
        with amp:
            output = self.model.decode_latents(through)
        loss = reconstruction_loss(output.float(), pixels) + self.config.commitment * commitment
        self.optimizer.zero_grad(set_to_none=True)
        # torch leaves backward untyped.
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.optimizer.step()
        return {"loss": float(loss.detach()), "commit": float(commitment.detach()), **metrics}


def train_tokenizer(
    config: TokenizerConfig,
    data: EmojiDataset,
    out: Path,
    progress: Progress | None = None,
    *,
    resume: bool = True,
    device: torch.device | None = None,
) -> TokenizerReport:
    """Train the tokenizer and write ``vq.safetensors``, ``vq.json``, ``report.json`` and a picture.

    ``out/checkpoint.pt`` is continued where an earlier run was stopped. Raises ``DataError`` where
    it was written under another configuration.
    """
    progress = progress or NullProgress()
    seed_everything(config.seed)
    trainer = _Trainer(config, data, device or torch.get_default_device())
    path = out / "checkpoint.pt"
    step, spent = 0, 0.0
    stored = load_checkpoint(path, config) if resume else None
    if stored is not None:
        trainer.load_state(stored["state"])
        step, spent = stored["step"], stored["elapsed"]
        progress.log(f"continuing {path} at step {step}")
    began = time.monotonic() - spent

    def elapsed() -> float:
        return time.monotonic() - began

    progress.start("training the tokenizer", config.steps)
    progress.advance(step)
    while (done := fraction_done(config, step, elapsed())) < 1.0:
        metrics = trainer.step(learning_rate(config, step, elapsed()), done)
        step += 1
        progress.advance(1, **metrics)
        if step % config.checkpoint_every == 0:
            save_checkpoint(path, config, step=step, elapsed=elapsed(), state=trainer.state())
            if len(trainer.heldout):
                seen, _ = reconstruct(trainer.model, trainer.heldout)
                quality = float(psnr(trainer.heldout, seen).mean())
                progress.log(f"step {step}: held-out PSNR {quality:.2f} dB")
    progress.finish()
    seconds = elapsed()
    save_checkpoint(path, config, step=step, elapsed=seconds, state=trainer.state())
    save_tokenizer(trainer.model, out)
    return _report(load_tokenizer(out, device), data, out, step, seconds, config.batch_size)


def save_tokenizer(model: VQModel, out: Path) -> None:
    """Write ``vq.safetensors`` (bf16) and ``vq.json`` (the fields of ``VQConfig``)."""
    weights = {k: v.detach().cpu().to(torch.bfloat16) for k, v in model.state_dict().items()}
    write_whole(out / "vq.safetensors", lambda stream: stream.write(save(weights)))
    write_json(out / "vq.json", model.config.model_dump(mode="json"))


def load_tokenizer(folder: Path, device: torch.device | None = None) -> VQModel:
    """Return the tokenizer that ``save_tokenizer`` wrote, in float32 and ready to use."""
    try:
        config = VQConfig.model_validate_json((folder / "vq.json").read_text(encoding="utf-8"))
        weights = load_file(folder / "vq.safetensors")
    except FileNotFoundError as error:
        raise DataError(f"{folder} holds no tokenizer ({error}); run train_tokenizer") from error
    model = VQModel(config)
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return model.to(device or torch.get_default_device()).eval().requires_grad_(False)


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
    used = np.union1d(codes, more)
    report = TokenizerReport(
        steps=step,
        seconds=round(seconds, 1),
        images_seen=step * batch,
        parameters=sum(p.numel() for p in model.parameters()),
        psnr={s: round(float(quality[styles == s].mean()), 2) for s in sorted(set(styles))},
        mean_psnr=round(float(quality.mean()), 2),
        codes_used=len(used),
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
    pairs = np.concatenate([images[shown], seen[shown]], axis=1)
    save_grid(pairs, out / "reconstructions.png", columns=12)
    return report


def save_grid(images: NDArray[np.uint8], path: Path, columns: int = 12) -> None:
    """Write images uint8 ``[n, H, W, 3]`` as one PNG, ``columns`` wide."""
    count, height, width, _ = images.shape
    rows = -(-count // columns)
    sheet = np.full((rows * height, columns * width, 3), 200, np.uint8)
    for i, image in enumerate(images):
        y, x = divmod(i, columns)
        sheet[y * height : (y + 1) * height, x * width : (x + 1) * width] = image
    write_whole(path, lambda stream: Image.fromarray(sheet).save(stream, format="PNG"))


def _nearest(model: VQModel, latents: Tensor) -> Tensor:
    """``model.nearest_code`` of ``[B, d, h, w]`` as ``[B, h * w]``, on the sphere in one product."""
    if not model.config.l2_norm:
        return model.nearest_code(latents).flatten(1)
    unit = F.normalize(latents, dim=1).flatten(2).transpose(1, 2)
    return torch.matmul(unit, model.codebook().t()).argmax(-1)


@torch.no_grad()
def encode_view(
    model: VQModel,
    data: EmojiDataset,
    view: int,
    *,
    seed: int = 0,
    batch: int = 16,
    precision: Literal["bf16", "fp32"] = "bf16",
    progress: Progress | None = None,
) -> NDArray[np.int16]:
    """Return the codes of every image under one view, int16 ``[n, h * w]``; see encode_dataset."""
    progress = progress or NullProgress()
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(1000 * seed + view)
    out: list[NDArray[np.int16]] = []
    for start in range(0, len(data.images), batch):
        pixels = to_float(torch.from_numpy(data.images[start : start + batch]))
        allowed = torch.tensor([r.flippable for r in data.records[start : start + batch]])
        if view == 1:
            pixels = flip(pixels, allowed)
        elif view > 1:
            pixels = flip(pixels, allowed & (torch.rand(len(pixels), generator=generator) < 0.5))
            pixels = random_place(pixels, generator, smallest=0.8, largest_shift=3)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            latents = model.encode_latents(pixels.to(device))
        out.append(_nearest(model, latents.float()).cpu().numpy().astype(np.int16))
        progress.advance(len(pixels))
    return np.concatenate(out)


def encode_dataset(
    model: VQModel,
    data: EmojiDataset,
    *,
    views: int = 8,
    seed: int = 0,
    batch: int = 16,
    precision: Literal["bf16", "fp32"] = "bf16",
    progress: Progress | None = None,
) -> NDArray[np.int16]:
    """Return the codes of every image under several views, int16 ``[n, views, h * w]``.

    View 0 is the image itself, view 1 its mirror image (the image again where that would show
    something else); the rest are shifted, some also shrunk, and mirrored at random where allowed.
    """
    if not len(data.images):
        raise DataError("there are no images to encode; run `lantern-accel train data` first")
    progress = progress or NullProgress()
    progress.start("encoding the images", views * len(data.images))
    codes = [
        encode_view(
            model, data, view, seed=seed, batch=batch, precision=precision, progress=progress
        )
        for view in range(views)
    ]
    progress.finish()
    return np.stack(codes, axis=1)
