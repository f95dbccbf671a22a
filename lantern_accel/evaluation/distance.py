"""Measures the distance of each strategy's pictures from exact decoding's, and from training images."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lantern_accel.evaluation.interchange import psnr
from lantern_accel.evaluation.schema import Memorisation, Nearest, StrategyDistance
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.quality.features import EfficientNetLite0, in_parts, to_pixels
from lantern_accel.quality.interval import mean
from lantern_accel.quality.set_metrics import kernel_distance, permutation_test
from lantern_accel.strategy.values import Strategy


def _draw(
    pipeline: Pipeline,
    prompts: Sequence[str | int],
    strategy: Strategy,
    seed: int,
    temperature: float | None = None,
) -> tuple[Tensor, Tensor]:
    made = pipeline.generate(list(prompts), strategy=strategy, seed=seed, temperature=temperature)
    return pipeline.pixels(made.tokens), made.tokens


def distances(
    pipeline: Pipeline,
    prompts: Sequence[str | int],
    named: Sequence[Strategy],
    seed: int,
    net: EfficientNetLite0 | None,
    say: Callable[[str], None] = lambda text: None,
) -> list[StrategyDistance]:
    """Compare each strategy with vanilla decoding; the first row is vanilla under another seed."""
    vanilla = pipeline.strategy("vanilla")
    base, _ = _draw(pipeline, prompts, vanilla, seed)
    greedy, greedy_tokens = _draw(pipeline, prompts, vanilla, seed, temperature=0.0)
    vectors = net.vectors(base) if net is not None else None
    rows = []
    for strategy in [vanilla, *named]:
        images, _ = _draw(pipeline, prompts, strategy, seed + 1)
        kid, p_value, detectable = None, None, None
        if net is not None and vectors is not None:
            drawn = net.vectors(images)
            kid = kernel_distance(drawn, vectors)
            p_value, detectable = permutation_test(drawn, vectors)
        relaxed, tokens = greedy, greedy_tokens
        if strategy is not vanilla:
            relaxed, tokens = _draw(pipeline, prompts, strategy, seed, temperature=0.0)
        gap = None
        if net is not None:
            gap = float(in_parts(net.distance, to_pixels(relaxed), to_pixels(greedy)).mean())
        rows.append(
            StrategyDistance(
                strategy=strategy,
                images=len(prompts),
                kid=kid,
                p_value=p_value,
                detectable=detectable,
                greedy_psnr=float(psnr(relaxed, greedy).mean()),
                greedy_feature_distance=gap,
                greedy_same_tokens=mean((tokens == greedy_tokens).double().mean(1).tolist()),
            )
        )
        say(f"{strategy.name}: {rows[-1].model_dump_json(exclude={'strategy'}, exclude_none=True)}")
    return rows


def nearest_images(images: Tensor, pool: Tensor, batch: int = 512) -> tuple[Tensor, Tensor]:
    """Return for each uint8 image ``[n, H, W, 3]`` its nearest in ``pool`` and the distance.

    The distance is the root mean square of pixel differences, 0 to 255.
    """
    flat = images.flatten(1).float()
    best = torch.full((len(flat),), float("inf"))
    index = torch.zeros(len(flat), dtype=torch.int64)
    own = flat.square().sum(1)
    for start in range(0, len(pool), batch):
        part = pool[start : start + batch].flatten(1).float()
        gap = own[:, None] + part.square().sum(1) - 2.0 * flat @ part.t()
        value, place = gap.min(1)
        better = value < best
        best = torch.where(better, value, best)
        index = torch.where(better, place + start, index)
    return index, (best.clamp_min(0.0) / flat.shape[1]).sqrt()


def memorisation(
    images: Tensor,
    prompts: Sequence[str],
    pool: Tensor,
    names: Sequence[tuple[str, str]],
    heldout: Tensor,
) -> tuple[Memorisation, Tensor]:
    """Find each sample's nearest training image; held-out images are the yardstick.

    ``pool`` uint8 ``[m, H, W, 3]`` with ``names`` (concept, style). Returns the rows and the indices
    of the nearest images.
    """
    index, gap = nearest_images(images, pool)
    _, yardstick = nearest_images(heldout, pool)
    rows = [
        Nearest(prompt=prompt, nearest=names[i][0], style=names[i][1], distance=float(d))
        for prompt, i, d in zip(prompts, index.tolist(), gap, strict=True)
    ]
    found = Memorisation(
        samples=rows,
        samples_median=float(gap.median()),
        heldout_median=float(yardstick.median()),
        heldout_count=len(heldout),
    )
    return found, index
