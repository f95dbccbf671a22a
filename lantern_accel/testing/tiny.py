"""Tiny seeded models, one per family: checked in seconds, random enough to show mistakes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from lantern_accel.decoding.engine import Engine
from lantern_accel.device.backend import Backend, record_replay
from lantern_accel.device.capture import Replay
from lantern_accel.device.kv_cache import KVCache
from lantern_accel.device.operations import TensorOps
from lantern_accel.errors import ModelError
from lantern_accel.families.base import Conditions
from lantern_accel.families.random_weights import RandomModel, fill_random
from lantern_accel.families.registry import families, family, family_names
from lantern_accel.nn.neighbours import neighbour_table
from lantern_accel.nn.rounding import rounding
from lantern_accel.nn.transformer import rounded_copy
from lantern_accel.strategy.trees import parse_drafts
from lantern_accel.strategy.values import (
    SELF,
    STRATEGIES,
    WINDOW_STRATEGIES,
    Coupling,
    DynamicTree,
    Sampling,
    SelfDrafts,
    StaticTree,
    Strategy,
    Window,
    named_strategy,
)

TinyModel = RandomModel
#: Neighbours in a tiny model's table, and how many of them relaxed acceptance reads.
TABLE, K = 12, 8
#: A window whose drafts a draft head guesses; checked where a family's tiny model has one.
BY_HEAD = "a draft head"
#: Every strategy, and windows by a draft head.
CHECKED = (*STRATEGIES, BY_HEAD)
#: Strategies that need no drafter.
WITHOUT = ("vanilla", *WINDOW_STRATEGIES, SELF, BY_HEAD)
#: What every family but the first is checked with: no drafts, a tree of its own making, a relaxed rule,
#: a window, and a quantized copy of its own weights.
FEWER = ("vanilla", "eagle2", "lantern++", "scd", SELF)
#: One strategy for each form of a step, for checks whose time is a compiler's; and what each family but
#: the first has one of there.
FORMS = (*FEWER, BY_HEAD)
COMPILED = ("lantern++", "scd")


#: An engine on a tiny model, which its attribute ``model`` is.
TinyEngine = Engine


def tiny_model(
    ops: TensorOps, device: torch.device, dtype: torch.dtype, name: str = ""
) -> TinyModel:
    """Build the tiny model of a family, the same on every device; ``name`` "": of the first one."""
    manifest = family(name or family_names()[0]).tiny()
    generator = torch.Generator().manual_seed(11)

    def random_tensor(path: str, shape: torch.Size) -> Tensor:
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.2
        drawn = torch.randn(shape, generator=generator) * scale
        drawn = drawn + (1.0 if "norm" in path and not path.endswith("bias") else 0.0)
        return drawn.to(device=device, dtype=dtype)

    model = fill_random(manifest, ops, device, random_tensor)
    vocab = manifest.target.vocab_size
    table = neighbour_table(torch.randn(vocab, 4, generator=generator), min(TABLE, vocab - 2))
    model.neighbours = table.to(device)
    return model


def normal(seed: int, *shape: int) -> Tensor:
    """Return float32 normal numbers on the host, the same for a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fill_cache(backend: Backend, k: Tensor, v: Tensor) -> KVCache:
    """Return a cache with ``k, v [layers, R, L, H, d]`` of the host, written layer by layer."""
    layers, rows, slots, heads, width = k.shape
    cache = backend.allocate(backend.kv_layout(layers, rows, slots, heads, width, k.dtype))
    write_all(backend, cache, k, v)
    return cache


def write_all(backend: Backend, cache: KVCache, k: Tensor, v: Tensor) -> None:
    """Write every slot of a cache, as :func:`fill_cache` does."""
    slots = torch.arange(k.shape[2], device=backend.device).expand(k.shape[1], -1)
    address = backend.address(cache, slots)
    for layer, (one, other) in enumerate(zip(k, v, strict=True)):
        backend.write(cache, layer, address, one.to(backend.device), other.to(backend.device))


def cases(
    strategies: tuple[str, ...], others: tuple[str, ...] = FEWER, *, turn: int | None = None
) -> list[tuple[str, str]]:
    """Return the families and strategies to check: all with the first family, ``others`` with the rest.

    With a ``turn`` each of the rest is checked with one of ``others``, the next family with the next one.
    A tiny model without a drafter or a draft head is checked with what needs none. Raises
    :class:`ModelError` where no family is installed: checks that run nothing would all pass.
    """
    out: list[tuple[str, str]] = []
    kinds = list(families())
    if not kinds:
        raise ModelError("no family of models is installed; reinstall lantern-accel")
    for number, kind in enumerate(kinds):
        manifest = kind.tiny()
        drafts = manifest.drafter is not None
        guesses = manifest.draft_head is not None
        fits = [
            one
            for one in strategies
            if (guesses if one == BY_HEAD else drafts or one in WITHOUT)
            and (number == 0 or one in (*others, BY_HEAD))
        ]
        if number and fits and turn is not None:
            fits = [fits[(turn + number) % len(fits)]]
        out += [(kind.name, one) for one in fits]
    return out


