"""``auto``: what it stands for is measured once, kept, printed and repeated; what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lantern_accel
from lantern_accel.generation import measurements as automatic
from lantern_accel.generation.decision import Estimate
from lantern_accel.strategy import choices
from lantern_accel.strategy.sources import with_tokens_per_step
from lantern_accel.strategy.values import NoTree, Window
from lantern_accel_profiles.measure import samples
from lantern_accel_profiles.tuning import auto as tuning


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def busy(monkeypatch):
    """The share of the machine that others have, in a list that a test may change."""
    share = [0.0]
    monkeypatch.setattr(automatic.HostLoad, "share", lambda self: share[0])
    return share


@pytest.fixture
def timed(monkeypatch):
    """The engines that were timed; ``cost`` of one says what its steps that draft take, by no clock."""
    engines = []

    def calibrate(self, watch, *least):
        engines.append(self)
        return {n: [1.0 if n == 1 else timed.cost(self)] for n in self.lengths}

    monkeypatch.setattr(automatic, "calibrate", calibrate)
    timed = SimpleNamespace(engines=engines, cost=lambda engine: 1.01)
    return timed


def load(model):
    return lantern_accel.load(model, device="cpu", dtype="float32")


def test_a_choice_is_kept_and_a_seed_repeats(tiny_model, own, timed):
    with load(tiny_model) as pipeline:
        first = pipeline.generate("red heart", seed=3)
        again = pipeline.generate("red heart", seed=3)
    with load(tiny_model) as pipeline:
        later = pipeline.generate("red heart", seed=3)
        assert {engine.strategy.drafts.kind for engine in timed.engines} == {"window"}
        assert len(timed.engines) == 1, "the second pipeline reads what the first has kept"
        pipeline.generate("red heart", seed=3, num_images=2, batch_size=2)
    assert len(timed.engines) == 2, "another batch has costs of its own"
    assert torch.equal(first.tokens, again.tokens) and torch.equal(first.tokens, later.tokens)
    assert first.stats.strategy.name == "auto"
    assert "exact" in first.stats.auto and first.stats.total_variation_per_token == 0
    assert len(list((own / "choices").glob("*.json"))) == 2


def test_batches_of_one_request_may_draft_to_different_depths(tiny_model, own, timed):
    """The last batch of a request is a smaller one, for which drafts may pay where else they do not."""
    timed.cost = lambda engine: 1.01 if engine.geometry.batch == 1 else 50.0
    with load(tiny_model) as pipeline:
        want = pipeline.generate("red heart", seed=3, num_images=3, strategy="vanilla").tokens
        drawn = pipeline.generate("red heart", seed=3, num_images=3, batch_size=2)
    assert torch.equal(drawn.tokens, want)
    two, one = drawn.stats.decision.parts
    assert (two.images, one.images) == (2, 1)
    assert isinstance(two.strategy.drafts, NoTree) and isinstance(one.strategy.drafts, Window)
    assert sum(drawn.stats.accepted_histogram) == drawn.stats.steps


def test_a_busy_minute_does_not_decide_for_good(tiny_model, own, timed, busy):
    busy[0], timed.cost = 0.5, lambda engine: 3.0 if busy[0] else 1.01
    with load(tiny_model) as pipeline:
        want = pipeline.generate("red heart", seed=3, strategy="vanilla").tokens
        first = pipeline.generate("red heart", seed=3)
        assert first.stats.auto.startswith("plain decoding") and len(timed.engines) == 1
        second = pipeline.generate("red heart", seed=3)
        assert second.stats.auto.startswith("plain decoding"), "the machine is busy still"
        busy[0] = 0.0
        third = pipeline.generate("red heart", seed=3)
        assert isinstance(third.stats.strategy.drafts, Window) and len(timed.engines) == 3
        for one in (first, second, third):
            assert torch.equal(one.tokens, want), "exact drafts change no image"
        assert third.stats.strategy.lengths[-1].cost == pytest.approx(1.01), "the least time counts"
        busy[0] = 0.5
        again = pipeline.generate("red heart", seed=3)
        assert len(timed.engines) == 3 and "busy" not in again.stats.auto, "it is settled"


def test_a_machine_that_is_always_busy_is_timed_a_few_times(tiny_model, own, timed, busy):
    busy[0], timed.cost = 0.5, lambda engine: 1.0
    with load(tiny_model) as pipeline:
        said = [pipeline.generate("red heart", seed=3).stats.auto for _ in range(6)]
    assert len(timed.engines) == automatic.auto.REQUESTS
    says = "the next images measure again"
    assert [one.endswith(says) for one in said] == [True, True, True, False, False, False]


def test_the_command_says_what_auto_stands_for(command, tiny_model, own, tmp_path):
    words = ("generate", "red heart", "--model", tiny_model, "-o", tmp_path / "a.png")
    done = command(*words, "--stats", tmp_path / "a.json")
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "a.json").read_text())["auto"]
    assert told in " ".join(done.stdout.split())


def test_a_choice_is_of_its_key_and_whole(tiny_model, own):
    with load(tiny_model) as pipeline:
        pipeline.generate("red heart", seed=1)
    (path,) = (own / "choices").glob("*.json")
    kept = json.loads(path.read_text())
    assert choices.read_choice(kept["key"]) is not None
    assert choices.read_choice(kept["key"] | {"threads": 77}) is None
    path.write_text(json.dumps(kept | {"speedup": 9.0}))  # what was chosen is the machine's to say
    assert choices.read_choice(kept["key"]) is None


def promising(strategy, promise):
    """Return what was timed of a strategy's lengths: all that draft promise so much."""
    brings = {one.length: 1.0 if one.length == 1 else promise for one in strategy.lengths}
    lengths = with_tokens_per_step(strategy.lengths, brings)
    strategy = strategy.with_drafts(draft_lengths=lengths)
    return Estimate(strategy=strategy, times=dict.fromkeys(brings, 1.0))


