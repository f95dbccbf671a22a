"""Training the drafter by EAGLE's recipe, on the features of a frozen target.

Loss (LANTERN's code): SmoothL1 between predicted and true next feature, plus 0.1 times the
cross-entropy between the head's distributions; uniform noise on the input features; the embedding
comes from the target and stays frozen, as does the head.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from lantern_accel.files import write_json
from lantern_accel.models.drafter import DrafterConfig, EagleDrafter
from lantern_accel.training.common import (
    NullProgress,
    Progress,
    TrainConfig,
    learning_rate,
    load_checkpoint,
    save_checkpoint,
    seed_everything,
)
from lantern_accel.training.target import Batches, TextTarget, write_model


class DrafterTrainConfig(TrainConfig):
    """What the drafter trainer is told."""

    text_dropout: float = Field(0.1, ge=0, lt=1, description="share of unconditional examples")
    noise: float = Field(0.2, ge=0, description="width of the uniform noise on input features")
    feature_weight: float = Field(1.0, ge=0)
    token_weight: float = Field(0.1, ge=0)
    evaluate_every: int = Field(500, ge=1)
    compile: bool = True


def drafter_config(target: TextTarget) -> DrafterConfig:
    """Return the drafter that fits a target: one block of its size."""
    config = target.gpt.config
    return DrafterConfig(
        dim=config.dim,
        n_head=config.n_head,
        ffn_dim=config.hidden_dim,
        vocab_size=config.vocab_size,
        grid=config.grid,
        prefix_length=config.prefix_length - 1,
        norm_eps=config.norm_eps,
        prefix_rotary=config.prefix_rotary,
    )


def drafter_inputs(codes: Tensor, prefix: int) -> Tensor:
    """Return the drafter's codes, int ``[B, prefix - 1 + n]``: code 0 on the prompt, then the image."""
    return F.pad(codes, (prefix - 1, 0))


