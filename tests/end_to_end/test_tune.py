"""Tuning: the best tree under given rates, its evidence, and that generate uses it."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lantern_accel
from lantern_accel import tune
from lantern_accel.strategy import StaticTree

RATE = st.floats(0.01, 0.99)


@st.composite
def falling_rates(draw):
    """Acceptance rates that fall with rank and sum to at most 1 a depth."""
    rows = []
    for _ in range(3):
        row = sorted((draw(RATE) for _ in range(2)), reverse=True)
        rows.append([r / max(1.0, sum(row)) for r in row])
    return rows


@settings(max_examples=40, deadline=None)
@given(rates=falling_rates(), nodes=st.integers(1, 4), depth=st.integers(1, 3))
def test_no_other_tree_of_that_size_is_worth_more(rates, nodes, depth):
    best = tune.best_tree(rates, nodes, depth)
    StaticTree(paths=best)  # a tree: parents and elder siblings are there
    assert len(best) <= nodes and max(map(len, best)) <= depth
    everything = [
        path for n in range(1, depth + 1) for path in itertools.product(range(2), repeat=n)
    ]
    worth = tune.expected_tokens(best, rates)
    for others in itertools.combinations(everything, min(nodes, len(everything))):
        try:
            StaticTree(paths=others)
        except ValueError:
            continue
        assert tune.expected_tokens(others, rates) <= worth + 1e-9


def test_tuning_keeps_a_tree_that_generate_uses(command, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path))
    monkeypatch.setattr(tune, "TIMED", ((1, 1), (2, 2), (4, 2), (6, 3)))
    monkeypatch.setattr(tune, "SIZES", (1, 2, 4))
    monkeypatch.setattr(tune, "PROBE", (3, 2, 1))
    words = ("--model", tiny_model, "--strategy", "eagle")
    done = command("tune", *words, "--repeats", 1, "-o", tmp_path / "evidence.json")
    assert done.returncode == 0, done.stderr
    found = tune.Tuned.model_validate(json.loads((tmp_path / "evidence.json").read_text()))
    assert found.tree.name == "tuned"
    measured = [c for c in found.candidates if c.measured_tokens_per_second]
    assert found.tree.paths in [c.paths for c in measured]
    assert all(0 < rate < 1 for row in found.rates for rate in row)
    with lantern_accel.load(tiny_model, device="cpu") as pipe:
        assert pipe.request("dog face", strategy="eagle").strategy.tree == found.tree
        # Another rule, another temperature kind or a tree of one's own: not this one.
        assert pipe.request("dog face", k=3).strategy.tree.name != "tuned"
        assert (
            pipe.request("dog face", strategy="eagle", temperature=0).strategy.tree.name != "tuned"
        )
        assert pipe.request("dog face", strategy="eagle", tree="0,1").strategy.tree.name == "custom"
    done = command("generate", "dog face", *words, "-o", tmp_path / "a.png")
    assert "over the tree tuned" in done.stdout


def test_a_tree_of_another_device_or_a_damaged_one_is_not_used(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path))
    with lantern_accel.load(tiny_model, device="cpu") as pipe:
        key = tune.key_of(pipe, pipe.strategy("eagle"), 1.0)
        path = tune.tuned_path(key)
        path.parent.mkdir(parents=True)
        path.write_text("{")
        assert tune.read_tuned(key) is None
        assert tune.tuned_path({**key, "threads": 99}) != path


def test_only_static_trees_are_tuned(command, tiny_model):
    done = command("tune", "--model", tiny_model, "--strategy", "eagle2")
    assert done.returncode == 2
    assert "no static tree" in done.stderr


@pytest.mark.parametrize("widths", [(2,), (5, 3, 2, 2, 1, 1)])
def test_the_measuring_tree_is_a_tree(widths):
    assert max(map(len, StaticTree(paths=tune.probe_paths(widths)).paths)) == len(widths)
