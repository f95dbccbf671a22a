"""Teacher-forced scoring of images: likelihood, and how ambiguous the next token is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from lantern_accel.device.context import inferring
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.records import Record
from lantern_accel.strategy.values import Sampling

#: Sampling under which rows with and without the prompt are made, as guidance needs them.
GUIDED = Sampling(cfg_scale=2.0)
#: Logits of one pass over a batch; bounds its memory at many tokens.
LOGITS_AT_ONCE = 1 << 26


class Likelihood(Record):
    """Mean negative log-likelihood of real images, nats per token, without guidance."""

    images: str = Field(description="which images")
    count: int
    nll: float
    perplexity: float


class Ambiguity(Record):
    """How flat next-token distributions are, teacher-forced, at temperature 1 without filters."""

    of: str = Field(description="which tokens")
    source: str = Field(description="where the figures come from")
    cfg: float | None = None
    positions: int
    vocabulary: int
    top1_mean: float
    top1_median: float
    top1_below_tenth: float = Field(description="share of positions whose likeliest token is < 0.1")
    top10_mass: float
    entropy: float = Field(description="nats; ln(vocabulary) is uniform")


def tokens_of(pipeline: Pipeline, codes: Tensor) -> Tensor:
    """Return the tokens ``[n, tokens]`` that images of codes ``[n, rows * columns]`` have."""
    model = pipeline.model
    down = model.vq.config.downsample
    width, height = model.family.image_size(model.manifest)
    return model.family.tokens(model, codes.view(-1, height // down, width // down))


def _logits(
    pipeline: Pipeline, prompts: Sequence[str | int], codes: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield float32 logits with and without the prompt, ``[b, n, V]``, and the tokens ``[b, n]``.

    Codes that a position cannot have get no mass; positions with one possible code are left out.
    """
    model, device = pipeline.model, pipeline.backend.device
    tokens = tokens_of(pipeline, codes)
    size = tokens.shape[1] * model.target.config.vocab_size
    batch = min(8, max(1, LOGITS_AT_ONCE // size))
    for start in range(0, len(prompts), batch):
        here = tokens[start : start + batch].to(device)
        made = pipeline.conditions(prompts[start : start + batch])
        rows = model.family.rows(model, made, GUIDED)
        target = model.family.target_for_shape(model, made.shape)[0]
        mask = rows.mask if target.own_prompts else torch.cat((rows.mask, rows.mask))
        # Masks matter only where captions are padded; class prefixes are one position.
        both = mask if mask.shape[1] > 1 else None
        states = target.forward_dense(rows.condition, torch.cat((here, here))[:, :-1], both)
        logits = target.head(states[:, states.shape[1] - here.shape[1] :])
        allowed = target.allowed_codes()
        if allowed is not None:
            kind = allowed.kind.long()
            free = ((allowed.penalty == 0).sum(1) > 1)[kind].nonzero().flatten()
            # Finite, so that guidance can take differences.
            logits = logits[:, free] + allowed.penalty[kind[free]].clamp(min=-1e9)
            here = here[:, free]
        cond, uncond = logits.chunk(2)
        yield cond, uncond, here


@inferring
def likelihood(
    pipeline: Pipeline, prompts: Sequence[str | int], codes: Tensor, images: str
) -> Likelihood:
    """Return the mean negative log-likelihood of images' codes given their prompts."""
    total, count = 0.0, 0
    for cond, _, here in _logits(pipeline, prompts, codes):
        count += here.numel()
        total += float(F.cross_entropy(cond.flatten(0, 1), here.flatten(), reduction="sum"))
    nll = total / count
    return Likelihood(
        images=images, count=len(codes), nll=nll, perplexity=float(torch.tensor(nll).exp())
    )


@inferring
def ambiguity(
    pipeline: Pipeline,
    prompts: Sequence[str | int],
    codes: Tensor,
    scales: Sequence[float],
    positions: int,
    of: str,
) -> list[Ambiguity]:
    """Return one row per guidance scale over about ``positions`` evenly spaced token positions."""
    stride = max(1, codes.numel() // positions)
    found: dict[float, list[Tensor]] = {scale: [] for scale in scales}
    seen = 0
    for cond, uncond, _ in _logits(pipeline, prompts, codes):
        picked = torch.arange((-seen) % stride, cond.shape[0] * cond.shape[1], stride)
        seen += cond.shape[0] * cond.shape[1]
        c, u = (t.flatten(0, 1)[picked.to(t.device)] for t in (cond, uncond))
        for scale in scales:
            logits = c if scale <= 1 else u + scale * (c - u)
            p = logits.softmax(-1)
            top = p.topk(min(10, p.shape[-1]), dim=-1).values
            entropy = -(p * p.clamp_min(1e-30).log()).sum(-1)
            found[scale].append(torch.stack((top[:, 0], top.sum(-1), entropy)).cpu())
    vocabulary = pipeline.model.target.config.vocab_size
    rows = []
    for scale, parts in found.items():
        top1, top10, entropy = torch.cat(parts, dim=1).double()
        rows.append(
            Ambiguity(
                of=of,
                source="measured here, teacher-forced on real images",
                cfg=scale,
                positions=len(top1),
                vocabulary=vocabulary,
                top1_mean=float(top1.mean()),
                top1_median=float(top1.median()),
                top1_below_tenth=float((top1 < 0.1).double().mean()),
                top10_mass=float(top10.mean()),
                entropy=float(entropy.mean()),
            )
        )
    return rows
