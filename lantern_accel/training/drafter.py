"""Training the drafter by EAGLE's recipe, on the features of a frozen target.

Loss (LANTERN's code): SmoothL1 between predicted and true next feature, plus 0.1 times the
cross-entropy between the head's distributions; uniform noise on the input features; the embedding
comes from the target and stays frozen, as does the head. The ``"lantern"`` objective adds the share
of drafts that relaxed acceptance would refuse.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from lantern_accel.decoding.neighbours import neighbour_table
from lantern_accel.errors import DataError
from lantern_accel.files import write_json
from lantern_accel.models.checkpoint import load_into, read_tensors
from lantern_accel.models.drafter import DrafterConfig, EagleDrafter
from lantern_accel.models.llamagen import LlamaGenGPT
from lantern_accel.training.batches import Batches
from lantern_accel.training.common import TrainConfig, seed_everything
from lantern_accel.training.device import TrainDevice
from lantern_accel.training.loop import Task, run
from lantern_accel.training.progress import Progress
from lantern_accel.training.target import TextTarget, write_model


class DrafterTrainConfig(TrainConfig):
    """What the drafter trainer is told."""

    start_from: str | None = Field(
        None, description="folder in the training folder of a drafter to train on"
    )
    text_dropout: float = Field(0.1, ge=0, lt=1, description="share of unconditional examples")
    noise: float = Field(0.2, ge=0, description="width of the uniform noise on input features")
    feature_weight: float = Field(1.0, ge=0)
    token_weight: float = Field(0.1, ge=0)
    objective: Literal["plain", "lantern"] = Field(
        "plain", description="lantern: also lower the share that relaxed acceptance refuses"
    )
    lantern_weight: float = Field(0.2, ge=0, description="weight of that share")
    lantern_k: int = Field(10, ge=1, description="neighbours that may count for a drafted code")
    lantern_lambda: float = Field(4.0, ge=1, description="bound: lambda times the code's own mass")
    evaluate_every: int = Field(500, ge=1)
    evaluate_batches: int = Field(4, ge=1, description="held-out batches an evaluation reads")
    compile: bool = True


@dataclass(frozen=True)
class Features:
    """One batch of a frozen target, on its device.

    ``codes`` int64 ``[B, n]``; ``states`` float32 ``[B, prefix + n - 1, D]``, the target's states
    after the final norm over prompt and image; ``mask`` bool ``[B, prefix]``, None: no padding.
    """

    codes: Tensor
    states: Tensor
    mask: Tensor | None


class FeatureSource(Protocol):
    """What a drafter learns from: a frozen target, and batches of its states."""

    @property
    def gpt(self) -> LlamaGenGPT: ...

    def draw(self, size: int, rng: random.Random, *, heldout: bool) -> Features:
        """Return one batch; a training batch has its share of unconditional rows."""
        ...


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
    ) -> None:
        self.target = target.to(device.device).eval().requires_grad_(False)
        self._batches = {False: train, True: heldout}
        self._device, self._dropout = device, text_dropout
        device.adopt(target)
        states: Callable[..., Tensor] = target.features
        self._states = device.backend.compile(states) if compile else states

    @property
    def gpt(self) -> LlamaGenGPT:
        return self.target.gpt

    def draw(self, size: int, rng: random.Random, *, heldout: bool) -> Features:
        """Return one batch; held-out ones are plain names of concepts never trained on."""
        batch = self._batches[heldout].draw(size, rng, plain=heldout)
        share = 0.0 if heldout else self._dropout
        drop = torch.tensor([rng.random() < share for _ in range(size)])
        ids, mask, codes, dropped = self._device.to(*batch, drop)
        with torch.no_grad(), self._device.autocast():
            states = self._states(ids, mask, dropped, codes)
        return Features(codes, states.detach().float(), mask)


def drafter_config(gpt: LlamaGenGPT, *, mask_padding: bool = True) -> DrafterConfig:
    """Return the drafter that fits a target: one block of its size."""
    config = gpt.config
    return DrafterConfig(
        dim=config.dim,
        n_head=config.n_head,
        ffn_dim=config.hidden_dim,
        vocab_size=config.vocab_size,
        grid=config.grid,
        prefix_length=config.prefix_length - 1,
        norm_eps=config.norm_eps,
        rope_base=config.rope_base,
        prefix_rotary=config.prefix_rotary,
        mask_padding=mask_padding,
    )


def fresh_drafter(gpt: LlamaGenGPT, *, mask_padding: bool = True) -> EagleDrafter:
    """Return an untrained drafter with the target's embedding, which stays as it is."""
    drafter = EagleDrafter(drafter_config(gpt, mask_padding=mask_padding)).train()
    for name, weight in drafter.named_parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, std=0.02)
        if name.endswith(("wo.weight", "w2.weight")):
            nn.init.normal_(weight, std=0.01)
    with torch.no_grad():
        # Start from "the next feature resembles this one": the identity on the feature half.
        drafter.fc.weight[:, drafter.config.dim :].add_(torch.eye(drafter.config.dim))
        drafter.embed_tokens.weight.copy_(gpt.tok_embeddings.weight)
    drafter.embed_tokens.requires_grad_(False)
    return drafter


