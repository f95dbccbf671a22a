"""Accepted length and total variation against k, delta and lambda: the frontier to choose from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from lantern_accel.evaluation.schema import FrontierPoint, Settings
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.strategy.values import Strategy


def strategies(pipeline: Pipeline, settings: Settings) -> Iterator[Strategy]:
    """Yield the points: exact decoding over both trees, LANTERN's k and delta, LANTERN++'s k, lambda."""
    vocab = pipeline.model.target.config.vocab_size
    for name in ("eagle", "eagle2"):
        yield pipeline.strategy(name)
    for k in (k for k in settings.lantern_k if k < vocab):
        for delta in settings.delta:
            yield pipeline.strategy("lantern", k=k, delta=delta)
    for k in (k for k in settings.lantern_pp_k if k < vocab):
        for lam in settings.lam:
            yield pipeline.strategy("lantern++", k=k, lam=lam)


def frontier(
    pipeline: Pipeline,
    prompts: Sequence[str | int],
    settings: Settings,
    say: Callable[[str], None] = lambda text: None,
) -> list[FrontierPoint]:
    """Measure every point on the same prompts and random numbers."""
    points = []
    for strategy in strategies(pipeline, settings):
        made = pipeline.generate(list(prompts), strategy=strategy, seed=settings.seed).stats
        points.append(
            FrontierPoint(
                strategy=strategy,
                step_compression=made.step_compression,
                total_variation=made.total_variation,
                images=made.images,
            )
        )
        say(
            f"{strategy.name} {strategy.acceptance.model_dump(exclude={'kind'})}: "
            f"{made.step_compression:.2f} tokens per step, "
            f"total variation {made.total_variation:.3f}"
        )
    return points
