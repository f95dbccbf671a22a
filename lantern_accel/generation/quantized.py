"""Measures the quality loss of quantized weights: total variation per token from the full model.

The quantized model generates some images; along each, both models say what comes next, and the quality
loss is half the sum of absolute differences. It adds to the loss of relaxed acceptance. The
cache keeps it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from lantern_accel.decoding.engine import Engine
from lantern_accel.decoding.logits import distribution
from lantern_accel.device.backend import Backend
from lantern_accel.device.context import inferring
from lantern_accel.errors import LanternWarning, ModelError
from lantern_accel.families.base import Conditions, Model, Prompt
from lantern_accel.files import cache_dir, read_record, write_record
from lantern_accel.generation.forced import forced_logits
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.generation.result import QuantizationLoss
from lantern_accel.nn.rounding import Rounding
from lantern_accel.nn.transformer import pack, rounded_copy
from lantern_accel.records import digest
from lantern_accel.strategy.values import Sampling, Strategy

#: Images along which the quality loss is measured.
IMAGES = 12
#: The seed of the first one.
SEED = 1000
PLAIN = Strategy(name="vanilla")


def quantized_model(
    model: Model,
    backend: Backend,
    dtype: torch.dtype,
    how: Rounding,
    tell: Callable[[str], None] = lambda text: None,
) -> Model:
    """Return a model whose target has quantized weights, with its quality loss; the full ones are freed.

    ``model``: with a target that no backend has packed yet. Where its quality loss is not known the
    full weights stay next to the quantized ones until it is measured. Raises :class:`ModelError` where it
    is not a number.
    """
    known = read_loss(model, backend, dtype, how)
    if known is not None and len(known.by_image) >= IMAGES:
        pack(model.target, backend, how)
        return replace(model, rounding=known)
    copy = rounded_copy(model.target, backend, how)
    pack(model.target, backend)
    loss = measure(backend, model, replace(model, target=copy), dtype, how, known, tell)
    return replace(model, target=copy, rounding=loss)


@inferring
def measure(
    backend: Backend,
    full: Model,
    rounded: Model,
    dtype: torch.dtype,
    how: Rounding,
    known: QuantizationLoss | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> QuantizationLoss:
    """Measure the quality loss, after what is ``known`` of it; every image is kept when done."""
    sampling: Sampling = full.manifest.defaults.sampling
    prompts = list(full.family.examples(full.manifest))
    tokens = full.manifest.target.num_tokens
    found = [] if known is None else list(known.by_image)
    pipeline = Pipeline(rounded, backend, dtype)
    try:
        loss = known
        for number in range(len(found), IMAGES):
            prompt = prompts[number % len(prompts)]
            with warnings.catch_warnings():  # nobody asked for this prompt, if it is cut
                warnings.simplefilter("ignore", LanternWarning)
                made, _ = pipeline.decode_only([prompt], PLAIN, sampling, SEED + number)
                given = pipeline.conditions([prompt])
            p, q = (
                next_tokens(one, backend, given, made.tokens, sampling) for one in (full, rounded)
            )
            moved = float(0.5 * (p - q).abs().sum(dim=-1).mean())
            if not 0 <= moved <= 1 + 1e-4:
                raise ModelError(
                    f"the quality loss of {how.name} weights is {moved} after {number} images, not "
                    "a total variation: the weights overflow in this dtype; use --dtype float32"
                )
            found.append(moved)
            loss = QuantizationLoss(
                weights=how.name,
                bits_per_weight=how.bits_per_weight,
                by_image=tuple(found),
                tokens=made.tokens.shape[1],
                sampling=sampling,
            )
            write_record(_path(full, backend, dtype, how), loss.model_dump(mode="json"))
            tell(
                f"quality loss of {how.name} weights, measured once: {number + 1} of {IMAGES} images of "
                f"{tokens} tokens, total variation {loss.total_variation_per_token:.4f}"
            )
    finally:
        pipeline.engines.release()
    assert loss is not None
    return loss


def next_tokens(
    model: Model, backend: Backend, conditions: Conditions, tokens: Tensor, sampling: Sampling
) -> Tensor:
    """Return a model's distribution of every token of images, given those before: ``[b, N, V]``.

    ``tokens`` int64 ``[b, N]``: the images. It is what plain decoding samples from there.
    """
    rows = model.family.rows(model, conditions, sampling)
    target = model.family.target_for_shape(model, conditions.shape)[0]
    engine = Engine(target, None, backend, PLAIN, sampling, batch=len(tokens))
    engine.session.load(rows.condition, rows.mask, engine.randomness(0, list(range(len(tokens)))))
    return distribution(forced_logits(engine, tokens.to(backend.device)), engine.session.filters)


def read_loss(
    model: Model, backend: Backend, dtype: torch.dtype, how: Rounding
) -> QuantizationLoss | None:
    """Return what is kept of a model's quality loss, perhaps of some of its images only."""
    with suppress(ValidationError):
        return QuantizationLoss.model_validate(read_record(_path(model, backend, dtype, how)))
    return None


def _path(model: Model, backend: Backend, dtype: torch.dtype, how: Rounding) -> Path:
    prompts: list[Prompt] = list(model.family.examples(model.manifest))
    key = {
        "model": model.manifest.name,
        "weights": model.weights_hash,
        "rounding": repr(how),
        "device": f"{backend.name} {backend.facts().name}",
        "dtype": str(dtype),
        "sampling": model.manifest.defaults.sampling.model_dump(mode="json"),
        "prompts": prompts,
        "seed": SEED,
    }
    return cache_dir() / "rounding" / f"{how.name}-{digest(key)[:24]}.json"
