"""Windows that change their length: the law stays the target's, whatever counts decide, and only then."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.chi_square import misfit
from support.tiny import captions, tiny_models
from torch import Tensor

from lantern_accel.decoding.jacobi import JacobiEngine
from lantern_accel.decoding.logits import distribution
from lantern_accel.decoding.paced import PacedEngine
from lantern_accel.decoding.pacing import Block
from lantern_accel.device.operations import TensorOps
from lantern_accel.strategy.values import Sampling, Strategy, paced

#: A sound sampler misses by more than this once in a million tests.
SOUND = 4.9
IMAGES, VOCAB, TOKENS = 15_000, 3, 4
SAMPLING = Sampling(top_k=2)
#: From an image's gains so far ``[B, steps]`` and what a rule must not see: a length per image.
Decide = Callable[[Tensor, Any], Tensor]


def engine_of(images: int, sampling: Sampling = SAMPLING, **more: Any) -> PacedEngine:
    target, _ = tiny_models(2, vocab=VOCAB, grid=2, prefix=2, dim=8, sharpness=1.0)
    strategy = Strategy(tree=paced((1, 2, 4)))
    return PacedEngine(target, TensorOps(), strategy, sampling, batch=images, **more)


def begin(engine: PacedEngine, seed: int = 3) -> None:
    g, target = engine.geometry, engine.verifying.target
    features, mask = captions(target, 1)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(g.batch, g.tokens, g.columns, generator=generator)
    condition = features.expand(g.batch, -1, -1)
    if engine.sampling.guided:
        condition = torch.cat((condition, target.unconditional(g.batch)))
    engine.start(condition, mask.expand(g.batch, -1), drawn.clamp(2.0**-24, 1 - 2.0**-22))


def each_its_own(decide: Decide) -> tuple[PacedEngine, Tensor]:
    """Decode with a length per image: every step runs at each length, and an image keeps its own's.

    Images do not see each other, so an image gets what an engine of its own would give it.
    """
    engine = engine_of(IMAGES)
    buffers = engine.state.buffers
    kept = {name: b for name, b in buffers.items() if name not in ("uniforms", "condition")}
    begin(engine)
    caches = [*engine.verifying.cache.keys, *engine.verifying.cache.values]
    gains = torch.zeros(IMAGES, 0, dtype=torch.int64)
    for _ in range(TOKENS - 1):
        wanted = decide(gains, engine.state)
        before = {name: b.clone() for name, b in kept.items()}
        old = [c.clone() for c in caches]
        result = {name: b.clone() for name, b in kept.items()}
        new = [c.clone() for c in caches]
        for length in engine.lengths:
            for name, buffer in kept.items():
                buffer.copy_(before[name])
            for cache, was in zip(caches, old, strict=True):
                cache.copy_(was)
            if length > 1:  # whatever the last step was
                engine.engines[length].widen()
            engine.now = length
            engine.step()
            mine = wanted == length
            for name, buffer in kept.items():
                if len(buffer) == IMAGES:
                    result[name][mine] = buffer[mine]
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
    return engine, engine.decoded().tokens


def joint(engine: PacedEngine) -> Tensor:
    """Return the law of an image by the target's own dense pass, ``[V ** N]``."""
    target = engine.verifying.target
    every = torch.tensor(list(itertools.product(range(VOCAB), repeat=TOKENS)))
    features, mask = captions(target, 1)
    many = len(every)
    condition = features.expand(many, -1, -1)
    states = target.forward_dense(condition, every[:, :-1], mask.expand(many, -1))
    p = distribution(target.head(states[:, 1:]), SAMPLING)
    return p.gather(-1, every.unsqueeze(-1)).squeeze(-1).prod(-1)


def misfit_of(decide: Decide) -> float:
    with torch.inference_mode():
        engine, tokens = each_its_own(decide)
        cells = torch.zeros(IMAGES, dtype=torch.int64)
        for place in range(TOKENS):
            cells = cells * VOCAB + tokens[:, place]
        return misfit(torch.bincount(cells, minlength=VOCAB**TOKENS), joint(engine))


def at_random(gains: Tensor, _: Any) -> Tensor:
    generator = torch.Generator().manual_seed(gains.shape[1])
    return torch.tensor([1, 2, 4])[torch.randint(0, 3, (len(gains),), generator=generator)]