class DrafterLoss(nn.Module):
    """The recipe's loss on one batch; also top-1 and top-3 agreement with the target's argmax."""

    def __init__(
        self, drafter: EagleDrafter, target: TextTarget, config: DrafterTrainConfig
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self.config = config
        self.prefix = target.gpt.config.prefix_length
        self.register_buffer("head", target.gpt.output.weight.detach().clone())
        self.head: Tensor

    def forward(
        self, codes: Tensor, features: Tensor, noise: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and ``[top-1, top-3]`` agreement.

        ``codes [B, n]``; ``features, noise [B, prefix + n - 1, D]`` of the target over prompt and
        image; ``mask`` bool ``[B, prefix - 1]``. Drafter position p predicts the feature at p + 1.
        """
        inputs = drafter_inputs(codes[:, :-1], self.prefix)
        out = self.drafter.forward_dense(inputs, (features + noise)[:, :-1], mask)
        # Positions from the first image token on; the prompt's are never drafted from.
        guess, truth = out[:, self.prefix - 1 :], features[:, self.prefix :]
        logits = F.linear(guess, self.head).float()
        goal = F.linear(truth, self.head).float()
        loss = self.config.feature_weight * F.smooth_l1_loss(guess.float(), truth.float())
        soft = -(goal.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
        loss = loss + self.config.token_weight * soft
        best = goal.argmax(-1, keepdim=True)
        top = logits.detach().topk(3, dim=-1).indices == best
        return loss, torch.stack((top[..., 0].float().mean(), top.any(-1).float().mean()))


def train_drafter(
    config: DrafterTrainConfig,
    target: TextTarget,
    batches: Batches,
    heldout: Batches,
    out: Path,
    progress: Progress | None = None,
    *,
    resume: bool = True,
) -> dict[str, Any]:
    """Train on a frozen target, resuming ``out/checkpoint.pt``; write ``drafter.safetensors``.

    The weights with the best held-out top-3 agreement are kept. Returns the report.
    """
    say = progress or NullProgress()
    seed_everything(config.seed)
    target = target.eval().requires_grad_(False)
    drafter = EagleDrafter(drafter_config(target)).train()
    for name, weight in drafter.named_parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, std=0.02)
        if name.endswith(("wo.weight", "w2.weight")):
            nn.init.normal_(weight, std=0.01)
    with torch.no_grad():
        # Start from "the next feature resembles this one": the identity on the feature half.
        drafter.fc.weight[:, drafter.config.dim :].add_(torch.eye(drafter.config.dim))
        drafter.embed_tokens.weight.copy_(target.gpt.tok_embeddings.weight)
    drafter.embed_tokens.requires_grad_(False)
    loss_of = DrafterLoss(drafter, target, config)
    trained = [p for p in drafter.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True
    )
    path = out / "checkpoint.pt"
    step, elapsed, curve = 0, 0.0, []
    best, kept = -1.0, {k: v.clone() for k, v in drafter.state_dict().items()}
    stored = load_checkpoint(path, config) if resume else None
    if stored is not None:
        step, elapsed, best = stored["step"], stored["elapsed"], stored["best"]
        state = stored["state"]
        drafter.load_state_dict(state["drafter"])
        optimizer.load_state_dict(state["optimizer"])
        kept, curve = state["kept"], state["curve"]
    run = torch.compile(loss_of, dynamic=False) if config.compile else loss_of
    features_of = target.features
    if config.compile:
        features_of = torch.compile(target.features, dynamic=False)
    began = time.monotonic() - elapsed
    budget = config.max_minutes * 60 if config.max_minutes else float("inf")
    width = target.gpt.config.dim

    def inputs(
        source: Batches, size: int, rng: random.Random, *, plain: bool
    ) -> tuple[Tensor, ...]:
        ids, mask, codes = source.draw(size, rng, plain=plain)
        share = 0.0 if plain else config.text_dropout
        drop = torch.tensor([rng.random() < share for _ in range(size)])
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            features = features_of(ids, mask, drop, codes)
        return codes, features.detach().float(), mask[:, :-1]

    def evaluate() -> list[float]:
        held_rng, total = random.Random(99), torch.zeros(2)
        drafter.eval()
        for _ in range(4):
            codes, features, mask = inputs(heldout, config.batch_size, held_rng, plain=True)
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                total += loss_of(codes, features, torch.zeros_like(features), mask)[1] / 4
        drafter.train()
        return [float(x) for x in total]

    def save() -> None:
        state = {
            "drafter": drafter.state_dict(),
            "optimizer": optimizer.state_dict(),
            "kept": kept,
            "curve": curve,
        }
        elapsed = time.monotonic() - began
        save_checkpoint(path, config, step=step, elapsed=elapsed, state=state, best=best)

    say.start("drafter", config.steps)
    say.advance(step)
    loss_seen = top_seen = 0.0
    while step < config.steps and time.monotonic() - began < budget:
        # A stream a step, so that a continued run draws what an unbroken one would.
        rng = random.Random(config.seed * 1_000_003 + step)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step, time.monotonic() - began)
        codes, features, mask = inputs(batches, config.batch_size, rng, plain=False)
        noise = (torch.rand(len(codes), features.shape[1], width) - 0.5) * config.noise
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, top = run(codes, features, noise, mask)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, config.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        smooth = 1.0 if step == 1 else 0.02
        loss_seen += smooth * (float(loss.detach()) - loss_seen)
        top_seen += smooth * (float(top[1]) - top_seen)
        say.advance(1, loss=loss_seen, top3=top_seen)
        if step % config.evaluate_every == 0 or step == config.steps:
            top1, top3 = evaluate()
            curve.append({"step": step, "loss": loss_seen, "top1": top1, "top3": top3})
            say.log(f"step {step}: held-out top-1 {top1:.3f}, top-3 {top3:.3f}")
            if top3 > best:
                best, kept = top3, {k: v.clone() for k, v in drafter.state_dict().items()}
        if step % config.checkpoint_every == 0:
            save()
    top1, top3 = evaluate()
    if top3 > best:
        best, kept = top3, {k: v.clone() for k, v in drafter.state_dict().items()}
    save()
    say.finish()
    drafter.load_state_dict(kept)
    write_model(drafter, out, "drafter")
    report = {
        "steps": step,
        "seconds": time.monotonic() - began,
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "images_seen": step * config.batch_size,
        "heldout_top3": best,
        "curve": curve,
        "config": config.model_dump(mode="json"),
    }
    write_json(out / "report.json", report)
    return report
