"""Tokens per step and total variation against delta, lambda and a budget: the frontier to choose from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from lantern_accel.evaluation.schema import FrontierPoint, Settings
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.quality.interval import mean, paired, share
from lantern_accel.strategy.values import Strategy

#: Images decoded together here; another number would give each other random numbers.
BATCH = 8
#: No bound, where the budget is the bound.
MOST_LAMBDA = 1e6
#: What a default may move of a token's probability, at most.
MOST_MOVED = 0.1


def strategies(pipeline: Pipeline, settings: Settings) -> Iterator[Strategy]:
    """Yield the points: exact over both trees, LANTERN's k and delta, LANTERN++'s k and lambda, budgets.

    Under a budget a rule may borrow whatever the budget allows.
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


def chosen(points: Sequence[FrontierPoint], name: str) -> FrontierPoint:
    """Return the point that the rule for defaults picks among a strategy's, budgets left out.

    Of those that move less than :data:`MOST_MOVED` of a token's mass, the one with the most tokens
    per step; where it is ahead of a cheaper one only by noise (images resampled in pairs), the cheaper.
    """
    own = [p for p in points if p.strategy.name == name and p.strategy.tv_budget is None]
    open_ = sorted(
        (p for p in own if p.total_variation.value < MOST_MOVED),
        key=lambda p: p.total_variation.value,
    )
    if not open_:
        raise ValueError(f"no point of {name!r} moves less than {MOST_MOVED} of a token's mass")
    best = max(open_, key=lambda p: p.step_compression.value)
    for point in open_:
        ahead = paired(share, point.steps, best.steps)  # fewer steps are more tokens per step
        if point is best or ahead.low <= 1:
            return point
    return best


def frontier(
    pipeline: Pipeline,
    prompts: Sequence[str | int],
    settings: Settings,
    say: Callable[[str], None] = lambda text: None,
) -> list[FrontierPoint]:
    """Measure every point on the same prompts and random numbers."""
    points = []
    sampling = pipeline.sampling()
    for strategy in strategies(pipeline, settings):
        relaxed = strategy.acceptance.relaxed
        steps: list[int] = []
        moved: list[float] = []
        for start in range(0, len(prompts), BATCH):
            chunk = list(prompts[start : start + BATCH])
            made, _ = pipeline.decode_only(
                chunk, strategy, sampling, settings.seed + start, exact_price=relaxed
            )
            count = made.tokens.shape[1]
            steps += made.steps.tolist()
            moved += (made.price.double() / count).tolist()
        gained = [float(count - 1)] * len(steps)
        points.append(
            FrontierPoint(
                strategy=strategy,
                step_compression=paired(share, gained, steps),
                total_variation=mean(moved),
                steps=steps,
                images=len(steps),
            )
        )
        say(
            f"{strategy.name} {strategy.acceptance.model_dump(exclude={'kind'})}"
            f"{'' if strategy.tv_budget is None else f' within {strategy.tv_budget:g}'}: "
            f"{points[-1].step_compression.value:.2f} tokens per step, "
            f"total variation {points[-1].total_variation.value:.4f}"
        )
    return points
