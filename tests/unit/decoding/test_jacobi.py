"""Windows through the engine: exact when greedy, static, and without a drafter's cache."""

from __future__ import annotations

import torch
from support.engines import SAMPLED, engine_of
from support.tiny import tiny_models

from lantern_accel.strategy.trees import parse_drafts
from lantern_accel.strategy.values import (
    WINDOW_STRATEGIES,
    DynamicTree,
    StaticTree,
    Strategy,
    Window,
    named_strategy,
)

STATIC = StaticTree(paths=((0,),))


def named(name: str, length: int = 6) -> Strategy:
    found = named_strategy(name, static=STATIC, dynamic=DynamicTree(top_k=1, depth=0, total=2))
    return found.override(window=length)


def test_windows_need_no_drafter_and_hold_no_cache_of_one() -> None:
    for name in WINDOW_STRATEGIES:
        assert not named(name).needs_drafter
        running = engine_of(tiny_models(0), named(name), SAMPLED, batch=4)
        assert not running.geometry.drafted
        g = running.geometry
        assert g.target_slots == g.prefix + g.tokens + 1, "no slot for a draft"
        held = running.verifying.cache.layout.nbytes + running.state.nbytes
        assert (
            running.nbytes == held + running.session.runtime_params.nbytes + running.finite.nbytes
        )


# --- as text, and where it cannot be -------------------------------------------------------------


def test_windows_as_text() -> None:
    found = parse_drafts("window:24,uniform,passes=2")
    assert found == Window(length=24, fresh="uniform", passes=2)
    assert found.size == (24, 23)
    sjd = named("sjd", 16)
    assert sjd.override(drafts=parse_drafts("window:32")).drafts == Window(
        length=32, fresh="uniform"
    )
    assert Strategy.model_validate_json(sjd.model_dump_json()) == sjd


def test_rows_of_positions_past_the_image_overwrite_none() -> None:
    engine = engine_of(tiny_models(0), named("sjd").override(coupling="maximal"), SAMPLED, 2)
    ring, q, g = engine.source.ring, engine.state.q, engine.geometry
    places = torch.arange(g.tokens - g.kept, g.tokens + 3).expand(2, -1)  # a whole ring, and more
    rows = torch.rand(*places.shape, g.vocab)
    ring.write(q, places, rows)
    assert torch.equal(ring.read(q, places[:, : g.kept]), rows[:, : g.kept])
