"""Training the target: a text-conditional LlamaGen GPT on VQ tokens, with its text encoder."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from lantern_accel.files import write_json, write_whole
from lantern_accel.models.llamagen import CaptionEmbedder, LlamaGenConfig, LlamaGenGPT
from lantern_accel.models.text import PAD_ID, TextEncoder, TextEncoderConfig, place
from lantern_accel.models.transformer import PrefixRotary
from lantern_accel.models.words import normalise
from lantern_accel.training.captions import caption
from lantern_accel.training.common import (
    NullProgress,
    Progress,
    TrainConfig,
    learning_rate,
    load_checkpoint,
    save_checkpoint,
    seed_everything,
)
from lantern_accel.training.data import EmojiDataset, Record


class TargetConfig(TrainConfig):
    """What the target trainer is told."""

    dim: int = Field(384, description="width of the transformer")
    n_layer: int = 8
    n_head: int = 6
    ffn_dim: int = 1024
    text_dim: int = 192
    text_layers: int = 2
    text_heads: int = 4
    prefix_length: int = 16
    repeat_caption: bool = Field(
        True, description="fill the prefix with the caption again and again"
    )
    prefix_rotary: PrefixRotary = Field(
        "identity", description="identity: the image attends to the prompt by content"
    )
    dropout: float = Field(0.0, ge=0, lt=1)
    text_dropout: float = Field(
        0.1, ge=0, lt=1, description="share of unconditional examples (CFG)"
    )
    ema: float = Field(0.995, ge=0, lt=1, description="decay of the averaged weights that are kept")
    evaluate_every: int = Field(1000, ge=1)
    group_weights: dict[str, float] = Field(
        default={
            "smileys-emotion": 2.5,
            "animals-nature": 2.0,
            "food-drink": 2.0,
            "objects": 0.7,
            "travel-places": 0.7,
            "people-body": 0.4,
        },
        description="factors on the records' sampling weights, by emoji group",
    )
    concept_weights: dict[str, float] = Field(
        default={}, description="further factors by concept name, such as {'red heart': 5}"
    )
    compile: bool = Field(True, description="torch.compile the loss; about twice as fast on CPU")


class TextTarget(nn.Module):
    """Text encoder and GPT, trained together."""

    def __init__(
        self, gpt: LlamaGenConfig, text: TextEncoderConfig, *, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.text = TextEncoder(text)
        self.gpt = LlamaGenGPT(gpt, dropout=dropout)

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
        model = cls(gpt, text, dropout=config.dropout)
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

        With GPT-2's small embeddings the shared directions drowned the words: captions came out
        nearly parallel (cosine 0.94 and more within two clusters).
        """
        nn.init.normal_(self.text.words.weight, std=1.0)
        nn.init.normal_(self.text.positions.weight, std=0.3)
        cls = self.gpt.cls_embedding
        assert isinstance(cls, CaptionEmbedder)
        for layer in (cls.cap_proj.fc1, cls.cap_proj.fc2):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)

    def features(self, ids: Tensor, mask: Tensor, drop: Tensor, codes: Tensor) -> Tensor:
        """Return the states over prompt and image, ``[B, prefix + n - 1, D]``.

        Row ``prefix - 1 + n`` predicts token n.

        ``ids, mask [B, prefix]``, ``drop`` bool ``[B]`` marks unconditional rows, ``codes [B, n]``.
        """
        cond = self.text(ids, mask)
        free = self.gpt.unconditional(cond.shape[0]).to(cond.dtype)
        # As in LlamaGen, the unconditional branch keeps the caption's padding mask.
        cond = torch.where(drop.view(-1, 1, 1), free * mask.unsqueeze(-1), cond)
        return self.gpt.forward_dense(cond, codes[:, :-1], mask)

    def forward(self, ids: Tensor, mask: Tensor, drop: Tensor, codes: Tensor) -> Tensor:
        """Return the mean cross-entropy of the codes, nats a token."""
        states = self.features(ids, mask, drop, codes)
        logits = self.gpt.head(states[:, self.gpt.config.prefix_length - 1 :])
        return F.cross_entropy(logits.flatten(0, 1), codes.flatten())


