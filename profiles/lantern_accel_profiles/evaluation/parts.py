"""The papers' first experiments: interchangeable codes, what relaxation gains and moves, distances.

Each part takes a loaded model and prompts or images, and returns its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lantern_accel.device.context import inferring
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.strategy.values import Strategy
from lantern_accel.training.imageset import to_pixels
from lantern_accel_profiles.evaluation.schema import (
    EvaluationSettings,
    FrontierPoint,
    Interchange,
    StrategyDistance,
)
from lantern_accel_profiles.evaluation.tables import in_words
from lantern_accel_profiles.quality.exact_loss import exact_costs
from lantern_accel_profiles.quality.features import EfficientNetLite0, in_parts
from lantern_accel_profiles.quality.interval import estimate_paired, mean, share
from lantern_accel_profiles.quality.scoring import tokens_of
from lantern_accel_profiles.quality.set_metrics import kernel_distance, permutation_test

#: Images decoded together here; another number would give each other random numbers.
BATCH = 8
#: No bound, where the budget is the bound.
MOST_LAMBDA = 1e6
#: What a default may move of a token's probability, at most.
MOST_MOVED = 0.1


# --- interchangeable codes ------------------------------------------------------------------------


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio of each pair of uint8 images ``[n, H, W, 3]``, dB."""
    mse = (a.double() - b.double()).square().mean((1, 2, 3))
    return 10.0 * torch.log10(255.0**2 / mse.clamp_min(1e-3))


@inferring
def interchange(
    pipeline: Pipeline,
    images: Tensor,
    codes: Tensor,
    ks: Sequence[int],
    seed: int,
    net: EfficientNetLite0 | None,
) -> list[Interchange]:
    """Replace every code by a random one of its ``k`` nearest, for each k, and by any code at all.

    ``images`` uint8 ``[n, H, W, 3]``, ``codes`` int64 ``[n, tokens]``, both on the host.
    """
    vocab = len(pipeline.model.family.codebook(pipeline.model)[0])
    generator = torch.Generator().manual_seed(seed)
    whole = pipeline.pixels(tokens_of(pipeline, codes))
    rows = []
    for k in [0, *(k for k in ks if k < vocab), None]:
        if k is None:
            name = "any code"
            other = torch.randint(vocab, codes.shape, generator=generator)
        elif k == 0:
            name, other = "nothing: the reconstruction itself", codes
        else:
            name = f"one of the {k} nearest codes"
            table = pipeline.engines.neighbours(k).cpu().long()
            pick = torch.randint(k, codes.shape, generator=generator)
            other = table[codes].gather(-1, pick.unsqueeze(-1)).squeeze(-1)
        seen = pipeline.pixels(tokens_of(pipeline, other))
        distance = None
        if net is not None:
            gap = in_parts(net.distance, to_pixels(seen), to_pixels(whole))
            distance = float(gap.mean())
        rows.append(
            Interchange(
                replaced_by=name,
                k=k,
                psnr=float(psnr(seen, whole).mean()),
                psnr_to_image=float(psnr(seen, images).mean()),
                feature_distance=distance,
            )
        )
    return rows


# --- the frontier ---------------------------------------------------------------------------------


def strategies(pipeline: Pipeline, settings: EvaluationSettings) -> Iterator[Strategy]:
    """Yield the points: exact over both trees, LANTERN's k and delta, LANTERN++'s k and lambda, budgets.

    Under a budget a rule may add whatever the budget allows.
    """
    vocab = pipeline.model.target.config.vocab_size
    for name in ("eagle", "eagle2"):
        yield pipeline.strategy(name)
    for k in (k for k in settings.budget_k if k < vocab):
        for budget in settings.tv_budget:
            yield pipeline.strategy("lantern", k=k, delta=1.0, tv_budget=budget)
            yield pipeline.strategy("lantern++", k=k, lam=MOST_LAMBDA, tv_budget=budget)
    for k in (k for k in settings.lantern_k if k < vocab):
        for delta in settings.delta:
            yield pipeline.strategy("lantern", k=k, delta=delta)
    for k in (k for k in settings.lantern_pp_k if k < vocab):
        for lam in settings.lam:
            yield pipeline.strategy("lantern++", k=k, lam=lam)


def default_point(points: Sequence[FrontierPoint], name: str) -> FrontierPoint:
    """Return the point that the rule for defaults picks among a strategy's, budgets left out.

    Of those that move less than :data:`MOST_MOVED` of a token's mass, the one with the most tokens
    per step; where it is ahead of a cheaper one only by noise (images resampled in pairs), the cheaper.
    """
    own = [p for p in points if p.strategy.name == name and p.strategy.tv_budget is None]
    open_ = sorted(
        (p for p in own if p.total_variation_per_token.value < MOST_MOVED),
        key=lambda p: p.total_variation_per_token.value,
    )
    if not open_:
        raise ValueError(f"no point of {name!r} moves less than {MOST_MOVED} of a token's mass")
    best = max(open_, key=lambda p: p.step_compression.value)
    for point in open_:
        ahead = estimate_paired(
            share, point.steps, best.steps
        )  # fewer steps are more tokens per step
        if point is best or ahead.low <= 1:
            return point
    return best


def frontier(
    pipeline: Pipeline,
    prompts: Sequence[str | int],
    settings: EvaluationSettings,
    say: Callable[[str], None] = lambda text: None,
) -> list[FrontierPoint]:
    """Measure every point on the same prompts and random numbers."""
    points = []
    sampling = pipeline.sampling()
    for strategy in strategies(pipeline, settings):
        observer = exact_costs if strategy.acceptance.relaxed else None
        steps: list[int] = []
        moved: list[float] = []
        for start in range(0, len(prompts), BATCH):
            chunk = list(prompts[start : start + BATCH])
            made, _ = pipeline.decode_only(
                chunk, strategy, sampling, settings.seed + start, observer=observer
            )
            count = made.tokens.shape[1]
            steps += made.steps.tolist()
            moved += (made.quality_loss.double() / count).tolist()
        gained = [float(count - 1)] * len(steps)
        points.append(
            FrontierPoint(
                strategy=strategy,
                step_compression=estimate_paired(share, gained, steps),
                total_variation_per_token=mean(moved),
                steps=steps,
                images=len(steps),
            )
        )
        say(f"{in_words(strategy)}: {points[-1].step_compression.value:.2f} tokens per step")
    return points


# --- distances ------------------------------------------------------------------------------------


def _generate(
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
    """Compare each strategy with plain decoding; the first row is vanilla under another seed."""
    vanilla = pipeline.strategy("vanilla")
    base, _ = _generate(pipeline, prompts, vanilla, seed)
    greedy, greedy_tokens = _generate(pipeline, prompts, vanilla, seed, temperature=0.0)
    vectors = net.vectors(base) if net is not None else None
    rows = []
    for strategy in [vanilla, *named]:
        images, _ = _generate(pipeline, prompts, strategy, seed + 1)
        kid, p_value, detectable = None, None, None
        if net is not None and vectors is not None:
            drawn = net.vectors(images)
            kid = kernel_distance(drawn, vectors)
            p_value, detectable = permutation_test(drawn, vectors)
        relaxed, tokens = greedy, greedy_tokens
        if strategy is not vanilla:
            relaxed, tokens = _generate(pipeline, prompts, strategy, seed, temperature=0.0)
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
        say(f"{strategy.name}: {rows[-1].images} images compared")
    return rows
