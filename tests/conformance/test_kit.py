"""The conformance kit passes the CPU, and every planted fault is caught by its named check."""

from __future__ import annotations

import json

import pytest
import torch
from support.few import small_kit
from support.models import write_tiny_model
from support.plants import MUTANTS, Forgets, after, after_commit
from support.profiles import PROMPTS

import lantern_accel
from lantern_accel.cli import main
from lantern_accel.cli.conform import GROUPS
from lantern_accel.device.backend import Conformance
from lantern_accel.device.plugins import open_backend
from lantern_accel.errors import BackendError, ModelError
from lantern_accel.testing import CHECKS, Measured, NeedsCard, run_checks, static, tiny
from lantern_accel.testing.kit import Report, checks_of, select
from lantern_accel_cpu.backend import DeviceBackend

#: Their faults are in every step: the first case shows them, with the line that is wrong.
RULES = (
    "host_read",
    "dynamic_shape",
    "float64",
    "device_generator",
    "operators",
    "dtypes",
    "indices",
)


@pytest.mark.parametrize(
    ("check", "plant"), [pytest.param(*rest, id=name) for name, *rest in MUTANTS]
)
def test_a_planted_fault_is_caught_by_its_check(monkeypatch, check, plant):
    if check.partition(".")[2] in (*RULES, "views"):
        every = tiny.cases
        monkeypatch.setattr(tiny, "cases", lambda *asked: every(*asked)[:1])
    with open_backend("cpu") as backend:
        plant(monkeypatch, backend)
        outcome = run_checks(backend, {check: CHECKS[check]}).outcomes[0]
    assert outcome.state == "failed", outcome
    if check.partition(".")[2] in (*RULES[:4], "one_graph"):
        assert "support/plants.py:" in outcome.detail


def test_a_late_copy_that_is_cleared_passes(monkeypatch):
    small_kit(monkeypatch)
    with open_backend("cpu") as backend:
        monkeypatch.setattr(backend, "host_copy", Forgets)
        for _ in range(3):  # the step at which it is cancelled is drawn
            assert run_checks(backend, select("decode.interrupted")).passed


def test_a_backend_chooses_the_inference_mode_of_all_that_decodes(monkeypatch, tmp_path):
    with open_backend("cpu") as backend:
        kind = type(backend)
    real = kind.linear

    def strict(self, *given, **more):
        assert not torch.is_inference_mode_enabled()
        return real(self, *given, **more)

    monkeypatch.setattr(kind, "inference", lambda self: torch.no_grad())
    monkeypatch.setattr(kind, "linear", strict)
    small_kit(monkeypatch)
    model = write_tiny_model(tmp_path / "tiny")
    with lantern_accel.load(model, device="cpu", dtype="float32") as pipeline:
        pipeline.warm_up((1,), ("lantern++",), temperature=0)
        drawn = pipeline.generate(PROMPTS[0], seed=1, strategy="lantern++", temperature=0)
        again, _ = pipeline.decode_only(
            PROMPTS[:1], pipeline.strategy("lantern++"), pipeline.sampling(temperature=0), 1
        )
        assert torch.equal(drawn.tokens, again.tokens)
        chosen = select(["decode.weights_from_outside", "replay.eager"])
        assert run_checks(pipeline.backend, chosen).passed


def test_every_operator_that_a_list_lacks_is_named_at_once(monkeypatch):
    monkeypatch.setattr(tiny, "cases", lambda *asked: [("llamagen", "vanilla")])
    listed = {"aten::mm"}

    def rule(func, args, kwargs):
        known = func._schema.name in listed or func.namespace == "prim"
        return "" if known else "no kernel"

    for passes in (False, True):
        with open_backend("cpu") as backend:
            monkeypatch.setattr(backend, "conformance", lambda: Conformance({"operators": rule}))
            outcome = run_checks(backend, select("static.operators")).outcomes[0]
        assert (outcome.state == "passed") is passes, outcome
        if not passes:
            assert "at llamagen/" in outcome.detail and "prim::" not in outcome.detail
            named = outcome.detail.split("these break the rule: ")[1].split(", ")
            listed.update(name.partition(".")[0] for name in named)


