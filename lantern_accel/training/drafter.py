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
from lantern_accel.decoding.rows import Allowed
from lantern_accel.errors import DataError
from lantern_accel.files import write_json
from lantern_accel.models.checkpoint import load_into, read_tensors
from lantern_accel.models.drafter import DrafterConfig, EagleDrafter
from lantern_accel.models.families import Family, family
from lantern_accel.models.layouts import OWN_WEIGHTS
from lantern_accel.models.llamagen import LlamaGenGPT
from lantern_accel.models.transformer import Projection
from lantern_accel.training.batches import Batches
from lantern_accel.training.common import TrainConfig, seed_everything
from lantern_accel.training.device import TrainDevice
from lantern_accel.training.loop import Task, run
from lantern_accel.training.progress import Progress
from lantern_accel.training.target import TextTarget, write_weights


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
    after the final norm over prompt and image; ``mask`` bool ``[B, prefix]``, None: no padding;
    ``condition``: what the target was given, for a drafter that reads the prompt's own tokens.
    """

    codes: Tensor
    states: Tensor
    mask: Tensor | None
    condition: Tensor | None = None


class Teacher(Protocol):
    """A frozen target, as far as a drafter's loss reads it."""

    @property
    def config(self) -> Any: ...

    @property
    def output(self) -> Projection: ...

    def head(self, features: Tensor) -> Tensor: ...

    def allowed(self) -> Allowed | None: ...


class FeatureSource(Protocol):
    """What a drafter learns from: a frozen target, and batches of its states."""

    @property
    def gpt(self) -> Teacher: ...

    @property
    def family(self) -> Family: ...

    @property
    def key(self) -> str:
        """What tells the target from others: a checkpoint is continued on its own only."""
        ...

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
        self.family = family("llamagen")
        self.key = "own"  # one folder holds one target
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
def head_matrix(gpt: Teacher) -> Tensor:
    """Return the target's head as float32 ``[V, D]``, in whatever order a backend keeps it."""
    weight = gpt.output.weight
    unit = torch.eye(gpt.config.dim, dtype=weight.dtype, device=weight.device)
    return gpt.head(unit.unsqueeze(0))[0].t().contiguous()


def choices(gpt: Teacher) -> tuple[Tensor | None, Tensor | None]:
    """Return where there is something to draft: positions of the loss, and the codes there.

    Both int64, ascending; None: all. Position i predicts image token ``i + 1``. Where a model's
    grammar leaves one code, such as the end of a row, decoding forces it and nothing is guessed.
    """
    allowed = gpt.allowed()
    if allowed is None:
        return None, None
    may = allowed.penalty == 0
    free = may.sum(1) > 1
    positions = free[allowed.kind.long()][1:].nonzero().flatten()
    return positions, may[free].any(0).nonzero().flatten()


class DrafterLoss(nn.Module):
    """The recipe's loss on one batch; also top-1 and top-3 agreement with the target's argmax."""

    def __init__(
        self,
        drafter: Any,
        gpt: Teacher,
        config: DrafterTrainConfig,
        near: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self.config = config
        positions, codes = choices(gpt)
        head = head_matrix(gpt)
        self.register_buffer("head", head if codes is None else head[codes])
        self.register_buffer("near", near)
        self.register_buffer("positions", positions)
        self.positions: Tensor | None
        self.head: Tensor
        self.near: Tensor | None

    def forward(
        self,
        codes: Tensor,
        states: Tensor,
        noise: Tensor,
        mask: Tensor | None,
        condition: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and ``[top-1, top-3, refused]``.

        ``codes [B, n]``; ``states, noise [B, prefix + n - 1, D]`` of the target over prompt and
        image; ``mask`` bool ``[B, prefix - 1]``; ``condition``: the target's. Drafter position p
        predicts the feature at p + 1.
        """
        prefix = states.shape[1] - codes.shape[1] + 1
        fed = (states + noise)[:, :-1]
        out = self.drafter.forward_image(condition, codes[:, :-1], fed, mask)
        # Positions from the first image token on; the prompt's are never drafted from.
        guess, truth = out[:, prefix - 1 :], states[:, prefix:]
        loss = self.config.feature_weight * F.smooth_l1_loss(guess.float(), truth.float())
        if self.positions is not None:
            guess, truth = (x.index_select(1, self.positions) for x in (guess, truth))
        logits = F.linear(guess, self.head).float()
        goal = F.linear(truth, self.head).float()
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
        start: EagleDrafter | None = None,
    ) -> None:
        self.config, self.source, self.device = config, source, device
        self.evaluate_every = config.evaluate_every
        near = None
        if config.objective == "lantern":
            if codebook is None:
                raise DataError("the lantern objective needs the codebook; this model has none")
            near = neighbourhoods(codebook, config.lantern_k)
        self.drafter: Any = source.family.fresh_drafter(source.gpt)
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
        self.kept = {k: v.clone() for k, v in self._weights().items()}

    def _weights(self) -> dict[str, Tensor]:
        """Return what is trained; the embedding is the target's, and the largest part by far."""
        frozen = {name for name, p in self.drafter.named_parameters() if not p.requires_grad}
        return {k: v for k, v in self.drafter.state_dict().items() if k not in frozen}

    def put(self, weights: dict[str, Tensor]) -> None:
        """Take weights over; the frozen ones stay where they are not among them."""
        self.drafter.load_state_dict({**self.drafter.state_dict(), **weights})

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
            loss, figures = self.run(
                batch.codes, batch.states, noise, self._mask(batch), batch.condition
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
                "the checkpoint in the training folder is of a drafter for another model; name another "
                "folder with --work, or begin anew with --restart"
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
            batch = self.source.draw(self.config.batch_size, rng, heldout=True)
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
        task.put(task.kept)
        made = source.family.drafter_files(task.drafter)
        write_weights(made.weights, out / OWN_WEIGHTS)
        write_json(out / made.config_name, made.config)
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