@pytest.mark.parametrize(("promises", "plain"), [((1.1, 1.14), True), ((1.1, 1.2), False)])
def test_drafts_that_promise_little_are_left_to_plain_decoding(tiny_model, own, promises, plain):
    with load(tiny_model) as pipeline:
        asked = pipeline.strategy("auto")
        found = [promising(asked, promise) for promise in promises]
        pipeline.measurements.settle(found, asked, 1, pipeline.sampling(), again=0)
        drawn = pipeline.generate("red heart", seed=1, strategy=asked)
    assert isinstance(drawn.stats.strategy.drafts, NoTree) == plain
    assert drawn.stats.auto.startswith("plain decoding") == plain


def test_a_choice_that_needs_a_drafter_is_left_where_there_is_none(undrafted_model, own):
    with load(undrafted_model) as pipeline:
        asked, sampling = pipeline.strategy("auto", relaxed=True), pipeline.sampling()
        key = pipeline.measurements.key(asked, 1, sampling)
        tree = pipeline.strategy("lantern++")
        pipeline.measurements.keep(choices.Choice(key=key, strategy=tree, source="tune"))
        assert isinstance(pipeline.measurements.resolve(asked, 1, sampling).drafts, Window)
        assert pipeline.measurements.chain(asked) is None


def test_a_drafters_chain_is_tried_where_relaxation_is_asked_for(
    tiny_model, own, timed, busy, monkeypatch
):
    def count(self, length, steps):
        return (3 if self.strategy.acceptance.relaxed else 2) * steps, steps

    busy[0] = 0.5
    timed.cost = lambda engine: 1.01 if engine.strategy.drafts.kind == "chain" else 50.0
    monkeypatch.setattr(automatic, "count", count)
    with load(tiny_model) as pipeline:
        assert pipeline.measurements.chain(pipeline.strategy("auto")) is None
        drawn = pipeline.generate("red heart", seed=3, relaxed=True, tv_budget=0.5)
        asked, sampling = pipeline.strategy("auto", tv_budget=0.5), pipeline.sampling()
        choice = pipeline.measurements.choice(asked, 1, sampling)
        windows, chain = map(Estimate.model_validate, choice.evidence["timed"])
        assert windows.strategy.drafts.kind == "window" and not windows.strategy.acceptance.relaxed
        assert chain.strategy.drafts.kind == "chain" and chain.strategy.acceptance.relaxed
        assert all(one.tokens_per_step >= 1 for one in chain.strategy.lengths), (
            "drafts were counted"
        )
        assert drawn.stats.strategy.tv_budget in (None, 0.5)
        assert (chain.exact, windows.exact) == (2.0, None)
        assert drawn.stats.strategy.acceptance.relaxed
        busy[0] = 0.0  # the chain is timed again, and not counted
        again = pipeline.generate("red heart", seed=3, relaxed=True, tv_budget=0.5)
        for one in (drawn.stats, again.stats):
            moved = f"TV {one.total_variation_per_token:.3f} adds"
            assert "with these drafts has 2.00" in one.auto and moved in one.auto


