"""From logits to distributions and draws: guidance, temperature, top-k, top-p, inverse CDF."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lantern_accel.device.operations import two_level_scan
from lantern_accel.strategy.values import Sampling

#: Running sums of weights ``[..., V]``, as :meth:`TensorOps.scan` makes them.
Scan = Callable[[Tensor], Tensor]


def guide(
    logits: Tensor, scale: Tensor | None, image_scale: Tensor | float | None = None
) -> Tensor:
    """Combine rows ``[cond; uncond]`` by classifier-free guidance, ``u + s (c - u)``.

    ``logits`` float32 ``[2B, T, V]`` with ``scale`` float32 ``[B, T]``; None: rows pass as they are.
    With ``image_scale`` rows are ``[cond; image only; uncond]`` and the rule is InstructPix2Pix's
    (arXiv 2211.09800), ``u + s_image (i - u) + s (c - i)``. Where the scale is 1 or less the result is
    the conditional row, bit for bit.
    """
    if scale is None:
        return logits
    s = scale.unsqueeze(-1)
    if image_scale is None:
        cond, uncond = logits.chunk(2, dim=0)
        return torch.where(s > 1, uncond + s * (cond - uncond), cond)
    cond, image, uncond = logits.chunk(3, dim=0)
    mixed = uncond + image_scale * (image - uncond) + s * (cond - image)
    return torch.where(s > 1, mixed, cond)


def _keep_top_k(logits: Tensor, k: int) -> Tensor:
    if k <= 0 or k >= logits.shape[-1]:
        return logits
    # Values equal to the k-th stay (LlamaGen and transformers agree on this).
    kth = logits.topk(k, dim=-1).values[..., -1:]
    return torch.where(logits < kth, float("-inf"), logits)


def _keep_top_p(logits: Tensor, p: float | Tensor, scan: Scan) -> Tensor:
    ordered, index = logits.sort(dim=-1, descending=True)
    mass = ordered.softmax(dim=-1)
    # A code goes when the codes before it already hold more than p.
    drop = (scan(mass) - mass) > p
    return logits.scatter(-1, index, torch.where(drop, float("-inf"), ordered))


def _keep_top_k_then_p(logits: Tensor, k: int, p: float | Tensor, scan: Scan) -> Tensor:
    """Apply both filters, sorting the k values that the first leaves in place of the vocabulary."""
    if k <= 0 or k >= logits.shape[-1]:
        return _keep_top_p(logits, p, scan)
    ordered, index = logits.topk(k, dim=-1)
    kth = ordered[..., -1:]
    within = torch.where(logits < kth, float("-inf"), logits).softmax(dim=-1)
    mass = within.gather(-1, index)
    total = scan(mass)
    inside = torch.where(total - mass > p, float("-inf"), ordered)
    # Further values equal to the k-th come after it, one by one, as long as there is room below p.
    further = (logits == kth).scatter(-1, index, False)
    before = total[..., -1:] + (further.cumsum(-1, dtype=torch.int32) - 1) * mass[..., -1:]
    rest = torch.where(further & (before <= p), logits, float("-inf"))
    return rest.scatter(-1, index, inside)


@dataclass(frozen=True)
class Filters:
    """How logits become a distribution in a step: what has a shape, and the values that are data.

    ``temperature`` and ``top_p``: float32 ``[1]`` on the device, or numbers. ``scan``: the device's
    running sums.
    """

    sampling: Sampling
    temperature: Tensor | float
    top_p: Tensor | float
    scan: Scan = two_level_scan

    @classmethod
    def of(cls, sampling: Sampling) -> Filters:
        """Return the filters of settings as numbers."""
        return cls(sampling, sampling.temperature, sampling.top_p)


def distribution(logits: Tensor, filters: Filters | Sampling) -> Tensor:
    """Return float32 probabilities ``[..., V]`` after temperature and the two filters.

    Greedy decoding (temperature 0) leaves the logits as they are: its rule compares probabilities of
    the raw distribution.
    """
    if isinstance(filters, Sampling):
        filters = Filters.of(filters)
    sampling, p = filters.sampling, filters.top_p
    if sampling.greedy:
        return logits.softmax(dim=-1)
    x = logits / filters.temperature
    if sampling.top_p >= 1:
        x = _keep_top_k(x, sampling.top_k)
    elif sampling.order == "top_k_first":
        x = _keep_top_k_then_p(x, sampling.top_k, p, filters.scan)
    else:
        x = _keep_top_k(_keep_top_p(x, p, filters.scan), sampling.top_k)
    return x.softmax(dim=-1)


def draw(
    weights: Tensor,
    uniform: Tensor,
    index: torch.dtype = torch.int64,
    scan: Scan = two_level_scan,
) -> Tensor:
    """Draw by inverse CDF: codes ``[...]`` from weights ``[..., V]`` (any sum) and uniforms ``[...]``.

    ``scan`` makes the running sums, none of them below the one before it.

    The uniforms are below ``1 - 2**-22`` (see :mod:`lantern_accel.decoding.uniforms`), so that rounding
    cannot push a draw past the last code with a weight.
    """
    total = scan(weights)
    bar = uniform.unsqueeze(-1) * total[..., -1:]
    return (total <= bar).sum(dim=-1, dtype=index).clamp(max=weights.shape[-1] - 1)


def draw_without_replacement(
    weights: Tensor,
    uniforms: Tensor,
    index: torch.dtype = torch.int64,
    scan: Scan = two_level_scan,
) -> Tensor:
    """Draw ``K`` different codes ``[..., K]``, from weights ``[..., V]``, uniforms ``[..., K]``.

    Where fewer than K codes have a weight, the rest of the draws repeat code V - 1 with no weight;
    acceptance skips drafts whose probability is 0.
    """
    picks = []
    for r in range(uniforms.shape[-1]):
        pick = draw(weights, uniforms[..., r], index, scan)
        picks.append(pick)
        if r + 1 < uniforms.shape[-1]:
            weights = weights.scatter(-1, pick.unsqueeze(-1), 0.0)
    return torch.stack(picks, dim=-1)