@pytest.mark.parametrize(
    "groups", [("kv", "accept", "device"), pytest.param((), id="all", marks=pytest.mark.long)]
)
def test_the_cpu_passes_everything_and_writes_its_reports(tmp_path, capsys, groups):
    chosen = set(select(groups))
    only = [word for group in groups for word in ("--only", group)]
    out = tmp_path / "report.json"
    assert main(["conform", "cpu", "--in-process", *only, "-o", str(out)]) == 0
    report = Report.model_validate(json.loads(out.read_text()))
    assert report.passed
    assert {o.name for o in report.outcomes} == chosen
    left = {o.name: o.detail for o in report.outcomes if o.state == "not applicable"}
    # What the CPU has no answer to, and says so; a meter of energy some CPUs have.
    none = {"static.operators", "static.dtypes", "static.indices", "replay.stable"}
    assert set(left) - {"device.energy"} == none & chosen
    assert all("backend 'cpu'" in reason for reason in left.values())
    shown = capsys.readouterr().out
    assert f"{len(chosen) - len(left)} passed, 0 failed, {len(left)} not applicable\n" in shown


@pytest.mark.long
def test_a_backend_without_data_is_checked_for_shapes(monkeypatch, capsys):
    small_kit(monkeypatch)
    monkeypatch.setattr(static, "CHECKED", ("lantern++",))
    assert main(["conform", "null", "--in-process", "--only", "static", "--only", "kv"]) == 0
    shown = capsys.readouterr().out
    assert "passed: static.dynamic_shape" in shown
    assert "not applicable: kv.slots: the backend has shapes and no data" in shown
    after_commit(lambda s: s.tokens.nonzero())(monkeypatch, None)
    assert main(["conform", "null", "--in-process", "--only", "static.dynamic_shape"]) == 1


@pytest.mark.parametrize("command", ["bench", "tune", "stepcost"])
def test_a_simulated_device_is_never_measured(command, monkeypatch, capsys):
    monkeypatch.setattr(DeviceBackend, "simulated", True)
    assert main([command, "--device", "cpu"]) == 2
    told = capsys.readouterr()
    assert "measure on a real device" in told.err
    assert "tokens/s" not in told.out


def test_a_backend_adds_checks_and_says_what_needs_a_card(monkeypatch):
    def far(backend):
        raise NeedsCard("it is too far away")

    own = {"beads.counted": lambda backend: Measured("ten"), "beads.weighed": far}
    with open_backend("cpu") as backend:
        monkeypatch.setattr(backend, "conformance", lambda: Conformance(checks=own))
        monkeypatch.setattr(backend, "simulated", True, raising=False)
        checks = select(["beads", "device.stopwatch"], checks_of(backend))
        report = run_checks(backend, checks)
    assert [o.state for o in report.outcomes] == ["passed", *["not applicable"] * 2]
    assert report.outcomes[1].detail == "needs a card: it is too far away"
    assert report.summary().endswith("1 passed, 0 failed, 2 not applicable (2 need a card)")


def test_a_failure_is_exit_code_1_and_the_others_still_run(monkeypatch, capsys):
    def spill(backend, kv, layer, address, k, v):
        if k.shape[1] < kv.layout.capacity:  # a write of some slots
            kv.keys[layer].add_(1)

    with open_backend("cpu") as backend:
        after(type(backend), "write", spill)(monkeypatch, backend)
    assert main(["conform", "cpu", "--in-process", "--only", "kv"]) == 1
    out = capsys.readouterr().out
    assert "failed: kv.sentinels" in out
    assert "passed: kv.round_trip" in out


def test_an_unknown_check_is_named(capsys):
    with pytest.raises(BackendError, match="did you mean static"):
        select("statik")
    with pytest.raises(BackendError, match=r"known: accept, .*operation"):
        select("rotary")
    assert {name.partition(".")[0] for name in CHECKS} == set(GROUPS), "what --only's help lists"
    assert list(select("own", {**CHECKS, "beads.count": CHECKS["kv.slots"]})) == ["beads.count"]
    assert main(["conform", "nowhere"]) == 2


def test_without_a_family_nothing_passes(monkeypatch):
    monkeypatch.setattr("lantern_accel.testing.tiny.families", lambda: iter(()))
    with pytest.raises(ModelError, match="no family of models is installed"):
        tiny.cases(("vanilla",))
