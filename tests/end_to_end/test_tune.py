"""Tuning: the best tree under given rates, its evidence, and that generate uses it."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import Late

import lantern_accel
from lantern_accel.device.capture import HostCopy
from lantern_accel.errors import LanternWarning, RequestError, StrategyError
from lantern_accel.strategy import choices
from lantern_accel.strategy.values import StaticTree
from lantern_accel_profiles.measure.samples import new_cell
from lantern_accel_profiles.tuning import trees as tune
from lantern_accel_profiles.tuning.auto import AutoTuner

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


def test_a_window_has_no_tree_to_tune_and_the_length_that_rows_favour(tiny_model):
    with lantern_accel.load(tiny_model, device="cpu") as pipe:
        with pytest.raises(StrategyError, match="'scd' has no static tree"):
            tune.TreeTuner(pipe, pipe.strategy("scd"))

        def length(**settings):
            settings = {"strategy": "scd", "batch_size": 1, **settings}
            return pipe.request(["dog face"] * 2, **settings).strategy.drafts.length

        # A length that was asked for stays; the tests' costs of rows are those of vectors.
        assert length(window=5) == 5 and length(drafts="window:7") == 7
        assert length() == length(strategy="sjd") == 8


def test_a_limit_of_seconds_is_kept_between_decodings(tiny_model, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    with lantern_accel.load(tiny_model, device="cpu") as pipe:
        tuner = AutoTuner(pipe, pipe.strategy("auto"), budget=100, prompts=["sea"] * 16)
        plain, spent = pipe.strategy("vanilla"), iter([5, 10, 10, 40, 10, 10])
        cell = new_cell(plain, 1, 1.0)

        def measure(*_):
            now[0] += next(spent)

        monkeypatch.setattr(tuner, "warm", measure)
        monkeypatch.setattr(tuner, "sample", measure)
        with pytest.raises(RequestError, match="the next decoding takes 40 s"):
            tuner.race({"vanilla": cell}, 3)
        assert now[0] == 65

        def decoded(*_):
            measure()
            return SimpleNamespace(steps=torch.ones(1), tokens=torch.zeros(1, 16)), 0.0

        now[0], spent = 95.0, iter([4, 4])
        monkeypatch.setattr(pipe, "decode_only", decoded)
        with pytest.raises(RequestError, match="counting more drafts takes 4 s"):
            tuner.prepare()
        assert now[0] == 99


@pytest.mark.long
def test_tuning_keeps_a_tree_that_generate_uses(command, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path))
    monkeypatch.setattr(tune, "TIMED", ((1, 1), (2, 2), (4, 2), (6, 3)))
    monkeypatch.setattr(tune, "SIZES", (1, 2, 4))
    monkeypatch.setattr(tune, "PROBE", (3, 2, 1))
    words = ("--model", tiny_model, "--strategy", "eagle")
    done = command("tune", *words, "--repeats", 1, "-o", tmp_path / "evidence.json")
    assert done.returncode == 0, done.stderr
    found = choices.Choice.model_validate(json.loads((tmp_path / "evidence.json").read_text()))
    tree, made = found.strategy.drafts, found.evidence
    assert isinstance(tree, StaticTree) and tree.name == "tuned"
    candidates = [tune.Candidate.model_validate(one) for one in made["candidates"]]
    assert tree.paths in [one.paths for one in candidates]
    best = max(one.speedup for one in found.measured[1:])
    assert found.measured[0].speedup == 1 and found.speedup == best
    assert all(0 < rate < 1 for row in made["rates"] for rate in row)
    with lantern_accel.load(tiny_model, device="cpu") as pipe:
        assert pipe.request("dog face", strategy="eagle").strategy.drafts == tree
        # Another rule, another temperature kind or a tree of one's own: not this one.
        assert pipe.request("dog face", strategy="lantern++", k=3).strategy.drafts.name != "tuned"
        assert (
            pipe.request("dog face", strategy="eagle", temperature=0).strategy.drafts.name
            != "tuned"
        )
        assert (
            pipe.request("dog face", strategy="eagle", drafts="0,1").strategy.drafts.name
            == "custom"
        )
    done = command("generate", "dog face", *words, "-o", tmp_path / "a.png")
    assert "over the tree tuned" in done.stdout


def small(monkeypatch, tmp_path):
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path))
    monkeypatch.setattr(tune, "TIMED", ((1, 1), (2, 2), (4, 2), (6, 3)))
    monkeypatch.setattr(tune, "SIZES", (1, 2))
    monkeypatch.setattr(tune, "PROBE", (2, 1))


def test_a_tree_of_another_version_is_refused_with_a_warning(tiny_model, tmp_path, monkeypatch):
    small(monkeypatch, tmp_path)
    with lantern_accel.load(tiny_model, device="cpu") as pipe:
        (found,) = tune.TreeTuner(pipe, pipe.strategy("eagle"), prompts=["dog face"]).run(repeats=1)
        stored = choices.choice_path(found.key)
        for name, value in (("torch", "1.0"), ("weights_hash", "other"), ("backend", "cpu 9")):
            stored.unlink(missing_ok=True)
            stored = choices.choice_path({**found.key, name: value})
            stale = found.model_copy(update={"key": {**found.key, name: value}})
            choices.write_choice(stale)
            with pytest.warns(LanternWarning, match=f"was made for {name} '{value}', not"):
                assert pipe.request("dog face", strategy="eagle").strategy.drafts.name != "tuned"
        # Another device's tree, or another rule's, says nothing about this one.
        stored.unlink()
        other = found.model_copy(update={"key": {**found.key, "device_name": "another"}})
        choices.write_choice(other)
        assert choices.read_choice(found.key) is None


def test_a_shipped_tree_is_found(tiny_model, tmp_path, monkeypatch):
    small(monkeypatch, tmp_path)
    with lantern_accel.load(tiny_model, device="cpu") as pipe:
        (found,) = tune.TreeTuner(pipe, pipe.strategy("eagle"), prompts=["dog face"]).run(repeats=1)
        (tmp_path / "profiles/choices").mkdir(parents=True)
        choices.choice_path(found.key).rename(tmp_path / "profiles/choices/cpu.json")
        monkeypatch.setattr(choices, "profiles_dir", lambda: tmp_path / "profiles")
        assert pipe.request("dog face", strategy="eagle").strategy.drafts == found.strategy.drafts


@pytest.mark.long
@pytest.mark.parametrize("after", [4])
def test_an_interrupted_run_measures_nothing_twice(tiny_model, tmp_path, monkeypatch, after):
    small(monkeypatch, tmp_path)
    prompts = ["dog face", "red heart"]
    with lantern_accel.load(tiny_model, device="cpu") as pipe:
        strategy = pipe.strategy("eagle")
        whole = []
        tune.TreeTuner(pipe, strategy, prompts=prompts, say=whole.append).run(repeats=2)
        first, left = [], after

        def stop(text):
            nonlocal left
            left -= 1
            first.append(text)
            if not left:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            tune.TreeTuner(pipe, strategy, prompts=prompts, say=stop).run(repeats=2)
        rest = []
        tune.TreeTuner(pipe, strategy, prompts=prompts, say=rest.append).run(repeats=2)
    kind = lambda lines: [line.split(":")[0] for line in lines]  # noqa: E731
    measured = kind(first) + [k for k in kind(rest) if not k.startswith("going on")]
    # Lines of repeats that were complete before are said again; nothing else is.
    assert measured.count("acceptance") == kind(whole).count("acceptance") == 2
    assert measured.count("cost") == kind(whole).count("cost") == 4
    assert not list(choices.choices_dir().glob("*.partial"))


@pytest.mark.parametrize("widths", [(2,), (5, 3, 2, 2, 1, 1)])
def test_the_measuring_tree_is_a_tree(widths):
    assert max(map(len, StaticTree(paths=tune.probe_paths(widths)).paths)) == len(widths)


def test_a_step_on_a_complete_image_is_no_refused_visit(tiny_model, tmp_path, monkeypatch):
    found = []
    for kind in (HostCopy, Late):
        monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path / kind.__name__))
        with lantern_accel.load(tiny_model, device="cpu", dtype="float32") as pipeline:
            monkeypatch.setattr(pipeline.backend, "host_copy", kind)
            tuner = tune.TreeTuner(pipeline, pipeline.strategy("eagle"), prompts=["red heart"])
            tuner.measure_rates()
            found.append((tuner.evidence.visits, tuner.evidence.taken))
    assert found[0] == found[1] and found[0][0][0][0] > 0
