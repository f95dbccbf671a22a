"""``auto`` with drafts by a copy of the model's own weights: timed, counted, kept, freed; and tuned."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.preferring import prefer

import lantern_accel
from lantern_accel.device.backend import Backend, MemoryUse
from lantern_accel.families.random_weights import manifest_of_size
from lantern_accel.generation import measurements as automatic
from lantern_accel.generation.decision import Estimate
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.memory.plan import Planner
from lantern_accel.nn.rounding import rounding
from lantern_accel.nn.transformer import projections
from lantern_accel.strategy import choices
from lantern_accel.strategy.lengths import rate_of, tokens_of
from lantern_accel.strategy.values import AUTO_SELF, NoTree, SelfDrafts, Strategy
from lantern_accel_profiles.tuning import auto as tuning


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, on a device where copies of the smallest models may pay."""
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(automatic.auto, "LEAST_WEIGHTS", 0)
    monkeypatch.setattr(automatic.HostLoad, "share", lambda self: 0.0)
    with lantern_accel.load(device="cpu", dtype="float32") as pipeline:
        kind = type(pipeline.backend)
    prefer(monkeypatch, kind, reads_fewer_bits=True)
    return tmp_path / "cache" / "choices"


def load(model: Path) -> Pipeline:
    return lantern_accel.load(model, device="cpu", dtype="float32")


def costs(monkeypatch: pytest.MonkeyPatch, copy: float, others: float) -> None:
    """Let every step that drafts cost so much, with a copy and with anything else."""

    def calibrate(self: Any, *given: Any, **more: Any) -> dict[int, list[float]]:
        cost = copy if isinstance(self.strategy.drafts, SelfDrafts) else others
        return {n: [1.0 if n == 1 else cost] * 3 for n in self.lengths}

    monkeypatch.setattr(automatic, "calibrate", calibrate)
    monkeypatch.setattr("lantern_accel.generation.pipeline.calibrate", calibrate)

    def likely(self: Any, asked: Strategy, *given: Any) -> list[Strategy]:
        made: Strategy | None = self.copies(asked)
        return [] if made is None else [made]

    monkeypatch.setattr(automatic.Measurements, "likely_copies", likely)