def test_windows_stay_exact_where_a_drafters_drafts_may_be_relaxed(tiny_model, own):
    with load(tiny_model) as pipeline:
        asked = pipeline.request("red heart", tv_budget=0.02).strategy
        assert asked.acceptance.relaxed and asked.tv_budget == 0.02
        windows = pipeline.measurements.resolve(asked, 1, pipeline.sampling())
        assert isinstance(windows.drafts, Window) and windows.tv_budget is None
        assert not windows.acceptance.relaxed
        assert not pipeline.request("red heart").strategy.acceptance.relaxed
        assert pipeline.request("red heart", relaxed=True).strategy.acceptance.relaxed


def test_a_simulated_devices_times_choose_nothing(tiny_model, own, monkeypatch):
    with load(tiny_model) as pipeline:
        monkeypatch.setattr(type(pipeline.backend), "simulated", True)
        drawn = pipeline.generate("red heart", seed=3)
    assert not (own / "choices").exists()
    assert {one.cost for one in drawn.stats.strategy.drafts.draft_lengths} == {1.0}


def test_tuning_goes_on_and_its_choice_is_used(tiny_model, own, monkeypatch):
    monkeypatch.setattr(tuning, "TIMED", 1)
    prompts = ["red heart", "dog face"]
    counted = []

    def say(text):
        counted.append(text)
        if len(counted) == 2:
            raise KeyboardInterrupt

    with load(tiny_model) as pipeline:
        asked = pipeline.strategy("auto")
        with pytest.raises(KeyboardInterrupt):
            tuning.AutoTuner(pipeline, asked, prompts=prompts, say=say).run([1], 1)
        (partial,) = (own / "choices").glob("*.partial")
        assert len(json.loads(partial.read_text())["worth"]) == 2
        told = []
        tuner = tuning.AutoTuner(pipeline, asked, prompts=prompts, say=told.append)
        found, evidence = tuner.run([1, 2], 1), tuner.evidence
        assert told[0] == "going on with what was measured before"
        assert not any(text.startswith(("windows of 2:", "windows of 4:")) for text in told)
        assert not partial.exists()
        assert set(evidence.worth) == {1, 2, 4, 8, 16}
        assert [c.key["batch"] for c in found] == [1, 2]
        assert {m.strategy.name for m in found[0].measured} >= {"vanilla", "windows"}
        drawn = pipeline.generate("red heart", seed=1)
    assert drawn.stats.strategy == found[0].strategy


@pytest.mark.long
def test_a_seed_is_a_picture_whatever_is_kept_timed_or_drafted(tiny_model, own):
    """The first request, one whose choice is kept and one after all choices are gone draw alike."""
    with load(tiny_model) as pipeline:
        want = pipeline.generate("red heart", seed=3, num_images=8, strategy="vanilla").tokens
        for strategy in ("auto", "auto", "eagle", "eagle2", "scd"):
            drawn = pipeline.generate("red heart", seed=3, num_images=8, strategy=strategy)
            assert torch.equal(drawn.tokens, want), strategy
        for batch in (3, 8):
            drawn = pipeline.generate("red heart", seed=3, num_images=8, batch_size=batch)
            assert torch.equal(drawn.tokens, want), batch
        others = pipeline.generate("red heart", seed=3, strategy="sjd", coupling="maximal").tokens
        assert not torch.equal(others, want[:1]), "the papers' coupling draws images of its own"
    for kept in (own / "choices").glob("*.json"):
        kept.unlink()
    with load(tiny_model) as pipeline:
        assert torch.equal(pipeline.generate("red heart", seed=3).tokens, want[:1])


@pytest.mark.long
def test_phases_are_of_the_engine_that_decodes_after_auto_has_chosen_again(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lantern_accel.load(tiny_model, device="cpu", dtype="float32") as pipeline:
        cell = samples.new_cell(pipeline.strategy("auto"), 1, 1.0)
        warm_up = samples.warm_up

        def learning(*given: Any) -> Any:
            found = warm_up(*given)
            learned = pipeline.strategy("vanilla" if given[3] == 0 else "scd")
            monkeypatch.setattr(pipeline.measurements, "resolve", lambda *asked: learned)
            return found

        monkeypatch.setattr(samples, "warm_up", learning)
        samples.measure_cold(pipeline, cell, ["red heart"], 0)
    assert isinstance(cell.step_ms, dict) and cell.step_ms["verify"] > 0
