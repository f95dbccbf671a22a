"""What auto chooses among sources that were timed: made-up figures, and those that races recorded."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lantern_accel.device.preferences import Preferences
from lantern_accel.generation.auto import Auto
from lantern_accel.generation.estimate import REQUESTS, Comparison, Estimate
from lantern_accel.strategy.lengths import tokens_of
from lantern_accel.strategy.sources import DraftLength
from lantern_accel.strategy.values import Sampling, Strategy, Window

RACES = Path(__file__).parents[3] / "profiles/auto"


def timed(cost: float, brings: float, plain: float) -> Estimate:
    """Return a window of four that takes ``cost`` plain steps of ``plain`` ms."""
    lengths = (DraftLength(length=1), DraftLength(length=4))
    one = Estimate(
        strategy=Strategy(drafts=Window(length=4, draft_lengths=lengths)),
        known={1: 1.0, 4: brings},
        times={1: plain, 4: cost * plain},
    )
    return one.weighed(plain)


def test_sources_are_compared_by_the_least_plain_step() -> None:
    beside_slow_steps = timed(1.2, 2.4, 5.0)  # 6 ms: it looks twice as fast as plain decoding
    beside_fast_ones = timed(1.4, 2.4, 4.0)  # 5.6 ms
    assert beside_slow_steps.promise(1) > beside_fast_ones.promise(1)
    one = beside_slow_steps.weighed(4.0)
    assert one.promise(1) < beside_fast_ones.promise(1)
    assert [length.cost for length in one.strategy.lengths] == [1.0, 1.5]
    assert one.weighed(4.0) == one, "once"
    both = Comparison(sources=(beside_slow_steps, beside_fast_ones)).weighed()
    assert both.sources == (one, beside_fast_ones) and both.best(1) == beside_fast_ones


def test_a_source_that_was_timed_in_a_busy_minute_gets_another_chance() -> None:
    windows, copy = timed(2.4, 3.6, 4.0), timed(2.4, 3.8, 4.0)
    found = Comparison(sources=(windows, copy))
    assert found.best(1) is copy and found.open
    assert found.near(windows, 1), "it promises less, and may yet be better"
    again = windows.with_times({1: [4.1, 4.4], 4: [9.7, 7.2, 8.0]})
    later = Comparison(sources=(again, copy.with_times({1: [4.3], 4: [9.9]}))).weighed()
    assert later.best(1).times == {1: 4.0, 4: 7.2}
    assert later.best(1).promise(1) == pytest.approx(3.6 * 4.0 / 7.2, rel=1e-3)
    assert later.sources[1].promise(1) == copy.promise(1), "noise makes no time shorter"


def test_a_length_that_looked_hopeless_may_be_timed_later() -> None:
    lengths = tuple(DraftLength(length=n) for n in (1, 2, 4))
    one = Estimate(
        strategy=Strategy(drafts=Window(length=4, draft_lengths=lengths)),
        known={1: 1.0, 2: 1.6, 4: 2.4},
        times={1: 4.0, 2: 4.8},
    )
    assert [p.cost for p in one.weighed(4.0).strategy.lengths] == [1.0, pytest.approx(1.2), None]
    again = one.with_times({1: [4.0], 2: [5.0], 4: [4.9]}).weighed(4.0)
    costs = {p.length: p.cost for p in again.strategy.lengths}
    assert costs == pytest.approx({1: 1.0, 2: 1.2, 4: 1.225})
    assert again.promise(1) == pytest.approx(2.4 / 1.225, rel=1e-3)


def test_who_is_timed_again() -> None:
    good, near, far = timed(1.0, 2.0, 4.0), timed(1.0, 1.5, 4.0), timed(1.0, 1.2, 4.0)
    found = Comparison(sources=(far, near, good))
    assert [found.near(one, 1) for one in found.sources] == [False, True, True]
    hopeless = Comparison(sources=(timed(2.0, 1.2, 4.0),))
    assert hopeless.near(hopeless.sources[0], 1), "plain steps are lengths too"


def test_what_was_known_counts_for_some_steps() -> None:
    one = timed(1.2, 2.0, 4.0).with_counts({4: [330, 300]})
    worth = {}
    for weight in (0.001, 300, 1e9):
        made = one.model_copy(update={"weight": weight}).weighed(4.0)
        worth[weight] = made.strategy.lengths[1].tokens_per_step
    assert worth[0.001] == pytest.approx(1.1, abs=1e-3)
    assert worth[300] == pytest.approx(1.55, abs=1e-3)
    assert worth[1e9] == pytest.approx(2.0, abs=1e-3)


def test_counts_go_to_the_source_that_drafted() -> None:
    windows = timed(1.2, 2.0, 4.0)
    found = Comparison(sources=(windows,)).counted(windows.strategy, {4: [8, 4], 1: [2, 2]})
    assert found.sources[0].counts == {4: (8, 4), 1: (2, 2)}
    assert found.counted(Strategy(), {1: [5, 5]}) == found, "plain decoding drafts nothing"


def test_choices_become_final() -> None:
    found = Comparison(sources=(timed(1.2, 2.4, 4.0),))
    assert found.open and not found.model_copy(update={"requests": REQUESTS}).open
    assert Comparison.model_validate_json(found.model_dump_json()) == found


def recorded() -> list[Any]:
    """Return what races compared: a name, the batch, the drafts that they ended with, and the figures."""
    found = []
    for path in sorted(RACES.glob("*.json")):
        for batch, race in json.loads(path.read_text())["batches"].items():
            if race.get("compared"):
                kind = (race["auto"].get("tree") or race["auto"].get("drafts"))["kind"]
                found.append(
                    pytest.param(int(batch), kind, race["compared"]["timed"], id=f"{path.stem}")
                )
    return found


@pytest.mark.parametrize(("batch", "kind", "timings"), recorded())
def test_races_would_end_with_the_same_drafts(batch: int, kind: str, timings: list[Any]) -> None:
    """Of each source by its own times and counts; a drafter's trees and chains are no candidates."""
    sources = []
    for one in timings:
        tree = one["strategy"].get("tree") or one["strategy"]["drafts"]
        if tree["kind"] not in ("window", "self"):
            continue
        lengths = [{"length": p["length"]} for p in tree["draft_lengths"]]
        drafts = {k: tree[k] for k in ("kind", "length", "weights", "window") if k in tree}
        strategy = Strategy.model_validate({"drafts": {**drafts, "draft_lengths": lengths}})
        known = {int(n): value for n, value in one["prior"].items()}
        values = {"known": known, "times": one["times"], "counts": one["counts"]}
        sources.append(Estimate.model_validate({"strategy": strategy, **values}))
    found = Comparison(sources=tuple(sources)).weighed()
    assert found.best(batch).strategy.drafts.kind == kind