def tiny_strategy(name: str, vocab: int = 48, tokens: int = 36) -> Strategy:
    """Return a strategy by name over trees that suit a tiny model of ``vocab`` codes.

    Images have ``tokens`` tokens; a window is at most half as long. ``name`` may be :data:`BY_HEAD`.
    """
    if name == BY_HEAD:
        return tiny_strategy("scd", vocab, tokens).override(
            drafts=parse_drafts("window:4,head,passes=0")
        )
    static = parse_drafts("0,1,2,00,01,10,000")
    assert isinstance(static, StaticTree)
    chosen = named_strategy(name, static=static, dynamic=DynamicTree(top_k=3, depth=2, total=9))
    if isinstance(chosen.drafts, Window):
        chosen = chosen.override(window=max(min(chosen.drafts.length, tokens // 2), 4))
    return chosen.override(k=min(K, vocab - 3) if "lantern" in name else None)


def tiny_engine(
    ops: TensorOps,
    strategy: str,
    *,
    batch: int = 1,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float32,
    family: str = "",
    model: TinyModel | None = None,
    coupling: Coupling | None = None,
) -> TinyEngine:
    """Build an engine on a family's tiny model, guided where it is, top-k 32; ``family`` "": the first.

    ``model``: one that was made before, in place of a new one. ``coupling``: None, the strategy's.
    """
    model = model or tiny_model(ops, ops.device, dtype, family)
    vocab = model.manifest.target.vocab_size
    scale = 2.5 if model.manifest.defaults.sampling.guided else 1.0
    sampling = Sampling(temperature=temperature, cfg_scale=scale, top_k=min(32, vocab))
    shape = model.family.usual_shape(model)
    target, drafter = model.family.target_for_shape(model, shape)
    chosen = tiny_strategy(strategy, vocab, model.manifest.target.num_tokens)
    copy = None
    if isinstance(chosen.drafts, SelfDrafts):
        fewer = rounded_copy(model.target, ops, rounding(chosen.drafts.weights), drafts=True)
        copy, _ = model.family.target_for_shape(replace(model, target=fewer), shape)
    engine = Engine(
        target,
        drafter,
        ops,
        chosen.override(coupling=coupling),
        sampling,
        batch=batch,
        neighbours=model.neighbours,
        copy=copy,
    )
    vars(engine)["model"] = model
    return engine


def start(engine: TinyEngine, seed: int, prefill: Callable[[], None] | None = None) -> None:
    """Load a request (see :func:`load`) and prefill; ``prefill`` replays a captured one."""
    load(engine, seed)
    (prefill or engine.prefill)()


@contextmanager
def capture_engine(
    backend: Backend, engine: TinyEngine, seed: int = 9
) -> Iterator[tuple[Replay, Replay]]:
    """Capture prefill and step of an engine with a request loaded; released after the block."""
    start(engine, seed)
    prefill = record_replay(backend, engine.prefill, "prefill")
    step = record_replay(backend, engine.step, "step")
    try:
        yield prefill, step
    finally:
        prefill.release()
        step.release()


def load(engine: TinyEngine, seed: int, *, alike: bool = False) -> None:
    """Load random prompts, fixed by ``seed``; ``alike``: one prompt for all images."""
    model: TinyModel = vars(engine)["model"]
    batch = engine.geometry.batch
    made = model.family.tiny_conditions(model, 1 if alike else batch, seed)
    if alike:
        made = made.pick([0] * batch)
    weight = engine.verifying.target.weight
    given = made.condition.to(weight.device)
    if given.is_floating_point():
        given = given.to(weight.dtype)
    rows = model.family.rows(
        model, Conditions(given, made.mask.to(weight.device), made.shape), engine.sampling
    )
    engine.session.load(rows.condition, rows.mask, engine.randomness(seed, list(range(batch))))


def decode_tokens(
    engine: TinyEngine,
    seed: int,
    prefill: Callable[[], None] | None = None,
    step: Callable[[], None] | None = None,
) -> Tensor:
    """Return the tokens of the request of ``seed``; ``prefill`` and ``step`` replay captured ones."""
    start(engine, seed, prefill)
    return engine.run(step).tokens
