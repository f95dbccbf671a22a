"""Tiny text-conditional models with random weights whose drafter guesses right now and then."""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_accel.families.llamagen.model import (
    DrafterConfig,
    LlamaGenConfig,
    LlamaGenDrafter,
    LlamaGenGPT,
)


def tiny_models(
    seed: int = 0,
    *,
    vocab: int = 64,
    grid: int = 6,
    prefix: int = 5,
    dim: int = 32,
    mixing: float = 0.5,
    sharpness: float = 2.0,
    blocks: int = 1,
    taps: tuple[int, ...] = (),
) -> tuple[LlamaGenGPT, LlamaGenDrafter]:
    """Build a target, and a drafter that takes the token's embedding for the target's next feature.

    ``mixing`` scales what attention and feed-forward add: the larger, the more of the context
    matters and the worse the drafter. ``sharpness`` scales the logits. ``blocks, taps``: the drafter's.
    """
    generator = torch.Generator().manual_seed(seed)
    target = LlamaGenGPT(
        LlamaGenConfig(
            dim=dim,
            n_layer=2,
            n_head=2,
            ffn_dim=2 * dim,
            vocab_size=vocab,
            grid=grid,
            prefix_length=prefix,
            caption_dim=12,
        )
    )
    drafter = LlamaGenDrafter(
        DrafterConfig(
            dim=dim,
            n_layer=blocks,
            taps=taps,
            n_head=2,
            ffn_dim=2 * dim,
            vocab_size=vocab,
            grid=grid,
            prefix_length=prefix - 1,
            norm_eps=1e-5,
        )
    )
    for model in (target, drafter):
        model.eval().requires_grad_(False)
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator))
                if "embed" not in name:
                    weight.div_(weight.shape[1] ** 0.5)
            if "wo" in name or "w2" in name:
                weight.mul_(mixing if model is target else 0.2)
    target.output.weight.mul_(sharpness)
    drafter.embed_tokens.weight.copy_(target.tok_embeddings.weight)
    noise = 0.05 * torch.randn(dim, 2 * dim, generator=generator)
    drafter.fc.weight.copy_(torch.cat((torch.eye(dim), torch.zeros(dim, dim)), 1) + noise)
    drafter.fc.bias.zero_()
    if drafter.fuse is not None:
        drafter.fuse.weight.mul_(0.2)
        drafter.fuse.weight[:, -dim:] += torch.eye(dim)
    return target, drafter


def captions(target: LlamaGenGPT, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return left-padded caption features ``[count, prefix, C]`` and their mask."""
    c = target.config
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, c.prefix_length, c.caption_dim, generator=generator)
    pads = torch.arange(count) % c.prefix_length
    mask = torch.arange(c.prefix_length) >= pads.unsqueeze(1)
    return features * mask.unsqueeze(-1), mask


def neighbours(vocab: int, count: int, seed: int = 0) -> Tensor:
    """Return a random neighbour table, int32 ``[vocab, count]``."""
    generator = torch.Generator().manual_seed(seed)
    distance = torch.rand(vocab, vocab, generator=generator).fill_diagonal_(2.0)
    return distance.argsort(-1)[:, :count].int()