def by_acceptance(gains: Tensor, _: Any) -> Tensor:
    if not gains.shape[1]:
        return torch.full((len(gains),), 4)
    return torch.where(gains[:, -1] > 1, 4, 1)


def against(gains: Tensor, _: Any) -> Tensor:
    """Long windows where drafts were just refused, plain steps where they were kept."""
    if not gains.shape[1]:
        return torch.full((len(gains),), 2)
    return torch.where(gains[:, -1] > 1, 1, 2 + 2 * (gains.sum(1) % 2))


def looks_at_drafts(gains: Tensor, state: Any) -> Tensor:
    """What no rule is given: throws the drafts away whose next token is code 1."""
    following = state.tokens.gather(1, (state.length + 1).clamp(max=TOKENS).unsqueeze(1))[:, 0]
    return torch.where(following == 1, 1, 4)


@pytest.mark.parametrize("decide", [at_random, by_acceptance, against])
def test_images_follow_the_target_whatever_counts_decide(decide: Decide) -> None:
    assert misfit_of(decide) < SOUND


def test_a_rule_that_reads_drafts_is_found() -> None:
    assert misfit_of(looks_at_drafts) > 2 * SOUND


class Walk:
    """A rule that walks through lengths."""

    def __init__(self, *lengths: int) -> None:
        self.lengths, self.at, self.blocks = lengths, 0, list[Block]()

    def begin(self) -> int:
        self.at = 0
        return self.lengths[0]

    def told(self, block: Block) -> int:
        self.blocks.append(block)
        self.at += 1
        return self.lengths[self.at % len(self.lengths)]


@pytest.mark.parametrize("lengths", [(1,), (4,), (1, 4), (4, 1, 2), (2, 3, 4, 1)])
def test_greedily_every_rule_gives_the_plain_tokens(lengths: tuple[int, ...]) -> None:
    sampling = Sampling(temperature=0, cfg_scale=2.0)
    with torch.inference_mode():
        said = []
        for rule in (Walk(*lengths), Walk(1)):
            target, _ = tiny_models(0, grid=4)
            strategy = Strategy(tree=paced((1, 2, 3, 4)))
            engine = PacedEngine(target, TensorOps(), strategy, sampling, batch=2, rule=rule)
            begin(engine)
            said.append(engine.run().tokens)
    assert torch.equal(*said)


def test_a_rule_hears_counts_and_what_is_left() -> None:
    rule = Walk(4, 2, 1)
    engine = engine_of(3, rule=rule)
    with torch.inference_mode():
        begin(engine)
        done = engine.run()
    assert int(done.steps.max()) >= len(rule.blocks)
    assert all(b.steps == 1 and all(1 <= g <= b.length for g in b.gained) for b in rule.blocks)
    assert [b.length for b in rule.blocks] == [(4, 2, 1)[i % 3] for i in range(len(rule.blocks))]


def test_one_length_decodes_as_the_window_alone() -> None:
    target, _ = tiny_models(1)
    sampling = Sampling(top_k=20, cfg_scale=2.0)
    paces = PacedEngine(
        target, TensorOps(), Strategy(tree=paced((1, 6))), sampling, batch=2, rule=Walk(6)
    )
    window = paced((1, 6)).model_copy(update={"paces": ()})
    alone = JacobiEngine(target, TensorOps(), Strategy(tree=window), sampling, batch=2)
    features, mask = captions(target, 2)
    condition = torch.cat((features, target.unconditional(2)))
    with torch.inference_mode():
        for engine in (paces, alone):
            engine.start(condition, mask, engine.uniforms(5, [0, 1]))
        assert torch.equal(paces.run().tokens, alone.run().tokens)


def test_moving_up_draws_what_the_longer_window_needs() -> None:
    engine = engine_of(2)
    with torch.inference_mode():
        begin(engine)
        engine.now = 2
        engine.step()
        engine.state.tokens[:, 3:] = 77  # nothing may be read that was not drawn
        engine.move(4)
    assert engine.now == 4
    known = engine.state.newest
    for row, newest in zip(engine.state.tokens, known.tolist(), strict=True):
        assert (row[newest + 1 : TOKENS] < VOCAB).all()
