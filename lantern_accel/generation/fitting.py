"""The window of a batch: the one that was tuned for it, or else a usual one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lantern_accel.strategy.choices import read_choice
from lantern_accel.strategy.choose import shortened
from lantern_accel.strategy.values import AUTO, Sampling, Strategy, Window

if TYPE_CHECKING:
    from lantern_accel.generation.pipeline import Pipeline


def window_key(
    pipeline: Pipeline, strategy: Strategy, batch: int, sampling: Sampling
) -> dict[str, Any]:
    """Return everything that a tuned window depends on."""
    return {**pipeline.auto.key(strategy, batch, sampling), "strategy": strategy.name}


def fitted_window(
    pipeline: Pipeline, strategy: Strategy, batch: int | None, count: int, sampling: Sampling
) -> Strategy:
    """Return a strategy with the window for requests of ``count`` images, ``batch`` at a time.

    That is the one which `lantern-accel tune` kept for this device, or :func:`~.choose.shortened`. Only
    for strategies by name, whose window nobody chose. ``batch`` None: as many as usual.
    """
    if not isinstance(strategy.tree, Window) or strategy.name == AUTO:
        return strategy
    engines = pipeline.engines
    batch = batch or engines.usual_batch(count, strategy, sampling)
    size = engines.padded(min(batch, count), strategy, sampling)
    found = read_choice(window_key(pipeline, strategy, size, sampling))
    if found is not None:
        return strategy.override(tree=found.strategy.tree)
    return shortened(strategy, size, pipeline.backend.window_positions)