class Device:
    """A device whose steps are captured in no time."""

    preferences = Preferences(capture_patience=math.inf)
    simulated = False


def lengthened(times: dict[int, float], rate: float, fits: bool = True) -> list[int]:
    """Return the lengths of windows that took so long by length and were kept at a rate, lengthened."""
    model = SimpleNamespace(manifest=SimpleNamespace(target=SimpleNamespace(num_tokens=256)))
    engines: Any = SimpleNamespace(
        model=model,
        backend=Device(),
        dtype=torch.float32,
        capacity=SimpleNamespace(fits=lambda *given: fits),
    )
    brings = {n: tokens_of(rate, n) for n in times}
    lengths = tuple(
        DraftLength(length=n, cost=ms, tokens_per_step=brings[n]) for n, ms in times.items()
    )
    strategy = Strategy(drafts=Window(length=max(times), draft_lengths=lengths))
    one = Estimate(strategy=strategy, times=times, known=brings)
    made = Auto(engines).lengthened(one, 1, Sampling(cfg_scale=3.0))
    timed = tuple(p for p in made.strategy.lengths if p.cost is not None)
    assert made.times == times and timed == lengths, "the rest is not timed yet"
    assert {p.length for p in made.strategy.lengths} <= set(made.known)
    return [p.length for p in made.strategy.lengths]


def test_windows_grow_where_their_steps_are_cheap_and_drafts_are_kept() -> None:
    cheap = {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.02, 16: 1.1}
    assert lengthened(cheap, rate=0.95) == [1, 2, 4, 8, 16, 32, 64]
    middling = {1: 1.0, 2: 1.0, 4: 1.05, 8: 1.2, 16: 1.6}
    assert lengthened(middling, rate=0.95)[-1] > 16
    assert lengthened(middling, rate=0.3) == [*middling], "what was counted decides"
    assert lengthened(cheap, rate=0.95, fits=False) == [*cheap]
    dear = {1: 1.0, 2: 1.06, 4: 1.24, 8: 1.85, 16: 3.3}
    for rate in (0.3, 0.7):
        assert lengthened(dear, rate) == [*dear]


def test_windows_keep_their_lengths_where_a_new_one_is_compiled_for_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Device, "preferences", Preferences(capture_patience=30.0))
    assert lengthened({1: 1.0, 16: 1.0}, rate=0.95) == [1, 16]
