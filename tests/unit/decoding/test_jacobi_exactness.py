"""Windows of drafts say what the target says, counted through the engine.

The target is a table of the last two tokens, or a tiny transformer. What is wrong in a tail shows only
steps later, so the joint law of all tokens is compared, and each known way to be wrong must fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.chi_square import misfit
from support.engines import engine_of
from support.moving import begin, counts_of, joint
from support.tiny import tiny_models
from torch import Tensor

from lantern_accel.decoding.engine import Engine
from lantern_accel.decoding.logits import distribution
from lantern_accel.decoding.maximal_coupling import Coupled, couple
from lantern_accel.decoding.sources import window as window_drafts
from lantern_accel.strategy.values import Coupling, Sampling, Strategy, Window

#: A sound sampler misses by more than this once in a million tests.
SOUND = 4.9
IMAGES = 60_000
VOCAB, TOKENS = 4, 4


def test_decisions_are_those_of_plain_arithmetic() -> None:
    generator = torch.Generator().manual_seed(1)
    batch, length, vocab = 400, 6, 5
    p = torch.rand(batch, length, vocab, generator=generator).pow(3)
    p[..., 1] = 0
    p /= p.sum(-1, keepdim=True)
    q = torch.rand(batch, length - 1, vocab, generator=generator).pow(3)
    q = torch.where(torch.rand(batch, 1, 1, generator=generator) < 0.2, p[:, :-1], q)
    q /= q.sum(-1, keepdim=True)
    x = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(batch, length - 1)
    tests = torch.rand(batch, length - 1, generator=generator)
    draws = torch.rand(batch, length, generator=generator)
    out = couple(x, p, q, tests, draws)
    counts = set()
    for b in range(batch):
        first, close = length - 1, False
        tokens = []
        for i in range(length):
            row = p[b, i].double().tolist()
            if i < length - 1 and first == length - 1:
                code, drafted = int(x[b, i]), q[b, i].double().tolist()
                u = float(tests[b, i])
                close |= abs(u * drafted[code] - row[code]) < 1e-6
                if u * drafted[code] < row[code]:
                    tokens.append(code)
                    continue
                first = i
                left = [max(a - b, 0.0) for a, b in zip(row, drafted, strict=True)]
                row = [one / sum(left) for one in left] if sum(left) > 0 else row
            bar, total, picked = float(draws[b, i]) * sum(row), 0.0, 0
            for mass in row:
                total += mass
                close |= abs(total - bar) < 1e-5
                picked += total <= bar
            tokens.append(min(picked, vocab - 1))
        counts.add(first + 1)
        if not close:
            assert out.tokens[b].tolist() == tokens
            assert int(out.count[b]) == first + 1
    assert counts == set(range(1, length + 1))


SAMPLING = Sampling(top_k=3, temperature=1.3)


class Table:
    """A target that knows a row of logits for each position and the two tokens before it."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (TOKENS + 1, VOCAB + 1, VOCAB, VOCAB)
        self.logits = 2.5 * torch.randn(shape, generator=generator)
        self.last: Tensor = torch.empty(0)

    def joint(self, sampling: Sampling) -> Tensor:
        """Return the law of an image, ``[V, V, V, V]``."""
        p = distribution(self.logits, sampling)
        law = p[0, VOCAB, 0]
        rows = [p[1, VOCAB], p[2, :VOCAB], p[3, :VOCAB]]
        pair = law.unsqueeze(-1) * rows[0]
        three = pair.unsqueeze(-1) * rows[1]
        return three.unsqueeze(-1) * rows[2].unsqueeze(0)


def engine_on(
    table: Table, window: Window, images: int = IMAGES, coupling: Coupling = "maximal"
) -> Engine:
    """Build the real engine on a tiny model, with the passes' logits read off a table."""
    small = tiny_models(0, vocab=VOCAB, grid=2, prefix=2, dim=8)
    engine: Engine = engine_of(small, Strategy(drafts=window, coupling=coupling), SAMPLING, images)
    state, chain = engine.state, engine.source.chain

    def prefill(_: Any) -> tuple[None, Tensor]:
        return None, table.logits[0, VOCAB, 0].expand(images, -1)

    def verify(_: Any, tokens: Tensor, slots: Any) -> tuple[None, Tensor]:
        length = state.length
        place = (length.unsqueeze(1) + chain).clamp(max=TOKENS)
        before = state.tokens.gather(1, (length - 1).clamp(min=0).unsqueeze(1))[:, 0]
        before = torch.where(length > 0, before, VOCAB)
        previous = torch.cat((before.unsqueeze(1), tokens[:, : len(chain) - 1]), dim=1)
        following = (place + 1).clamp(max=TOKENS)
        table.last = table.logits[following, previous, tokens]
        return None, table.last

    engine.verifying.prefill = prefill  # type: ignore[method-assign,assignment]  # off a table
    engine.source.verify = verify  # type: ignore[method-assign,assignment]  # off a table
    return engine


def counted(engine: Engine, seed: int = 3) -> Tensor:
    """Decode and count whole images, ``[V ** N]``."""
    with torch.inference_mode():
        begin(engine, seed)
        return counts_of(engine.run().tokens, engine.geometry.vocab)


WINDOWS = {
    "sjd": Window(length=3, fresh="uniform"),
    "sjd, longer": Window(length=4, fresh="uniform"),
    "scd": Window(length=3),
    "scd, recalling nothing": Window(length=4, passes=0),
}


