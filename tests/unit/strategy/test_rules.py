"""An acceptance rule is one class: defining it is enough for texts, JSON and engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import pytest
import torch
from support.engines import NAMED, SAMPLED, engine_of, finish
from support.tiny import tiny_models
from torch import Tensor

from lantern_accel.errors import StrategyError
from lantern_accel.strategy.rules import RULES, AcceptanceRule, Tried
from lantern_accel.strategy.values import Strategy


@pytest.fixture
def generous() -> Iterator[type[AcceptanceRule]]:
    class Generous(AcceptanceRule):
        """Count a draft for ``factor`` times its probability; no neighbour lends anything."""

        kind: Literal["generous"] = "generous"
        factor: float = 3.0
        runtime_params: ClassVar[tuple[str, ...]] = ("factor",)

        def count_neighbours(self, tried: Tried, runtime_params: Tensor) -> tuple[Tensor, Tensor]:
            extra = (runtime_params[0] - 1) * tried.px
            return torch.zeros_like(tried.px, dtype=torch.int32), extra

    yield Generous
    del RULES["generous"]


def test_a_new_rule_is_one_class(generous: type[AcceptanceRule]) -> None:
    rule = AcceptanceRule.read("generous:factor=5")
    assert isinstance(rule, generous) and rule.runtime_values() == [5.0]
    strategy = NAMED["eagle"].override(acceptance="generous:factor=5")
    assert strategy.acceptance == rule and strategy.neighbours == 0
    assert Strategy.model_validate_json(strategy.model_dump_json()) == strategy
    assert strategy.override(factor=2.0).acceptance.runtime_values() == [2.0]
    models = tiny_models(0)
    strict = finish(engine_of(models, NAMED["eagle"], SAMPLED, batch=4))
    loose = finish(engine_of(models, strategy, SAMPLED, batch=4))
    assert loose.step_compression > strict.step_compression
    assert (loose.quality_loss > 0).all() and not strict.quality_loss.any()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lantren", "no acceptance rule is named 'lantren'.*lantern"),
        ("lantern:lambda=2", "'lantern' has no field 'lambda'; it has k=..., delta=..."),
        ("lantern++:lambda=0.5", r"lantern\+\+: lambda .*1 or more"),
        ("lantern:k", "has no field 'k'"),
        ("exact:delta=1", "has no field 'delta'"),
    ],
)
def test_texts_that_are_no_rule_say_why(text: str, says: str) -> None:
    with pytest.raises(StrategyError, match=says):
        AcceptanceRule.read(text)


def test_texts_take_the_field_names_of_the_command_line() -> None:
    assert AcceptanceRule.read("lantern++:k=7,lambda=2.5").model_dump() == {
        "kind": "lantern++",
        "k": 7,
        "lam": 2.5,
    }
