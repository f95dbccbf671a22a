"""Every function that auto captures: captured, replayed in a fixed order, its tokens read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from lantern_accel.device.backend import Backend
from lantern_accel.nn.rounding import ROUNDINGS
from lantern_accel.nn.transformer import rounded_copy
from lantern_accel.strategy.values import AUTO, AUTO_LENGTHS, ChainTree, Sampling, Strategy, Window
from lantern_accel.testing import tiny
from support import engines
from support.engines import Late

#: What auto moves between, the trees that a request may ask for by name, drafts by a quantized copy,
#: and plain decoding of a quantized target.
KINDS = ("windows", "chains", "vanilla", "lantern++", "eagle2", "self", "int8", "int6")


def engine_of(backend: Backend, kind: str, batch: int, guided: bool) -> Any:
    """Make an engine of :data:`KINDS` on a tiny model; its attribute ``model`` is that."""
    model = tiny.tiny_model(backend, backend.device, torch.float32)
    vocab = model.manifest.target.vocab_size
    plain = kind in ("windows", "chains", *ROUNDINGS)
    strategy = tiny.tiny_strategy("vanilla" if plain else kind, vocab)
    if kind == "windows":
        strategy = Strategy(name=AUTO, drafts=Window.over(AUTO_LENGTHS))
    if kind == "chains":
        drafts = ChainTree.over((1, 2, 3, 4))
        strategy = strategy.model_copy(update={"drafts": drafts, "name": kind})
    target, drafter = model.family.target_for_shape(model, model.family.usual_shape(model))
    if kind in ROUNDINGS:
        target = rounded_copy(target, backend, ROUNDINGS[kind])
    sampling = Sampling(cfg_scale=2.5 if guided else 1.0, top_k=min(32, vocab))
    given = {"ops": backend, "neighbours": model.neighbours}
    made = engines.engine_of((target, drafter), strategy, sampling, batch, **given)
    vars(made)["model"] = model
    return made


def captured(backend: Backend, engine: Any) -> dict[str, Any]:
    """Capture every function of an engine as a pipeline does."""
    tiny.load(engine, 0)
    made = {name: backend.capture(f, name) for name, f in engine.host_functions().items()}
    if len(engine.lengths) > 1:
        engine.functions.update(made)
    return made


def turns_of(engine: Any) -> Iterator[int]:
    """Yield lengths for an image's steps: all in turns; plain decoding last where nothing leaves it."""
    lengths = engine.lengths
    if engine.source.returns:
        yield from itertools.cycle([*reversed(lengths), *lengths[1:-1]])
    drafting = [one for one in lengths if one > 1]
    yield from (drafting[-1 - n % len(drafting)] for n in range(3 * len(drafting)))
    yield from itertools.repeat(1)


def tokens_of(engine: Any, made: dict[str, Any] | None, seed: int) -> list[list[int]]:
    """Draw until every image is complete, a :class:`Engine` engine by :func:`turns_of`."""
    tiny.start(engine, seed, (made or {}).get("prefill"))
    engine.ops.synchronize()
    moving = len(engine.lengths) > 1
    turns = turns_of(engine) if moving else itertools.repeat(0)
    if moving:
        engine.now = max(engine.lengths)  # what prefill has prepared
    for length in itertools.islice(turns, engine.geometry.tokens):
        if moving:
            engine.move(length)
        (engine.step if moving or made is None else made["step"])()
    engine.ops.synchronize()
    state, n = engine.state, engine.geometry.tokens
    assert int(state.length.min()) >= n - 1
    found: list[list[int]] = state.tokens[:, :n].cpu().tolist()
    return found


def run_of(engine: Any, made: dict[str, Any] | None, seed: int) -> tuple[Any, list[int]]:
    """Draw as a request does, the host reading lengths a step late; return tokens and progress."""
    if made is None:
        engine.session.progress = Late(engine.finite.report, 1)
    tiny.start(engine, seed, (made or {}).get("prefill"))
    seen: list[int] = []
    done = engine.run((made or {}).get("step"), on_progress=seen.append)
    return done.tokens.tolist(), seen
