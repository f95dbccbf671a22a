"""Every function that ``auto`` and the trees capture, on tiny models: for checks that want them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from lantern_accel.decoding.engine import Engine
from lantern_accel.device.backend import Backend
from lantern_accel.nn.rounding import ROUNDINGS
from lantern_accel.nn.transformer import rounded_copy
from lantern_accel.strategy.values import (
    AUTO,
    AUTO_LENGTHS,
    ChainTree,
    Sampling,
    SelfDrafts,
    Strategy,
    Window,
)
from lantern_accel.testing import tiny

#: What auto moves between, the trees that a request may ask for by name, drafts by a quantized copy,
#: and plain decoding of a target in fewer.
KINDS = ("windows", "chains", "vanilla", "lantern++", "eagle2", "self", "int8", "int6")


def strategy_of(kind: str, vocab: int) -> Strategy:
    """Return a strategy by :data:`KINDS`, over trees that suit a tiny model."""
    if kind == "chains":
        tree = ChainTree.over((1, 2, 3, 4))
        return tiny.tiny_strategy("vanilla", vocab).model_copy(
            update={"drafts": tree, "name": kind}
        )
    if kind == "windows":
        return Strategy(name=AUTO, drafts=Window.over(AUTO_LENGTHS))
    if kind in ROUNDINGS:
        return tiny.tiny_strategy("vanilla", vocab)
    return tiny.tiny_strategy(kind, vocab)


def engine_of(backend: Backend, kind: str, batch: int, guided: bool) -> Any:
    """Make an engine on a tiny model, the same on every device; its attribute ``model`` is that."""
    model = tiny.tiny_model(backend, backend.device, torch.float32)
    vocab = model.manifest.target.vocab_size
    strategy, copy = strategy_of(kind, vocab), None
    shape = model.family.usual_shape(model)
    target, drafter = model.family.target_for_shape(model, shape)
    if isinstance(strategy.drafts, SelfDrafts) or kind in ROUNDINGS:
        how = ROUNDINGS[getattr(strategy.drafts, "weights", kind)]
        fewer = replace(model, target=rounded_copy(model.target, backend, how))
        copy, _ = model.family.target_for_shape(fewer, shape)
    if kind in ROUNDINGS:
        target, copy = copy, None
    sampling = Sampling(cfg_scale=2.5 if guided else 1.0, top_k=min(32, vocab))
    made = Engine(
        target,
        drafter,
        backend,
        strategy,
        sampling,
        batch=batch,
        neighbours=model.neighbours,
        copy=copy,
    )
    vars(made)["model"] = model
    return made


def functions_of(engine: Any) -> dict[str, Callable[[], None]]:
    """Return what a device captures of an engine, by name."""
    made: dict[str, Callable[[], None]] = engine.host_functions()
    return made
