"""Warms up: captures engines and runs everything that a request does on the device once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import torch

from lantern_accel.errors import LanternError
from lantern_accel.generation.engines import CapturedEngine, explained
from lantern_accel.strategy.values import Sampling, Strategy

if TYPE_CHECKING:
    from lantern_accel.generation.loaded import Loaded


def warm(
    pipeline: Loaded,
    batches: Sequence[int],
    strategies: Sequence[str | Strategy],
    sampling: Sampling,
    on_bucket: Callable[[str, float], None] | None,
) -> list[str]:
    """Make and rehearse the engine of every batch size and strategy; return the buckets' names.

    ``on_bucket`` gets each bucket's name and seconds.
    """
    done: list[str] = []
    shape = pipeline.model.family.usual_shape(pipeline.model)
    for batch in batches:
        for given in strategies:
            chosen = pipeline.strategy(given)
            if isinstance(given, str):
                chosen = pipeline.tuned(chosen, sampling.temperature)
                chosen = pipeline.fitted(chosen, batch, batch, sampling)
            began = time.perf_counter()
            size = pipeline.engines.padded(batch, chosen, sampling)
            rehearse(pipeline, pipeline.engine(size, chosen, sampling, shape), sampling, shape)
            done.append(f"{chosen.name} x {size}")
            if on_bucket is not None:
                on_bucket(done[-1], time.perf_counter() - began)
    return done


def rehearse(pipeline: Loaded, ready: CapturedEngine, sampling: Sampling, shape: Hashable) -> None:
    """Load an example, step, read and draw once: what is compiled for that is compiled now."""
    engine, state, model = ready.engine, ready.engine.state, pipeline.model
    condition, mask = torch.zeros_like(state.condition), torch.ones_like(state.prefix_mask)
    # A model whose captions come from a file knows none of the examples.
    with contextlib.suppress(LanternError, IndexError):
        example = model.family.examples(model.manifest)[0]
        made = pipeline.conditions([example]).pick([0] * engine.geometry.batch)
        rows = model.family.rows(model, made, sampling)
        if (rows.condition.shape, rows.mask.shape) == (condition.shape, mask.shape):
            condition, mask = rows.condition, rows.mask
    uniforms = engine.randomness(0, [0] * engine.geometry.batch)
    with explained(pipeline.backend):
        decoded = engine.rehearse(condition, mask, uniforms, ready.prefill, ready.step)
        pipeline.pixels(decoded.tokens, shape)
