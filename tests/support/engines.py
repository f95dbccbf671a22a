"""Engines on tiny random models, and the strategies that their tests run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lantern_accel.decoding.decoded import Decoded
from lantern_accel.decoding.engine import Engine
from lantern_accel.device.capture import HostCopy
from lantern_accel.device.operations import TensorOps
from lantern_accel.families.llamagen.model import LlamaGenDrafter, LlamaGenGPT
from lantern_accel.families.random_weights import RandomModel
from lantern_accel.nn.rounding import rounding
from lantern_accel.nn.transformer import rounded_copy
from lantern_accel.strategy.rules import Lantern, LanternPP
from lantern_accel.strategy.sources import AnyKind
from lantern_accel.strategy.trees import MC_SIM_7B_63, SMALL_12
from lantern_accel.strategy.values import (
    ChainTree,
    DynamicTree,
    Sampling,
    SelfDrafts,
    StaticTree,
    Strategy,
)
from support.tiny import captions, neighbours

GREEDY = Sampling(temperature=0, cfg_scale=3.0)
SAMPLED = Sampling(temperature=1.0, top_k=40, top_p=0.95, cfg_scale=2.0)
LOPSIDED = StaticTree(paths=((0,), (1,), (2,), (2, 0), (2, 1), (2, 1, 0), (0, 0)))
TREES: dict[str, AnyKind] = {
    "chain4": ChainTree(length=4),
    "lopsided": LOPSIDED,
    "small_12": SMALL_12,
    "mc_sim": MC_SIM_7B_63,
    "dynamic": DynamicTree(top_k=4, depth=3, total=20),
}
#: The five strategies by name, on trees of this file's size.
NAMED: dict[str, Strategy] = {
    "vanilla": Strategy(name="vanilla"),
    "eagle": Strategy(name="eagle", drafts=SMALL_12),
    "eagle2": Strategy(name="eagle2", drafts=TREES["dynamic"]),
    "lantern": Strategy(
        name="lantern", drafts=TREES["dynamic"], acceptance=Lantern(k=8, delta=0.3)
    ),
    "lantern++": Strategy(name="lantern++", drafts=SMALL_12, acceptance=LanternPP(k=8, lam=4)),
}

Models = tuple[LlamaGenGPT, LlamaGenDrafter]


def engine_of(
    models: tuple[Any, Any],
    strategy: Strategy,
    sampling: Sampling,
    batch: int = 1,
    *,
    ops: TensorOps | None = None,
    rule: Any = None,
    **parts: Any,
) -> Any:
    """Make the engine of a target and its drafter, or None.

    What the strategy needs and ``parts`` do not give is made: a random table of ``neighbours``, and a
    rounded ``copy``. ``rule`` chooses among lengths.
    """
    target, drafter = models
    ops = ops or TensorOps()
    if strategy.neighbours and "neighbours" not in parts:
        parts["neighbours"] = neighbours(target.config.vocab_size, 10)
    if isinstance(strategy.drafts, SelfDrafts) and "copy" not in parts:
        parts["copy"] = rounded_copy(target, ops, rounding(strategy.drafts.weights), drafts=True)
    engine = Engine(target, drafter, ops, strategy, sampling, batch=batch, **parts)
    if rule is not None:
        engine.chosen = rule
    return engine


def of_family(
    model: RandomModel,
    strategy: Strategy,
    sampling: Sampling,
    batch: int,
    ops: TensorOps | None = None,
    **parts: Any,
) -> Any:
    """Make the engine of a family's tiny model, at its usual size; a copy to draft with has it too."""
    kind, shape, ops = model.family, model.family.usual_shape(model), ops or TensorOps()
    if isinstance(strategy.drafts, SelfDrafts):
        fewer = rounded_copy(model.target, ops, rounding(strategy.drafts.weights), drafts=True)
        parts["copy"], _ = kind.target_for_shape(replace(model, target=fewer), shape)
    if strategy.neighbours:
        parts["neighbours"] = model.neighbours[:, : strategy.neighbours]
    models = kind.target_for_shape(model, shape)
    return engine_of(models, strategy, sampling, batch, ops=ops, **parts)


def sampling_of(model: RandomModel, temperature: float, **more: Any) -> Sampling:
    """Return sampling with guidance where a family has it."""
    guided = model.manifest.defaults.sampling.guided
    return Sampling(temperature=temperature, cfg_scale=2.5 if guided else 1.0, **more)


def request_of(
    model: RandomModel, engine: Engine, images: list[int], seed: int, drawn: int | None = None
) -> tuple[Any, Tensor, Tensor]:
    """Return what starts some of the images 0, 1, ... of a family's tiny prompts.

    ``seed``: of the prompts, and of what is drawn unless ``drawn`` is given.
    """
    every = model.family.tiny_conditions(model, 8, seed)
    rows = model.family.rows(model, every.pick(images), engine.sampling)
    return rows.condition, rows.mask, engine.randomness(seed if drawn is None else drawn, images)


def start(engine: Engine, which: list[int] | None = None, seed: int = 0) -> None:
    """Prefill captions ``which`` of eight, each with its own stream of randomness."""
    target, batch = engine.verifying.target, engine.geometry.batch
    which = which if which is not None else list(range(batch))
    features, mask = captions(target, 8)
    condition = features[which]
    if engine.sampling.guided:
        condition = torch.cat((condition, target.unconditional(batch)))
    with torch.inference_mode():
        engine.start(condition, mask[which], engine.randomness(seed, which))


def finish(engine: Engine, which: list[int] | None = None, seed: int = 0) -> Decoded:
    start(engine, which, seed)
    with torch.inference_mode():
        return engine.run()


class Late(HostCopy):
    """Copies that arrive some steps late."""

    def __init__(self, source: Tensor, lag: int = 2) -> None:
        super().__init__(source)
        self.lag, self.posted = lag, list[Tensor]()

    def post(self) -> None:
        self.posted.append(self._source.to("cpu", copy=True))

    def read(self) -> Tensor:
        return self.posted.pop(0)

    def clear(self) -> None:
        self.posted.clear()
