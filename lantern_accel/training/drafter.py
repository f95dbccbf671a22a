"""Training the drafter by EAGLE's recipe, on the features of a frozen target.

The embedding comes from the target and stays frozen, as does the head. Loss (LANTERN's code): SmoothL1
between predicted and true next feature, plus 0.1 times the cross-entropy between the head's
distributions; uniform noise on the input features. ``coupled`` takes both distributions as guidance makes
them; ``predicted_share`` feeds predictions, as deeper drafts are.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from lantern_accel.checkpoints.layouts import OWN_CONFIG, OWN_WEIGHTS
from lantern_accel.checkpoints.weights import Checkpoint, open_checkpoint
from lantern_accel.device.context import with_gradients
from lantern_accel.device.packed import dense
from lantern_accel.device.sampling import guide
from lantern_accel.errors import DataError
from lantern_accel.families.base import Family
from lantern_accel.families.target import TrunkTarget
from lantern_accel.files import write_json
from lantern_accel.nn.transformer import Projection
from lantern_accel.progress import Progress
from lantern_accel.training.device import TrainDevice
from lantern_accel.training.folder import write_weights
from lantern_accel.training.loop import ResumableTask, TrainConfig, run, seed_everything


class DrafterTrainConfig(TrainConfig):
    """Settings of the drafter trainer."""

    start_from: str | None = Field(
        None, description="folder, in the training folder, of a drafter to continue from"
    )
    n_layer: int = Field(
        1, ge=1, description="decoder blocks, at least those of start_from's drafter; EAGLE has one"
    )
    text_dropout: float = Field(0.1, ge=0, lt=1, description="share of unconditional examples")
    noise: float = Field(0.2, ge=0, description="width of the uniform noise on input features")
    feature_weight: float = Field(1.0, ge=0)
    token_weight: float = Field(0.1, ge=0)
    coupled: bool = Field(
        False,
        description="learn guided distributions: every image with and without its prompt (LANTERN's "
        "coupled CFG loss)",
    )
    cfg_scale: float = Field(3.0, gt=1, description="guidance that coupled rows are joined with")
    predicted_share: float = Field(
        0.0, ge=0, lt=1, description="share of positions that are fed the drafter's own prediction"
    )
    taps: tuple[int, ...] = Field(
        (),
        description="blocks of the target, from 1, whose states are read as well as its last (EAGLE-3)",
    )
    images_at_once: int = Field(
        8, ge=1, description="images that a loaded model generates together to learn from"
    )
    kept_gib: float = Field(
        2.0,
        ge=0,
        description="host memory that keeps a loaded model's states, so that none is computed twice",
    )
    evaluate_every: int = Field(500, ge=1)
    evaluate_batches: int = Field(4, ge=1, description="held-out batches per evaluation")
    compile: bool = True


@dataclass(frozen=True)
class Features:
    """One batch of a frozen target, on its device.

    ``codes`` int64 ``[B, n]``; ``states`` float32 ``[B, prefix + n - 1, D]``, the target's states
    after the final norm over prompt and image, those of taps before them in the last dimension;
    ``mask`` bool ``[B, prefix]``, None: no padding; ``condition``: what the target was given, for a
    drafter that reads the prompt's own tokens.
    """

    codes: Tensor
    states: Tensor
    mask: Tensor | None
    condition: Tensor | None = None


@torch.no_grad()
def head_matrix(gpt: TrunkTarget) -> Tensor:
    """Return the target's head as float32 ``[V, D]``, in whatever order a backend keeps it."""
    weight = gpt.output.weight
    unit = torch.eye(gpt.config.dim, dtype=weight.dtype, device=weight.device)
    return gpt.head(unit.unsqueeze(0))[0].t().contiguous()


class FrozenHead(nn.Module):
    """The target's head in float32, for the ``codes`` of it alone (None: all).

    Heads of several layers (``head_layers``) have a GELU between each two.
    """

    def __init__(self, gpt: TrunkTarget, codes: Tensor | None) -> None:
        super().__init__()
        *first, last = gpt.head_layers
        self.first = nn.ModuleList(_frozen(layer) for layer in first)
        weight: Tensor
        bias: Tensor | None = None
        if first:
            made = _frozen(last)
            weight, bias = made.weight, made.bias
        else:  # a family may keep more rows than it has codes
            weight = head_matrix(gpt)
        if codes is not None:
            weight, bias = weight[codes], None if bias is None else bias[codes]
        self.register_buffer("weight", weight.detach())
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.weight: Tensor
        self.bias: Tensor | None

    def forward(self, features: Tensor) -> Tensor:
        """Return float32 logits ``[..., V]`` of features ``[..., D]``."""
        for layer in self.first:
            features = F.gelu(layer(features))
        return F.linear(features, self.weight, self.bias).float()