@pytest.mark.parametrize(
    ("name", "coupling"),
    [
        ("scd", "invariant"),
        ("sjd", "maximal"),
        ("sjd, longer", "maximal"),
        # Their tokens are plain decoding's, which test_invariance.py compares one by one.
        *(
            pytest.param(name, "invariant", marks=pytest.mark.long)
            for name in ("sjd", "sjd, longer", "scd, recalling nothing")
        ),
    ],
)
def test_images_follow_the_targets_joint_law(name: str, coupling: Coupling) -> None:
    table = Table()
    engine = engine_on(table, WINDOWS[name], coupling=coupling)
    assert misfit(counted(engine), table.joint(SAMPLING)) < SOUND
    taken = engine.state.histogram.sum(0)
    longest = min(engine.geometry.nodes, TOKENS - 1)
    assert (taken[:longest] > IMAGES / 100).all(), "steps of every length were among them"


def tail_kept(x: Tensor, p: Tensor, q: Tensor, *rest: Any, **more: Any) -> Coupled:
    out = couple(x, p, q, *rest, **more)
    behind = torch.arange(x.shape[1]) >= out.count.unsqueeze(1)
    tokens = torch.cat((torch.where(behind, x, out.tokens[:, :-1]), out.tokens[:, -1:]), 1)
    return Coupled(tokens, out.count)


def one_uniform(x: Tensor, p: Tensor, q: Tensor, *u: Tensor, **more: Any) -> Coupled:
    tests, draws = u
    return couple(x, p, q, tests, torch.cat((tests, draws[:, -1:]), 1), **more)


def q_beside(x: Tensor, p: Tensor, q: Tensor, *rest: Any, **more: Any) -> Coupled:
    return couple(x, p, q.roll(1, 1), *rest, **more)


def tail_of_another_row(x: Tensor, p: Tensor, q: Tensor, *rest: Any, **more: Any) -> Coupled:
    out = couple(x, p, q, *rest, **more)
    other = couple(x, torch.cat((p[:, :-1].roll(1, 1), p[:, -1:]), 1), q, *rest, **more)
    behind = torch.arange(p.shape[1]) >= out.count.unsqueeze(1)
    changed = behind & (out.tokens != torch.cat((x, out.tokens[:, -1:]), 1))
    return Coupled(torch.where(changed, other.tokens, out.tokens), out.count)


def not_renormalised(weights: Tensor, uniform: Tensor, sums: Tensor | None = None) -> Tensor:
    total = weights.cumsum(-1)
    return (total <= uniform.unsqueeze(-1)).sum(-1).clamp(max=weights.shape[-1] - 1)


def unfiltered(engine: Engine, table: Table) -> None:
    sound = engine.source.ring.write

    def write(q: Tensor, positions: Tensor, values: Tensor) -> None:
        if positions.shape[1] == engine.geometry.nodes and len(table.last):
            values = table.last.softmax(-1)[:, : engine.geometry.nodes]
        sound(q, positions, values)

    engine.source.ring.write = write  # type: ignore[method-assign]


def clamped_step(engine: Engine, table: Table) -> None:
    sound = engine.step

    def step(slots: int | None = None) -> None:
        sound(slots)
        engine.state.step.clamp_(max=1)

    engine.step = step  # type: ignore[method-assign]
    # The engine itself sees that its steps do not count; the law must show it too.
    engine._require_replayed = lambda *_, **__: None  # type: ignore[method-assign]


MUTANTS: dict[str, Callable[[Engine, Table, pytest.MonkeyPatch], None]] = {
    "the tail is kept without a test": lambda e, t, m: m.setattr(
        window_drafts, "couple", tail_kept
    ),
    "q is taken from before the filters": lambda e, t, m: unfiltered(e, t),
    "one uniform tests and resamples": lambda e, t, m: m.setattr(
        window_drafts, "couple", one_uniform
    ),
    "q is the row's next to it": lambda e, t, m: m.setattr(window_drafts, "couple", q_beside),
    "the residual is not renormalised": lambda e, t, m: m.setattr(
        e.ops, "sample", not_renormalised
    ),
    "the tail is resampled from another row": lambda e, t, m: m.setattr(
        window_drafts, "couple", tail_of_another_row
    ),
    "the step is clamped": lambda e, t, m: clamped_step(e, t),
}


#: The others stand in the long tier.
FEW_MUTANTS = (
    "the tail is kept without a test",
    "the residual is not renormalised",
    "the tail is resampled from another row",
)


@pytest.mark.parametrize(
    "name",
    [
        name if name in FEW_MUTANTS else pytest.param(name, marks=pytest.mark.long)
        for name in MUTANTS
    ],
)
def test_a_wrong_rule_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table()
    # What the filters take away is little, and shows in more images.
    images = 2 * IMAGES if name.startswith("q is taken") else IMAGES
    engine = engine_on(table, Window(length=4, fresh="uniform"), images)
    MUTANTS[name](engine, table, monkeypatch)
    assert misfit(counted(engine), table.joint(SAMPLING)) > 2 * SOUND


@pytest.mark.parametrize(
    ("name", "coupling"),
    [("sjd", "maximal"), ("scd", "invariant")],
)
def test_a_transformers_images_follow_its_joint_law(name: str, coupling: Coupling) -> None:
    """Masks, positions and cache slots of the real passes are in this one."""
    models = tiny_models(2, vocab=VOCAB, grid=2, prefix=2, dim=16, sharpness=1.0)
    target, sampling = models[0], Sampling(top_k=3, cfg_scale=2.0)
    strategy = Strategy(drafts=WINDOWS[name], coupling=coupling)
    engine = engine_of(models, strategy, sampling, 8_000)
    law = joint(target, sampling)
    assert float(law.sum()) == pytest.approx(1, abs=1e-5)
    assert misfit(counted(engine), law) < SOUND
