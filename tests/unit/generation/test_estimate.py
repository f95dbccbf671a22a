"""The speed that auto predicts of sources that were timed, and the windows that it times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lantern_accel.device.preferences import Preferences
from lantern_accel.generation import measurements as automatic
from lantern_accel.generation.decision import Estimate
from lantern_accel.generation.row_costs import RowCosts
from lantern_accel.strategy.lengths import tokens_of
from lantern_accel.strategy.sources import DraftLength
from lantern_accel.strategy.values import Sampling, Strategy, Window

LENGTHS = (DraftLength(length=1, tokens_per_step=1.0), DraftLength(length=4, tokens_per_step=2.4))


def timed(times: dict[int, float], lengths: tuple[DraftLength, ...] = LENGTHS) -> Estimate:
    """Return windows whose steps took these milliseconds by length."""
    window = Window(length=lengths[-1].length, draft_lengths=lengths)
    return Estimate(strategy=Strategy(drafts=window), times=times).with_costs(times[1])


def costs(one: Estimate) -> list[float | None]:
    return [length.cost for length in one.strategy.lengths]


def test_sources_are_compared_by_the_least_plain_step() -> None:
    beside_slow_steps = timed({1: 5.0, 4: 6.0})  # it looks twice as fast as plain decoding
    beside_fast_ones = timed({1: 4.0, 4: 5.6})
    assert beside_slow_steps.predict_speedup(1) > beside_fast_ones.predict_speedup(1)
    one = beside_slow_steps.with_costs(4.0)
    assert one.predict_speedup(1) < beside_fast_ones.predict_speedup(1)
    assert costs(one) == [1.0, 1.5]
    assert one.with_costs(4.0) == one, "once"
    assert Estimate.model_validate_json(one.model_dump_json()) == one
    assert one.predict_speedup(1) == pytest.approx(2.4 / 1.5)
    assert one.predict_speedup(8) < one.predict_speedup(2) < one.predict_speedup(1), (
        "the slowest image ends a batch"
    )


def test_no_length_costs_more_than_a_longer_one_or_less_than_a_plain_step() -> None:
    lengths = (*LENGTHS, DraftLength(length=16, tokens_per_step=3.0))
    assert costs(timed({1: 4.0, 4: 5.0, 16: 4.0}, lengths)) == [1.0, 1.0, 1.0]
    assert costs(timed({1: 4.0, 4: 3.0, 16: 8.0}, lengths)) == [1.0, 1.0, 2.0]


def test_a_length_that_looked_hopeless_has_no_cost() -> None:
    lengths = tuple(DraftLength(length=n, tokens_per_step=1 + n / 4) for n in (1, 2, 4))
    one = timed({1: 4.0, 2: 4.8}, lengths)
    assert costs(one) == [1.0, pytest.approx(1.2), None]
    assert one.predict_speedup(1) == pytest.approx(1.5 / 1.2)


class Device:
    """A device whose times count."""

    simulated, preferences = False, Preferences()


def lengths_of(costs: dict[int, float], rate: float, fits: bool = True) -> list[int]:
    """Return the lengths of windows where steps cost so much by length, and are kept at a rate."""
    target = SimpleNamespace(num_tokens=256, draft_head=None)
    model = SimpleNamespace(manifest=SimpleNamespace(target=target), weights_hash="", target=target)
    capacity = SimpleNamespace(fits=lambda *given: fits)
    engines: Any = SimpleNamespace(
        model=model, backend=Device(), dtype=torch.float32, capacity=capacity
    )
    brings = {n: tokens_of(rate, n) for n in costs}
    known = SimpleNamespace(tokens_per_step=brings)
    rows = RowCosts.of_times({2 * n: ms for n, ms in costs.items()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(automatic, "known_tokens_per_step", lambda *given: known)
        made = automatic.Measurements(engines).windows(Strategy(), 1, Sampling(cfg_scale=3.0), rows)
    assert made.drafts.size[0] == made.lengths[-1].length
    assert all((one.tokens_per_step or 0) >= 1 for one in made.lengths)
    return [one.length for one in made.lengths]


def test_windows_grow_where_their_steps_are_cheap_and_drafts_are_kept() -> None:
    cheap = {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.02, 16: 1.1}
    assert lengths_of(cheap, rate=0.95) == [1, 2, 4, 8, 16, 32, 64]
    middling = {1: 1.0, 2: 1.0, 4: 1.05, 8: 1.2, 16: 1.6}
    assert lengths_of(middling, rate=0.95)[-1] > 16
    assert lengths_of(middling, rate=0.3) == [*middling], "what is known decides"
    assert lengths_of(cheap, rate=0.95, fits=False) == [*cheap]
    dear = {1: 1.0, 2: 1.06, 4: 1.24, 8: 1.85, 16: 3.3}
    for rate in (0.3, 0.7):
        assert lengths_of(dear, rate) == [*dear]