@torch.no_grad()
def _frozen(layer: Projection) -> nn.Linear:
    """Return a projection in float32, in torch's order."""
    weight = layer.weight if layer.packed is None else dense(layer.packed)
    rows, columns = weight.shape
    made = nn.Linear(columns, rows, layer.bias is not None, weight.device)
    made.weight.copy_(weight)
    if layer.bias is not None:
        made.bias.copy_(layer.bias)
    return made.requires_grad_(False)


def free_choices(gpt: TrunkTarget) -> tuple[Tensor | None, Tensor | None]:
    """Return where there is something to draft: positions of the loss, and the codes there.

    Both int64, ascending; None: all. Position i predicts image token ``i + 1``. Where a model's
    grammar leaves one code, such as the end of a row, decoding forces it and nothing is guessed.
    """
    allowed = gpt.allowed_codes()
    if allowed is None:
        return None, None
    may = allowed.penalty == 0
    free = may.sum(1) > 1
    positions = free[allowed.kind.long()][1:].nonzero().flatten()
    return positions, may[free].any(0).nonzero().flatten()


class DrafterLoss(nn.Module):
    """The recipe's loss on one batch; also top-1 and top-3 agreement with the target's argmax."""

    def __init__(self, drafter: Any, gpt: TrunkTarget, config: DrafterTrainConfig) -> None:
        super().__init__()
        self.drafter, self.config = drafter, config
        positions, codes = free_choices(gpt)
        self.head, self.dim = FrozenHead(gpt, codes), int(gpt.config.dim)
        self.register_buffer("positions", positions)
        self.positions: Tensor | None

    def forward(
        self,
        codes: Tensor,
        states: Tensor,
        noise: Tensor,
        mask: Tensor | None,
        condition: Tensor | None = None,
        own: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and ``[top-1, top-3]``; of a drafter with taps ``D`` is wider.

        ``codes [B, n]``; ``states, noise [B, prefix + n - 1, D]`` of the target over prompt and
        image; ``mask`` bool ``[B, prefix - 1]``; ``condition``: the target's; ``own`` bool
        ``[B, prefix + n - 2]``: positions that are fed the drafter's prediction. Drafter position p
        predicts the feature at p + 1. Coupled: the second half of the rows are those of the first
        without a prompt, and guidance joins the two.
        """
        config = self.config
        prefix = states.shape[1] - codes.shape[1] + 1
        fed = self.drafter.fuse_states((states + noise)[:, :-1])
        states = states[..., -self.dim :]  # the taps' come first
        if own is not None:
            with torch.no_grad():
                predicted = self.drafter.forward_image(condition, codes[:, :-1], fed, mask)
            predicted = torch.cat((fed[:, :1], predicted[:, :-1].to(fed.dtype)), dim=1)
            fed = torch.where(own.unsqueeze(-1), predicted, fed)
        out = self.drafter.forward_image(condition, codes[:, :-1], fed, mask)
        # Positions from the first image token on; the prompt's are never drafted from.
        guess, truth = out[:, prefix - 1 :], states[:, prefix:]
        loss = config.feature_weight * F.smooth_l1_loss(guess.float(), truth.float())
        if self.positions is not None:
            guess, truth = (x.index_select(1, self.positions) for x in (guess, truth))
        logits, goal = self.head(guess), self.head(truth)
        if config.coupled:
            scale = logits.new_full((len(logits) // 2, 1), config.cfg_scale)
            logits, goal = guide(logits, scale), guide(goal, scale)
        soft = -(goal.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
        loss = loss + config.token_weight * soft
        best = goal.argmax(-1, keepdim=True)
        top = logits.detach().topk(3, dim=-1).indices == best
        figures = top[..., 0].float().mean(), top.any(-1).float().mean()
        return loss, torch.stack(figures)


# --- training -------------------------------------------------------------------------------------


class FeatureSource(Protocol):
    """What a drafter learns from: a frozen target, and batches of its states."""

    @property
    def gpt(self) -> TrunkTarget: ...

    @property
    def family(self) -> Family: ...

    @property
    def key(self) -> str:
        """The target's identity: a checkpoint is continued only on the target it was made for."""

    def sample_batch(
        self, size: int, rng: random.Random, *, heldout: bool, coupled: bool = False
    ) -> Features:
        """Return one batch; a training batch has its share of unconditional rows.

        ``coupled``: ``2 size`` rows, every image with its prompt, then every one without.
        """


class DrafterTask(ResumableTask):
    """One drafter in training; the weights with the best held-out top-3 agreement are kept."""

    label = "drafter"

    def __init__(
        self,
        config: DrafterTrainConfig,
        source: FeatureSource,
        device: TrainDevice,
        start: Checkpoint | None = None,
    ) -> None:
        self.config, self.source, self.device, self.key = config, source, device, source.key
        self.evaluate_every = config.evaluate_every
        self.drafter: Any = source.family.fresh_drafter(source.gpt, config.n_layer, config.taps)
        self.module = self.drafter
        if start is not None:
            self._begin_with(start)
        self.loss = DrafterLoss(self.drafter, source.gpt, config).to(device.device)
        self.trained = [p for p in self.drafter.parameters() if p.requires_grad]
        self.optimizer = device.adamw(
            self.trained, lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay
        )
        self.run = device.prepare(self.loss, compile=config.compile)
        self.begin()

    def _begin_with(self, start: Checkpoint) -> None:
        """Start from a trained drafter; blocks and taps that it lacks keep their random values."""
        ours = self.drafter.state_dict()
        for key in start:
            if key not in ours or start.shape(key) != tuple(ours[key].shape):
                raise DataError(
                    f"{start.path} does not fit this target's drafter: its {key} has the shape "
                    f"{list(start.shape(key))}, and only n_layer may be less and taps be absent"
                )
        self.put({key: start.read(key).clone() for key in start})

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
        config = self.config
        batch = self.source.sample_batch(
            config.batch_size, rng, heldout=False, coupled=config.coupled
        )
        generator = torch.Generator().manual_seed(rng.getrandbits(62))
        drawn = torch.rand(batch.states.shape, generator=generator) - 0.5
        noise = (drawn * config.noise).to(self.device.device)
        own = self._own(batch, generator)
        with self.device.autocast():
            loss, figures = self.run(
                batch.codes, batch.states, noise, self._mask(batch), batch.condition, own
            )
        self.device.descend(self.optimizer, loss, self.trained, rate, config.clip_norm)
        return {"loss": float(loss.detach()), "top3": float(figures[1])}

    @torch.no_grad()
    def evaluate(self, index: int) -> dict[str, float]:
        """Return held-out agreement, and keep the weights where it is the best."""
        rng, count = random.Random(99), self.config.evaluate_batches
        total = torch.zeros(2)
        self.drafter.eval()
        for _ in range(count):
            batch = self.source.sample_batch(
                self.config.batch_size, rng, heldout=True, coupled=self.config.coupled
            )
            with self.device.autocast():
                still = torch.zeros_like(batch.states)
                mask = self._mask(batch)
                figures = self.loss(batch.codes, batch.states, still, mask, batch.condition)[1]
            total += figures.cpu() / count
        self.drafter.train()
        top1, top3 = (float(x) for x in total)
        self.keep(top3)
        return {"heldout_top1": top1, "heldout_top3": top3}


def start_of(config: DrafterTrainConfig, out: Path) -> Checkpoint | None:
    """Return the drafter that training in ``out`` starts from; raises :class:`CheckpointError`."""
    if config.start_from is None:
        return None
    return open_checkpoint(out.parent / config.start_from / OWN_WEIGHTS)


@with_gradients()
def train_drafter(
    config: DrafterTrainConfig,
    source: FeatureSource,
    out: Path,
    device: TrainDevice,
    progress: Progress | None = None,
    *,
    resume: bool = True,
    start: Checkpoint | None = None,
) -> dict[str, object]:
    """Train on a frozen target, resuming ``out/checkpoint.pt``; write ``drafter.safetensors``.

    ``start``: the drafter to train on. The weights with the best held-out top-3 agreement are kept.
    Returns the report.
    """
    seed_everything(config.seed)
    task = DrafterTask(config, source, device, start)
    done = run(task, config, out, device, progress, resume=resume)
    report = task.finish(done, config, out)
    write_weights(task.drafter.state_dict(), out / OWN_WEIGHTS)
    write_json(out / OWN_CONFIG, task.drafter.config.model_dump(mode="json"))
    return report
