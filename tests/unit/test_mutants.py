"""Faults that no other test finds: each is planted in the source, and its law must find it.

A law takes the module that it is about, and holds of the module as it is. ``tests/mutants.py`` plants
faults of its own; dev/testing.md says what survived.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from lantern_accel.decoding.decoded import Decoded
from lantern_accel.decoding.rule import Rule
from lantern_accel.strategy.rules import Lantern
from lantern_accel.strategy.values import Strategy
from lantern_accel_profiles.quality.set_metrics import kernel_distance

Law = Callable[[Any], None]


@contextmanager
def planted(name: str, old: str, new: str) -> Iterator[ModuleType]:
    """Give a copy of a module whose source has ``new`` in the one place where it has ``old``."""
    sound = importlib.import_module(name)
    assert sound.__file__ is not None
    with open(sound.__file__, encoding="utf-8") as file:
        source = file.read()
    assert source.count(old) == 1, f"{name} has {old!r} {source.count(old)} times"
    copy = types.ModuleType(f"{name}_planted")
    copy.__package__, copy.__file__ = name.rpartition(".")[0], sound.__file__
    sys.modules[copy.__name__] = copy
    try:
        exec(compile(source.replace(old, new), sound.__file__, "exec"), copy.__dict__)
        yield copy
    finally:
        del sys.modules[copy.__name__]


# --- laws ----------------------------------------------------------------------------------------


def where_nothing_is_left_the_target_draws(module: Any) -> None:
    p = torch.tensor([[0.5, 0.25, 0.25, 0.0]])
    rule = Rule(Lantern(k=1, delta=0.1), "aggregate", torch.tensor([[1], [0], [3], [2]]))
    test = module.examine(rule, p, p, torch.tensor([2]), 0, None)
    assert torch.allclose(module.residual(rule, test), p)


def the_price_is_per_token(module: Any) -> None:
    done = Decoded(torch.zeros(2, 10).long(), torch.tensor([2, 5]), None, torch.tensor([1.0, 3.0]))  # type: ignore[arg-type]
    assert module.relaxed_mass(done).tolist() == pytest.approx([0.1, 0.3])


def the_floor_is_what_chance_gives(module: Any) -> None:
    rng = np.random.default_rng(1)
    plain, other = rng.normal(size=(8, 4)), rng.normal(size=(8, 4))
    sets = {("vanilla", 0): plain, ("vanilla", module.OTHER_SEED): other, ("far", 0): plain + 3}
    study = object.__new__(module.QualityStudy)
    study.images, study.seed = 8, 0
    study._load = lambda: None
    study._of = lambda network, strategy, seed: sets[strategy.name, seed]
    found = study._distance(Strategy(name="far"))
    assert found.floor == kernel_distance(other, plain)
    assert found.value == kernel_distance(plain + 3, plain)


# --- what is planted -----------------------------------------------------------------------------

DECODING = "lantern_accel.decoding."
MUTANTS: dict[str, tuple[Law, str, str, str]] = {
    "aggregate falls back to all codes alike": (
        where_nothing_is_left_the_target_draws,
        DECODING + "draft_test",
        "return normalise((target - q).clamp(min=0.0), p)",
        "return normalise((target - q).clamp(min=0.0), p * 0 + 1 / p.shape[-1])",
    ),
    "total variation divided by steps": (
        the_price_is_per_token,
        "lantern_accel_profiles.measure.price",
        "done.price / done.tokens.shape[1]",
        "done.price / done.steps",
    ),
    "the strategy's own distance as the floor": (
        the_floor_is_what_chance_gives,
        "lantern_accel_profiles.measure.price",
        "floor=kernel_distance(other, plain)",
        "floor=kernel_distance(relaxed, plain)",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_breaks_its_law(name: str) -> None:
    law, module, old, new = MUTANTS[name]
    law(importlib.import_module(module))
    with planted(module, old, new) as wrong, pytest.raises(AssertionError):
        law(wrong)
