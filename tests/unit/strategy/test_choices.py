"""Payoffs that ship: found by weights and the nearest temperature, and never over what was measured."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tools import tool_module

from lantern_accel.device.backend import DeviceFacts
from lantern_accel.files import write_record
from lantern_accel.strategy import choices
from lantern_accel.strategy.sources import DraftLength
from lantern_accel.strategy.values import Strategy, with_tokens_per_step
from lantern_accel_profiles.tuning.auto import AutoEvidence

ROOT = Path(__file__).parents[3]


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(choices, "profiles_dir", lambda: tmp_path)
    (tmp_path / "choices").mkdir()
    for temperature in (0.0, 0.7, 1.0):
        worth = choices.Payoff(
            model="m",
            weights_hash="abc",
            temperature=temperature,
            prompts="p",
            tokens_per_step={1: 1.0, 8: 2.0 + temperature},
        )
        path = tmp_path / "choices" / f"{temperature}.json"
        write_record(path, worth.model_dump(mode="json"))
    (tmp_path / "choices" / "damaged.json").write_text("{")
    return tmp_path


@pytest.mark.parametrize(("asked", "found"), [(1.0, 3.0), (1.3, 3.0), (0.6, 2.7), (0.0, 2.0)])
def test_the_nearest_temperature_serves(shipped: Path, asked: float, found: float) -> None:
    worth = choices.known_tokens_per_step("abc", asked)
    assert worth is not None and worth.tokens_per_step[8] == found


def test_other_weights_have_none(shipped: Path) -> None:
    assert choices.known_tokens_per_step("other", 1.0) is None


def test_what_was_measured_stays() -> None:
    given = [
        DraftLength(length=n, tokens_per_step=known)
        for n, known in ((1, None), (8, 2.5), (16, None))
    ]
    found = with_tokens_per_step(given, {8: 9.0, 16: 3.0})
    assert [one.tokens_per_step for one in found] == [None, 2.5, 3.0]


@settings(max_examples=30, deadline=None)
@given(readings=st.lists(st.text(max_size=40), max_size=4), note=st.text(max_size=10))
def test_a_key_holds_what_is_set_and_nothing_that_is_read(readings: list[str], note: str) -> None:
    """A card's temperature, power limit and neighbours change from minute to minute; a choice stays."""
    facts = DeviceFacts(backend="b", device="b:0", name="card", torch="2", notes=("mode: graph",))

    def key(facts: DeviceFacts) -> dict[str, Any]:
        backend = SimpleNamespace(
            name="b", version="1", facts=lambda: facts, support=lambda what: True
        )
        model = SimpleNamespace(manifest=SimpleNamespace(name="m"), weights_hash="h")
        strategy = Strategy(name="vanilla")
        return choices.key_of("auto", model, backend, torch.float32, strategy, batch=1)  # type: ignore[arg-type]

    kept = key(facts)
    later = facts.model_copy(update={"readings": tuple(readings)})
    assert key(later) == kept
    assert (key(facts.model_copy(update={"notes": (note,)})) == kept) == (note == "mode: graph")


def test_evidence_becomes_what_ships() -> None:
    module = tool_module("ship_payoff")
    key = {"model": "m", "weights_hash": "h", "temperature": 1.0, "acceptance": {"kind": "exact"}}
    evidence = AutoEvidence(settings={"key": key}, worth={8: (30, 12)})
    found = module.payoff_of(evidence, "prompts")
    assert (found.weights_hash, found.tokens_per_step) == ("h", {8: 2.5})
