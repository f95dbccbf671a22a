"""Laws whose faults no other test finds; dev/testing.md says which faults, and what survived.

``tests/mutants.py`` plants faults of its own.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lantern_accel.decoding import draft_test
from lantern_accel.decoding.decoded import Decoded
from lantern_accel.decoding.rule import Rule
from lantern_accel.strategy.rules import Lantern
from lantern_accel.strategy.values import Strategy
from lantern_accel_profiles.measure import quality_loss
from lantern_accel_profiles.quality.set_metrics import kernel_distance


def test_where_nothing_is_left_the_target_draws() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25, 0.0]])
    rule = Rule(Lantern(k=1, delta=0.1), "aggregate", torch.tensor([[1], [0], [3], [2]]))
    test = draft_test.examine(rule, p, p, torch.tensor([2]), 0, None)
    assert torch.allclose(draft_test.residual(rule, test), p)


def test_the_price_is_per_token() -> None:
    done = Decoded(torch.zeros(2, 10).long(), torch.tensor([2, 5]), None, torch.tensor([1.0, 3.0]))  # type: ignore[arg-type]
    assert quality_loss.relaxed_mass(done).tolist() == pytest.approx([0.1, 0.3])


def test_the_floor_is_what_chance_gives() -> None:
    rng = np.random.default_rng(1)
    plain, other = rng.normal(size=(8, 4)), rng.normal(size=(8, 4))
    sets = {
        ("vanilla", 0): plain,
        ("vanilla", quality_loss.OTHER_SEED): other,
        ("far", 0): plain + 3,
    }
    study = object.__new__(quality_loss.QualityStudy)
    study.images, study.seed = 8, 0
    study._load = lambda: None
    study._see = lambda network, strategy, seed: sets[strategy.name, seed]
    found = study._distance(Strategy(name="far"))
    assert found.floor == kernel_distance(other, plain)
    assert found.value == kernel_distance(plain + 3, plain)
