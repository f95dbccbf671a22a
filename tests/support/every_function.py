"""Every function that auto captures: captured, replayed in a fixed order, its tokens read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from lantern_accel.device.backend import Backend
from lantern_accel.testing import tiny
from lantern_accel_hpu.functions import engine_of, functions_of
from support.engines import Late

__all__ = ["captured", "engine_of", "run_of", "tokens_of"]


def captured(backend: Backend, engine: Any) -> dict[str, Any]:
    """Capture every function of an engine as a pipeline does."""
    tiny.load(engine, 0)
    made = {name: backend.capture(f, name) for name, f in functions_of(engine).items()}
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
