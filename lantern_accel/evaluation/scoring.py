"""Teacher-forced scoring of images: likelihood, and how ambiguous the next token is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from lantern_accel.evaluation.schema import Ambiguity, Likelihood
from lantern_accel.pipeline import Pipeline


def encode_images(pipeline: Pipeline, pixels: Tensor, batch: int = 16) -> Tensor:
    """Return the codes of pixels ``[n, 3, H, W]`` in [-1, 1], int64 ``[n, tokens]`` on the host."""
    vq, device = pipeline.model.vq, pipeline.backend.device
    with torch.inference_mode():
        parts = [vq.encode(part.to(device)).flatten(1).cpu() for part in torch.split(pixels, batch)]
    return torch.cat(parts).long()


def conditions(pipeline: Pipeline, prompts: Sequence[str | int]) -> tuple[Tensor, Tensor]:
    """Return a condition a prompt, and its prefix mask, bool ``[n, prefix]``."""
    made = pipeline.conditions(prompts)
    return made.condition, made.mask


def unconditional(pipeline: Pipeline, condition: Tensor, mask: Tensor) -> Tensor:
    """Return the condition of the CFG branch; as in LlamaGen it keeps the caption's padding mask."""
    free: Tensor = pipeline.model.target.unconditional(len(condition)).to(condition.dtype)
    return free * mask.unsqueeze(-1).to(free.dtype) if condition.dim() == 3 else free


def _logits(
    pipeline: Pipeline, prompts: Sequence[str | int], codes: Tensor, batch: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield float32 logits with and without the prompt, ``[b, n, V]``, and the codes ``[b, n]``."""
    target, device = pipeline.model.target, pipeline.backend.device
    prefix = target.config.prefix_length
    for start in range(0, len(prompts), batch):
        here = codes[start : start + batch].to(device)
        condition, mask = conditions(pipeline, prompts[start : start + batch])
        rows = torch.cat((condition, unconditional(pipeline, condition, mask)))
        # Masks matter only where captions are padded; class prefixes are one position.
        both = torch.cat((mask, mask)) if condition.dim() == 3 else None
        states = target.forward_dense(rows, torch.cat((here, here))[:, :-1], both)
        cond, uncond = target.head(states[:, prefix - 1 :]).chunk(2)
        yield cond, uncond, here


@torch.inference_mode()
def likelihood(
    pipeline: Pipeline, prompts: Sequence[str | int], codes: Tensor, images: str, batch: int = 8
) -> Likelihood:
    """Return the mean negative log-likelihood of images' codes given their prompts."""
    total = 0.0
    for cond, _, here in _logits(pipeline, prompts, codes, batch):
        total += float(F.cross_entropy(cond.flatten(0, 1), here.flatten(), reduction="sum"))
    nll = total / codes.numel()
    return Likelihood(
        images=images, count=len(codes), nll=nll, perplexity=float(torch.tensor(nll).exp())
    )


@torch.inference_mode()
def ambiguity(
    pipeline: Pipeline,
    prompts: Sequence[str | int],
    codes: Tensor,
    scales: Sequence[float],
    positions: int,
    of: str,
    source: str,
    batch: int = 8,
) -> list[Ambiguity]:
    """Return a row a guidance scale over about ``positions`` evenly spaced token positions."""
    stride = max(1, codes.numel() // positions)
    found: dict[float, list[Tensor]] = {scale: [] for scale in scales}
    seen = 0
    for cond, uncond, _ in _logits(pipeline, prompts, codes, batch):
        picked = torch.arange((-seen) % stride, cond.shape[0] * cond.shape[1], stride)
        seen += cond.shape[0] * cond.shape[1]
        c, u = (t.flatten(0, 1)[picked.to(t.device)] for t in (cond, uncond))
        for scale in scales:
            logits = c if scale <= 1 else u + scale * (c - u)
            p = logits.softmax(-1)
            top = p.topk(min(10, p.shape[-1]), dim=-1).values
            entropy = -(p * p.clamp_min(1e-30).log()).sum(-1)
            found[scale].append(torch.stack((top[:, 0], top.sum(-1), entropy)).cpu())
    rows = []
    for scale, parts in found.items():
        top1, top10, entropy = torch.cat(parts, dim=1).double()
        rows.append(
            Ambiguity(
                of=of,
                source=source,
                cfg=scale,
                positions=len(top1),
                vocabulary=pipeline.model.target.config.vocab_size,
                top1_mean=float(top1.mean()),
                top1_median=float(top1.median()),
                top1_below_tenth=float((top1 < 0.1).double().mean()),
                top10_mass=float(top10.mean()),
                entropy=float(entropy.mean()),
            )
        )
    return rows
