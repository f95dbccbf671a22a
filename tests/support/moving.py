"""Engines that move between lengths, each image by its own counts; and the law that they must follow."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lantern_accel.decoding.engine import Engine
from lantern_accel.decoding.logits import distribution
from lantern_accel.families.llamagen.model import LlamaGenGPT
from lantern_accel.strategy.length_policy import LengthStats
from lantern_accel.strategy.values import Sampling
from support.chi_square import misfit
from support.engines import Models
from support.tiny import captions, tiny_models

IMAGES, VOCAB, TOKENS = 8_000, 3, 4
SAMPLING = Sampling(top_k=2)
#: From an image's gains so far ``[B, steps]`` and what a rule must not see: a length per image.
Decide = Callable[[Tensor, Any], Tensor]


def law_models() -> Models:
    """Return models whose images are few enough to count them all."""
    return tiny_models(2, vocab=VOCAB, grid=2, prefix=2, dim=8, sharpness=1.0)


def begin(engine: Engine, seed: int = 3) -> None:
    g, target = engine.geometry, engine.verifying.target
    features, mask = captions(target, 1)
    condition = features.expand(g.batch, -1, -1)
    if engine.sampling.guided:
        condition = torch.cat((condition, target.unconditional(g.batch)))
    drawn = engine.randomness(seed, list(range(g.batch)))
    engine.start(condition, mask.expand(g.batch, -1), drawn)


def each_its_own(engine: Any, decide: Decide) -> Tensor:
    """Decode with a length per image: every step runs at each length, and an image keeps its own's.

    Images do not see each other, so an image gets what an engine of its own would give it.
    """
    buffers = engine.state.buffers
    kept = {name: b for name, b in buffers.items() if name not in ("uniforms", "condition")}
    begin(engine)
    caches = [side for kv in engine.caches for side in kv.buffers]
    wanted = torch.full((IMAGES,), max(engine.lengths))
    gains = torch.zeros(IMAGES, 0, dtype=torch.int64)
    for _ in range(TOKENS - 1):
        before_it, wanted = wanted, decide(gains, engine.state)
        if not engine.source.returns:
            wanted = torch.where(before_it == 1, 1, wanted)
        before = {name: b.clone() for name, b in kept.items()}
        old = [c.clone() for c in caches]
        result = {name: b.clone() for name, b in kept.items()}
        new = [c.clone() for c in caches]
        for length in engine.lengths:
            for name, buffer in kept.items():
                buffer.copy_(before[name])
            for cache, was in zip(caches, old, strict=True):
                cache.copy_(was)
            widen = engine.by_length[length].source.widening(engine.state)
            if widen is not None:  # whatever the last step was
                widen()
            engine.now = length
            engine.step()
            mine = wanted == length
            for name, buffer in kept.items():
                if len(buffer) % IMAGES == 0 and len(buffer):
                    ours = mine.repeat(len(buffer) // IMAGES)
                    result[name][ours] = buffer[ours]
                else:
                    result[name].copy_(buffer)
            for cache, out in zip(caches, new, strict=True):
                ours = mine.repeat_interleave(len(cache) // IMAGES)
                out[ours] = cache[ours]
        for name, buffer in kept.items():
            buffer.copy_(result[name])
        for cache, out in zip(caches, new, strict=True):
            cache.copy_(out)
        gained = engine.state.length - before["length"]
        gains = torch.cat((gains, gained.unsqueeze(1)), dim=1)
    tokens: Tensor = engine.read_tokens().tokens
    return tokens


def joint(target: LlamaGenGPT, sampling: Sampling, caption: int = 0) -> Tensor:
    """Return the law of an image by the target's own dense pass, float64 ``[V ** N]``."""
    c = target.config
    every = torch.tensor(list(itertools.product(range(c.vocab_size), repeat=c.num_tokens)))
    features, mask = captions(target, caption + 1)
    many = len(every)
    condition, known = features[caption:].expand(many, -1, -1), every[:, :-1]
    if sampling.guided:
        condition = torch.cat((condition, target.unconditional(many)))
        known = known.repeat(2, 1)
    states = target.forward_dense(condition, known, mask[caption:].expand(len(known), -1))
    logits = target.head(states[:, -c.num_tokens :])
    if sampling.guided:
        cond, uncond = logits.chunk(2)
        logits = uncond + sampling.cfg_scale * (cond - uncond)
    p = distribution(logits, sampling).double()
    return p.gather(-1, every.unsqueeze(-1)).squeeze(-1).prod(-1)


def counts_of(tokens: Tensor, vocab: int) -> Tensor:
    """Count whole images ``[B, N]``, as :func:`joint` lists them: ``[V ** N]``."""
    cells = (tokens * vocab ** torch.arange(tokens.shape[1] - 1, -1, -1)).sum(1)
    return torch.bincount(cells, minlength=vocab ** tokens.shape[1])


def misfit_of(engine: Any, decide: Decide) -> float:
    """Return how far an engine's images are from the target's law, in standard deviations."""
    with torch.inference_mode():
        return misfit(
            counts_of(each_its_own(engine, decide), VOCAB), joint(engine.verifying.target, SAMPLING)
        )


def at_random(gains: Tensor, _: Any) -> Tensor:
    generator = torch.Generator().manual_seed(gains.shape[1])
    return torch.tensor([1, 2, 4])[torch.randint(0, 3, (len(gains),), generator=generator)]


def by_acceptance(gains: Tensor, _: Any) -> Tensor:
    if not gains.shape[1]:
        return torch.full((len(gains),), 4)
    return torch.where(gains[:, -1] > 1, 4, 1)


def against(gains: Tensor, _: Any) -> Tensor:
    """Long where drafts were just refused, plain steps where they were kept."""
    if not gains.shape[1]:
        return torch.full((len(gains),), 2)
    return torch.where(gains[:, -1] > 1, 1, 2 + 2 * (gains.sum(1) % 2))


class Walk:
    """A rule that walks through lengths."""

    def __init__(self, *lengths: int) -> None:
        self.lengths, self.at, self.blocks = lengths, 0, list[LengthStats]()

    def begin(self) -> int:
        self.at = 0
        return self.lengths[0]

    def observe(self, block: LengthStats) -> int:
        self.blocks.append(block)
        self.at += 1
        return self.lengths[self.at % len(self.lengths)]

    def forget(self, row: int) -> None:
        pass