class Batches:
    """Draws training batches: images by weight, a random view, a fresh caption."""

    def __init__(
        self,
        records: list[Record],
        tokens: np.ndarray[Any, Any],
        tokenizer: Any,
        text: TextEncoderConfig,
        split: str,
        group_weights: dict[str, float] | None = None,
        concept_weights: dict[str, float] | None = None,
    ) -> None:
        factor, further = group_weights or {}, concept_weights or {}
        chosen = [r for r in records if r.split == split]
        self.rows = np.array([r.index for r in chosen])
        weights = np.array(
            [r.weight * factor.get(r.group, 1.0) * further.get(r.concept, 1.0) for r in chosen]
        )
        self.weights = weights / weights.sum()
        self.records = {r.index: r for r in records}
        self.tokens, self.tokenizer, self.text = tokens, tokenizer, text

    def encode(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        """Tokenise captions as a request would: ids int64 and mask bool, both ``[B, prefix]``."""
        rows = [place(self.tokenizer.encode(normalise(text)).ids, self.text) for text in texts]
        ids = torch.tensor(rows)
        return ids, ids != PAD_ID

    def draw(self, size: int, rng: random.Random, *, plain: bool = False) -> tuple[Tensor, ...]:
        """Return ``ids, mask, codes``; ``plain`` takes the first view and the bare name."""
        picks = rng.choices(self.rows.tolist(), weights=self.weights.tolist(), k=size)
        views = [0 if plain else rng.randrange(self.tokens.shape[1]) for _ in picks]
        codes = torch.from_numpy(self.tokens[picks, views].astype(np.int64))
        texts = [self.records[i].concept if plain else caption(self.records[i], rng) for i in picks]
        return (*self.encode(texts), codes)


@torch.no_grad()
def evaluate(model: TextTarget, batches: Batches, count: int = 256) -> float:
    """Return the mean negative log-likelihood of ``count`` images, nats a token."""
    rng = random.Random(1234)
    model.eval()
    total = 0.0
    for _ in range(0, count, 32):
        ids, mask, codes = batches.draw(32, rng, plain=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            total += float(model(ids, mask, torch.zeros(32, dtype=torch.bool), codes)) * 32
    model.train()
    return total / count


def train_target(
    config: TargetConfig,
    data: EmojiDataset,
    tokens: np.ndarray[Any, Any],
    tokenizer: Any,
    codebook_size: int,
    out: Path,
    progress: Progress | None = None,
    *,
    resume: bool = True,
) -> dict[str, Any]:
    """Train, resuming ``out/checkpoint.pt``; write ``target.safetensors``, ``text.safetensors``.

    ``tokens``: int ``[n, views, grid*grid]``. Returns the report that ``out/report.json`` holds. The
    weights that are written are the moving average.
    """
    say = progress or NullProgress()
    seed_everything(config.seed)
    grid = int(tokens.shape[-1] ** 0.5)
    model = TextTarget.fresh(config, tokenizer.get_vocab_size(), codebook_size, grid).train()
    average = {k: v.detach().clone() for k, v in model.named_parameters()}
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    train = Batches(
        data.records,
        tokens,
        tokenizer,
        model.text.config,
        "train",
        config.group_weights,
        config.concept_weights,
    )
    held = Batches(data.records, tokens, tokenizer, model.text.config, "heldout")
    path = out / "checkpoint.pt"
    step, elapsed, curve = 0, 0.0, []
    stored = load_checkpoint(path, config) if resume else None
    if stored is not None:
        step, elapsed = stored["step"], stored["elapsed"]
        state = stored["state"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        average, curve = state["average"], state["curve"]
    run = torch.compile(model, dynamic=False) if config.compile else model
    began = time.monotonic() - elapsed
    budget = config.max_minutes * 60 if config.max_minutes else float("inf")

    def save() -> None:
        save_checkpoint(
            path,
            config,
            step=step,
            elapsed=time.monotonic() - began,
            state={
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "average": average,
                "curve": curve,
            },
        )

    say.start("target", config.steps)
    say.advance(step)
    running = curve[-1]["train"] if curve else None
    while step < config.steps and time.monotonic() - began < budget:
        # A stream a step, so that a continued run draws what an unbroken one would.
        rng = random.Random(config.seed * 1_000_003 + step)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step, time.monotonic() - began)
        ids, mask, codes = train.draw(config.batch_size, rng)
        drop = torch.tensor([rng.random() < config.text_dropout for _ in range(len(codes))])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = run(ids, mask, drop, codes)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        decay = min(config.ema, (1 + step) / (10 + step))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                average[name].lerp_(weight, 1 - decay)
        seen = float(loss.detach())
        running = seen if running is None else 0.98 * running + 0.02 * seen
        say.advance(1, loss=running)
        if step % config.evaluate_every == 0:
            curve.append({"step": step, "train": running, "heldout": evaluate(model, held)})
            say.log(f"step {step}: train {running:.3f}, held-out {curve[-1]['heldout']:.3f} nats")
        if step % config.checkpoint_every == 0:
            save()
    save()
    say.finish()
    model.load_state_dict(average, strict=False)
    report = {
        "steps": step,
        "seconds": time.monotonic() - began,
        "parameters": sum(p.numel() for p in model.parameters()),
        "images_seen": step * config.batch_size,
        "train_nll": running,
        "heldout_nll": evaluate(model, held),
        "curve": curve,
        "config": config.model_dump(mode="json"),
    }
    write_model(model.gpt, out, "target")
    write_model(model.text, out, "text")
    write_json(out / "report.json", report)
    return report


def write_model(model: nn.Module, out: Path, name: str) -> None:
    """Write a model's weights as bf16 ``name.safetensors`` and its config as ``name.json``."""
    from safetensors.torch import save as serialise

    weights = {k: v.detach().to(torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    write_whole(out / f"{name}.safetensors", lambda stream: stream.write(serialise(weights)))
    config: Any = model.config
    write_json(out / f"{name}.json", config.model_dump(mode="json"))
