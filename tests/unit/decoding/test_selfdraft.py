"""Drafts by the model's own weights in fewer bits: the tokens are plain decoding's."""

from __future__ import annotations

import torch
from support.engines import engine_of, finish
from support.tiny import tiny_models

from lantern_accel.decoding.sources.window import InvariantWindow
from lantern_accel.nn.rounding import ROUNDINGS
from lantern_accel.nn.transformer import REFERENCE, rounded_copy
from lantern_accel.strategy.trees import parse_drafts
from lantern_accel.strategy.values import Sampling, Strategy

PLAIN = Strategy(name="vanilla")


def models(bits="int8", seed=0):
    target, _ = tiny_models(seed, dim=64)
    return target, rounded_copy(target, REFERENCE, ROUNDINGS[bits])


def decode(strategy, target, copy=None, *, batch=2, seed=5, temperature=1.0, guided=True):
    sampling = Sampling(
        temperature=temperature, cfg_scale=2.0 if guided else 1.0, top_k=0, top_p=0.95
    )
    engine = engine_of((target, None), strategy, sampling, batch, ops=target.ops, copy=copy)
    return engine, finish(engine, seed=seed)


def self_drafts(text):
    return Strategy(name="self", drafts=parse_drafts(text))


def test_a_copy_that_agrees_is_kept_whole_and_one_that_does_not_costs_steps_alone():
    target, copy = models("int8")
    tokens = target.config.num_tokens
    _, own = decode(self_drafts("self:4"), target, target)
    assert (own.steps == -(-(tokens - 1) // 5)).all()  # five tokens a step
    _, near = decode(self_drafts("self:4"), target, copy)
    other, _ = tiny_models(9, dim=64)
    _, far = decode(self_drafts("self:4"), target, other)
    _, plain = decode(PLAIN, target)
    assert (near.steps >= own.steps).all()
    assert near.steps.sum() < far.steps.sum()
    assert torch.equal(far.tokens, plain.tokens)


def test_nothing_of_the_copy_is_left_in_the_cache():
    target, copy = models("int4")
    plain, _ = decode(PLAIN, target)
    made, _ = decode(self_drafts("self:5,window=4"), target, copy)
    g = plain.geometry
    slots = torch.arange(g.prefix + g.tokens - 1).expand(g.rows, -1)
    for layer in range(2):
        for a, b in zip(
            plain.verifying.cache.read(layer, slots),
            made.verifying.cache.read(layer, slots),
            strict=True,
        ):
            # The last position is known from its logits alone in one of them.
            torch.testing.assert_close(a[:, :-1], b[:, :-1], rtol=1e-4, atol=1e-4)


def test_drafts_that_are_kept_unchecked_would_be_seen(monkeypatch):
    """Planted: every draft of a poor copy is taken for the target's token."""
    target, _ = models()
    other, _ = tiny_models(9, dim=64)
    _, plain = decode(PLAIN, target)
    choose = InvariantWindow._choose

    def planted(self, state, logits, positions):
        chosen = choose(self, state, logits, positions)
        if positions.shape[1] > 1:
            chosen[:, :-1] = state.tokens.gather(1, positions.clamp(max=36))[:, :-1]
        return chosen

    monkeypatch.setattr(InvariantWindow, "_choose", planted)
    _, made = decode(self_drafts("self:4"), target, other)
    assert not torch.equal(made.tokens, plain.tokens)


def test_what_a_step_changes_is_listed_with_the_copys_buffers():
    target, copy = models()
    engine, _ = decode(self_drafts("self:2"), target, copy)
    own = engine.source.copy.session
    assert engine.changes["source.state.tokens"] is own.state.tokens
    assert own.verifying.cache is engine.verifying.cache
    assert len([n for n in engine.changes if "keys" in n and "state" not in n]) == 2
    assert own.state.keys is engine.state.keys  # rows may change their images
    assert engine.nbytes > engine.verifying.cache.layout.nbytes