def test_a_copy_that_pays_is_taken_counted_and_draws_plain_tokens(
    tiny_model: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs(monkeypatch, copy=1.1, others=50.0)
    with load(tiny_model) as pipeline:
        want = pipeline.generate("red heart", seed=3, num_images=2, strategy="vanilla").tokens
        pipeline.release_engines()
        drawn = pipeline.generate("red heart", seed=3, num_images=2, batch_size=2)
        assert torch.equal(drawn.tokens, want)
        tree = drawn.stats.strategy.drafts
        assert isinstance(tree, SelfDrafts) and tree.weights == "int8"
        assert "drafts of the model's own weights in int8" in drawn.stats.auto
        assert drawn.stats.total_variation_per_token == 0
        (path,) = kept.glob("*.json")
        key = json.loads(path.read_text())["key"]
        choice = choices.read_choice(key)
        assert choice is not None and choice.source == "while generating" and not choice.again
        found = [Estimate.model_validate(one) for one in choice.evidence["timed"]]
        (one,) = [s for s in found if isinstance(s.strategy.drafts, SelfDrafts)]
        assert all(p.tokens_per_step is not None for p in one.strategy.lengths), "they were counted"
    with load(tiny_model) as pipeline:
        again = pipeline.generate("red heart", seed=3, num_images=2, batch_size=2)
    assert torch.equal(again.tokens, want) and isinstance(again.stats.strategy.drafts, SelfDrafts)


def test_the_copy_that_is_tried_is_predicted_before_one_is_made(
    tiny_model: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_rows: list[list[int]] = []

    def cheap(target: Any, ops: Any, dtype: Any, rows: list[int], watch: Any) -> Any:
        asked_rows.append(rows)
        known = {"int8": 0.5, "int6": 0.3, "int4": 0.3}
        products = {name: dict.fromkeys(rows, cost) for name, cost in known.items()}
        return products | {"full": dict.fromkeys(rows, 1.0)}

    monkeypatch.setattr(automatic, "product_times", cheap)
    monkeypatch.setattr(
        automatic,
        "calibrate",
        lambda self, *given: {n: [1.0] * 3 for n in self.lengths},
    )
    with load(tiny_model) as pipeline:
        asked, sampling = pipeline.strategy("auto"), pipeline.sampling()
        windows = Estimate(strategy=promised(asked, 1.0))
        made, _ = pipeline.measurements.likely_copies(asked, windows, 2, sampling)
        tree: Any = made.drafts
        assert tree.weights == "int6" and tree.window > 0 and tree.passes > 0
        rows = 2 * sampling.branches
        assert asked_rows == [[n * rows for n in (1, 2, 4, 8, 16)]], "all rows cost alike"
        dear = Estimate(strategy=promised(asked, 50.0))
        assert pipeline.measurements.likely_copies(asked, dear, 2, sampling) == []
        assert not pipeline.engines.capacity.copies, "nothing was made yet"
        want = pipeline.generate("red heart", seed=3, strategy="vanilla").tokens
        drawn = pipeline.generate("red heart", seed=3)
        assert torch.equal(drawn.tokens, want)
        assert pipeline.engines.capacity.copies <= {"int6"}
        relaxed = pipeline.strategy("auto", relaxed=True)
        assert pipeline.measurements.likely_copies(relaxed, windows, 1, sampling) == []


def promised(asked: Strategy, cost: float) -> Strategy:
    """Return a strategy whose lengths that draft cost so much."""
    tree: Any = asked.drafts
    lengths = tuple(
        one.model_copy(update={"cost": 1.0 if one.length == 1 else cost})
        for one in tree.draft_lengths
    )
    return asked.model_copy(update={"drafts": tree.model_copy(update={"draft_lengths": lengths})})


@pytest.mark.parametrize("own", [False, True])
def test_a_copy_that_does_not_pay_is_freed_but_for_the_users_own(
    tiny_model: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    costs(monkeypatch, copy=50.0, others=50.0)
    with load(tiny_model) as pipeline:
        if own:
            pipeline.generate("red heart", seed=3, strategy="self", drafts="self:2,int4")
        drawn = pipeline.generate("red heart", seed=3)
        assert isinstance(drawn.stats.strategy.drafts, NoTree)
        assert pipeline.engines.capacity.copies == ({"int4"} if own else set())
        trees = [one.engine.strategy.drafts for one in pipeline.engines.ready]
        assert any(isinstance(tree, SelfDrafts) for tree in trees) == own


def test_who_gets_no_copy(tiny_model: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(tiny_model) as pipeline:
        auto = pipeline.measurements
        asked = pipeline.strategy("auto")
        made = auto.copies(asked)
        assert made is not None and [p.length for p in made.drafts.draft_lengths] == list(AUTO_SELF)
        assert auto.copies(pipeline.strategy("auto", relaxed=True)) is None
        monkeypatch.setattr(automatic.auto, "LEAST_WEIGHTS", 1 << 40)
        assert auto.copies(asked) is None
        monkeypatch.setattr(automatic.auto, "LEAST_WEIGHTS", 0)
        pipeline.backend.preferences = replace(pipeline.backend.preferences, reads_fewer_bits=False)
        assert auto.copies(asked) is None
    assert Backend.preferences.reads_fewer_bits is False


def test_a_choice_whose_copy_does_not_fit_is_decoded_plainly(
    tiny_model: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(tiny_model) as pipeline:
        asked, sampling = pipeline.strategy("auto"), pipeline.sampling()
        key = pipeline.measurements.key(asked, 1, sampling)
        copy = pipeline.measurements.copies(asked)
        assert copy is not None
        pipeline.measurements.keep(choices.Choice(key=key, strategy=copy, source="tune"))
        assert pipeline.measurements.resolve(asked, 1, sampling).drafts == copy.drafts
        full = MemoryUse(limit=1000, in_use=999)
        monkeypatch.setattr(type(pipeline.backend), "memory", lambda self: full)
        assert isinstance(pipeline.measurements.resolve(asked, 1, sampling).drafts, NoTree)
        assert pipeline.measurements.copies(asked) is None


@pytest.mark.long
def test_plans_and_fits_count_the_copy(tiny_model: Path) -> None:
    drafts = Strategy(name="self", drafts=SelfDrafts(weights="int4"))
    planner = Planner(manifest_of_size("llamagen-b-256"), dtype=torch.bfloat16)
    plain, own = planner.plan(planner.strategy("vanilla")), planner.plan(drafts)
    copy = own.weights["copy"]
    assert 0.2 < copy / plain.weights["target"] < 0.3 and "copy" not in plain.weights
    assert own.peak > plain.peak + copy
    with load(tiny_model) as pipeline:
        weights = sum(p.weight.numel() for p in projections(pipeline.model.target))
        capacity = pipeline.engines.capacity
        need = capacity.copy_bytes(drafts)
        assert need == int(weights * rounding("int4").bits_per_weight / 8)
        assert capacity.copy_bytes(pipeline.strategy("vanilla")) == 0
        pipeline.generate("red heart", seed=1, strategy="self", drafts="self:4,int4")
        assert capacity.copy_bytes(drafts) == 0  # it is held


@pytest.mark.long
def test_tuning_counts_times_and_races_copies(
    tiny_model: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "TIMED", 1)
    costs(monkeypatch, copy=1.1, others=50.0)
    told: list[str] = []
    with load(tiny_model) as pipeline:
        asked = pipeline.strategy("auto")
        tuner = tuning.AutoTuner(pipeline, asked, prompts=["red heart"], say=told.append)
        found, evidence = tuner.run([1, 2], 1), tuner.evidence
        assert set(evidence.copy_counts) == {"self, 8 drafts in int8"} == set(evidence.copy_times)
        assert all("self" in [m.strategy.name for m in one.measured] for one in found)
        chosen = {
            one.strategy.drafts.weights for one in found if one.strategy.drafts.kind == "self"
        }
        assert pipeline.engines.capacity.copies == chosen
        want = pipeline.generate("red heart", seed=1, strategy="vanilla").tokens
        assert torch.equal(pipeline.generate("red heart", seed=1).tokens, want)
    assert any(text.startswith("self, 8 drafts in int8:") for text in told)


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.93])
def test_the_rate_of_counts_is_that_which_they_come_from(rate: float) -> None:
    for length in (2, 5, 9):
        assert rate_of(tokens_of(rate, length), length) == pytest.approx(rate, abs=1e-4)
    assert rate_of(1.0, 5) == pytest.approx(0, abs=1e-6)
    assert rate_of(5.0, 5) == pytest.approx(1, abs=1e-6)