def drafter_inputs(codes: Tensor, prefix: int) -> Tensor:
    """Return the drafter's codes, int ``[B, prefix - 1 + n]``: code 0 on the prompt, then the image."""
    return F.pad(codes, (prefix - 1, 0))


def neighbourhoods(codebook: Tensor, k: int) -> Tensor:
    """Return float32 ``[V, V]`` with a 1 in column x for each of the ``k`` nearest codes of x."""
    table = neighbour_table(codebook.cpu(), k).long()
    size = len(codebook)
    return torch.zeros(size, size).scatter_(0, table.t(), 1.0)


def relaxed_mass(p: Tensor, near: Tensor, lam: float) -> Tensor:
    """Return about what LANTERN++ accepts each code with: ``min(p + neighbours' p, lambda p)``.

    ``p [..., V]``, ``near [V, V]`` of :func:`neighbourhoods`. The rule itself takes whole neighbours
    only, so this is its upper bound; it has no steps that training could stumble over.
    """
    return torch.minimum(p + p @ near.to(p.dtype), lam * p)


@torch.no_grad()
def head_matrix(gpt: LlamaGenGPT) -> Tensor:
    """Return the target's head as float32 ``[V, D]``, in whatever order a backend keeps it."""
    weight = gpt.output.weight
    unit = torch.eye(gpt.config.dim, dtype=weight.dtype, device=weight.device)
    return gpt.head(unit.unsqueeze(0))[0].t().contiguous()


class DrafterLoss(nn.Module):
    """The recipe's loss on one batch; also top-1 and top-3 agreement with the target's argmax."""

    def __init__(
        self,
        drafter: EagleDrafter,
        gpt: LlamaGenGPT,
        config: DrafterTrainConfig,
        near: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self.config = config
        self.prefix = gpt.config.prefix_length
        self.register_buffer("head", head_matrix(gpt))
        self.register_buffer("near", near)
        self.head: Tensor
        self.near: Tensor | None

    def forward(
        self, codes: Tensor, states: Tensor, noise: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and ``[top-1, top-3, refused]``.

        ``codes [B, n]``; ``states, noise [B, prefix + n - 1, D]`` of the target over prompt and
        image; ``mask`` bool ``[B, prefix - 1]``. Drafter position p predicts the feature at p + 1.
        """
        inputs = drafter_inputs(codes[:, :-1], self.prefix)
        out = self.drafter.forward_dense(inputs, (states + noise)[:, :-1], mask)
        # Positions from the first image token on; the prompt's are never drafted from.
        guess, truth = out[:, self.prefix - 1 :], states[:, self.prefix :]
        logits = F.linear(guess, self.head).float()
        goal = F.linear(truth, self.head).float()
        loss = self.config.feature_weight * F.smooth_l1_loss(guess.float(), truth.float())
        p = goal.softmax(-1)
        soft = -(p * logits.log_softmax(-1)).sum(-1).mean()
        loss = loss + self.config.token_weight * soft
        refused = loss.new_zeros(())
        if self.near is not None:
            accepted = relaxed_mass(p, self.near, self.config.lantern_lambda)
            refused = 1.0 - torch.minimum(logits.softmax(-1), accepted).sum(-1).mean()
            loss = loss + self.config.lantern_weight * refused
        best = goal.argmax(-1, keepdim=True)
        top = logits.detach().topk(3, dim=-1).indices == best
        figures = (top[..., 0].float().mean(), top.any(-1).float().mean(), refused.detach().float())
        return loss, torch.stack(figures)


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
        mask_padding: bool = True,
        start: EagleDrafter | None = None,
    ) -> None:
        self.config, self.source, self.device = config, source, device
        self.evaluate_every = config.evaluate_every
        near = None
        if config.objective == "lantern":
            if codebook is None:
                raise DataError("the lantern objective needs the codebook; this model has none")
            near = neighbourhoods(codebook, config.lantern_k)
        self.drafter = fresh_drafter(source.gpt, mask_padding=mask_padding)
        if start is not None:
            if start.config != self.drafter.config:
                raise DataError(
                    f"the drafter to start from is {start.config!r}; this target's is "
                    f"{self.drafter.config!r}"
                )
            self.drafter.load_state_dict(start.state_dict())
        self.loss = DrafterLoss(self.drafter, source.gpt, config, near).to(device.device)
        self.trained = [p for p in self.drafter.parameters() if p.requires_grad]
        optimizer = device.adamw(
            self.trained, lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay
        )
        self.run, self.optimizer = device.prepare(self.loss, optimizer, compile=config.compile)
        self.best = -1.0
        self.kept = {k: v.clone() for k, v in self.drafter.state_dict().items()}

    def _mask(self, batch: Features) -> Tensor | None:
        seen = batch.mask is not None and self.drafter.config.mask_padding
        return batch.mask[:, :-1] if seen and batch.mask is not None else None

    def step(self, index: int, rate: float, done: float, rng: random.Random) -> dict[str, float]:
        """Take one optimizer step."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batch = self.source.draw(self.config.batch_size, rng, heldout=False)
        generator = torch.Generator().manual_seed(rng.getrandbits(62))
        drawn = torch.rand(batch.states.shape, generator=generator) - 0.5
        noise = (drawn * self.config.noise).to(self.device.device)
        with self.device.autocast():
            loss, figures = self.run(batch.codes, batch.states, noise, self._mask(batch))
        self.device.backward(loss)
        self.device.update(self.optimizer, self.trained, self.config.clip_norm)
        return {"loss": float(loss.detach()), "top3": float(figures[1])}

    def state(self) -> dict[str, Any]:
        """Weights, the best ones so far, and the optimizer."""
        return {
            "drafter": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "kept": self.kept,
            "best": self.best,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from ``state``."""
        self.drafter.load_state_dict(state["drafter"])
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
            batch = self.source.draw(self.config.batch_size, rng, heldout=True)
            with self.device.autocast():
                figures = self.loss(
                    batch.codes, batch.states, torch.zeros_like(batch.states), self._mask(batch)
                )[1]
            total += figures.cpu() / count
        self.drafter.train()
        top1, top3, refused = (float(x) for x in total)
        if top3 > self.best:
            self.best = top3
            self.kept = {k: v.clone() for k, v in self.drafter.state_dict().items()}
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
    mask_padding: bool = True,
    start: EagleDrafter | None = None,
) -> dict[str, Any]:
    """Train on a frozen target, resuming ``out/checkpoint.pt``; write ``drafter.safetensors``.

    ``codebook [V, d]``, in the space in which neighbours are measured, is needed for the lantern
    objective. ``start``: the drafter to train on. The weights with the best held-out top-3 agreement
    are kept. Returns the report.
    """
    seed_everything(config.seed)
    task = DrafterTask(config, source, device, codebook, mask_padding=mask_padding, start=start)
    done = run(task, config, out, device, progress, resume=resume)
    last = task.evaluate(done.step)
    report = {
        "steps": done.step,
        "seconds": done.elapsed,
        "parameters": sum(p.numel() for p in task.drafter.parameters()),
        "images_seen": done.step * config.batch_size * device.world,
        **last,
        "heldout_top3": task.best,
        "curve": done.curve,
        "device": str(device.device),
        "dtype": str(device.dtype).removeprefix("torch."),
        "config": config.model_dump(mode="json"),
    }
    if device.main:
        task.drafter.load_state_dict(task.kept)
        write_model(task.drafter, out, "drafter")
        write_json(out / "report.json", report)
    return report


def read_drafter(folder: Path) -> EagleDrafter:
    """Read back what :func:`train_drafter` wrote, in float32; raises where it is not there."""
    import json

    try:
        found = json.loads((folder / "drafter.json").read_text(encoding="utf-8"))
    except OSError:
        raise DataError(
            f"{folder} holds no trained drafter; run `lantern-accel train drafter` first"
        ) from None
    drafter = EagleDrafter(DrafterConfig.model_validate(found))
    path = folder / "drafter.safetensors"
    load_into(drafter, {k: v.float() for k, v in read_tensors(path).items()}, path.name)
    return drafter
