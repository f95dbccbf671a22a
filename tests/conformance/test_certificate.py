"""The certificate: what passed, what failed, what was left out, and what is left to the reference."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.faults import scaffold

from lantern_accel.cli import main
from lantern_accel.device.conformance import Outcome, Report
from lantern_accel.device.operations import TensorOps
from lantern_accel.device.plan import Refused
from lantern_accel.device.plugins import open_backend
from lantern_accel.errors import RequestError
from lantern_accel.testing import CHECKS, certificate
from lantern_accel.testing.certificate import Certificate, certify, markdown, write
from lantern_accel.testing.kit import conform
from lantern_accel.testing.served import who_serves
from lantern_accel_cpu.backend import DeviceBackend


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate, "STRATEGIES", ("vanilla",))


def report(*outcomes: Outcome, simulated: bool = False) -> Report:
    return Report(
        backend="cpu", backend_version="1", device="cpu", device_name="CPU", torch="2",
        simulated=simulated, outcomes=list(outcomes),
    )  # fmt: skip


PASSED = Outcome(name="kv.slots", state="passed", detail="all")
FAILED = Outcome(
    name="kv.sentinels", state="failed", detail="slot 3 | row 2", error=0.5, tolerance=0.1
)
SKIPPED = Outcome(name="device.energy", state="not applicable", detail="no meter")


def test_a_part_of_the_kit_is_no_conformance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = iter(range(100))
    monkeypatch.setattr(DeviceBackend, "counters", lambda self: {"graphs": next(numbers)})
    page = tmp_path / "card.md"
    words = ["conform", "cpu", "--in-process", "--only", "kv.round_trip", "--option", "native=off"]
    assert main([*words, "--certificate", str(page)]) == 0
    assert f"certificate: {page}\n" in capsys.readouterr().out
    card = Certificate.model_validate(json.loads((tmp_path / "card.json").read_text()))
    assert card.verdict == "incomplete"
    assert set(card.not_run) | {"kv.round_trip"} == set(CHECKS)
    assert not {one.name for one in card.interface} & {"device", "probe", "listener", "region"}
    text = page.read_text()
    assert f"is not shown to conform: {len(CHECKS) - 1} checks were left out" in text
    assert all(f"- `{name}`" in text for name in card.not_run)
    assert card.options == {"native": "off"} and "| native | off |" in text
    for said in (card.versions["torch"], "`host_copy`", "no: backend 'cpu' runs each step eagerly"):
        assert said in text
    assert "| `attend` | override |" in text.split("## Who served what")[1]
    assert "`kv.round_trip`" in text.split("## Passed")[1].split("##")[0]
    before, after = card.counters_before["graphs"], card.counters_after["graphs"]
    assert before < after
    assert f"| graphs | {before} | {after} |" in text


@pytest.mark.parametrize("name", ["", "."])
def test_a_certificate_without_a_name_is_refused_before_any_check(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conform", "cpu", "--certificate", name]) == 2
    assert ". is a folder; name a file in it" in capsys.readouterr().err
    with pytest.raises(RequestError, match="name a file in it"):
        conform("cpu", certificate=Path(name))


@pytest.mark.parametrize(
    ("given", "known", "verdict", "why"),
    [
        (report(PASSED, SKIPPED), ["kv.slots", "device.energy"], "conforms", ""),
        (report(PASSED, FAILED), ["kv.slots"], "fails", "failed: kv.sentinels"),
        (report(PASSED), ["kv.slots", "kv.more"], "incomplete", "1 checks were left out"),
        (report(PASSED, simulated=True), ["kv.slots"], "incomplete", "the device is simulated"),
        (report(SKIPPED), ["device.energy"], "incomplete", "nothing passed"),
    ],
    ids=["all", "a failure", "a part", "simulated", "nothing"],
)
def test_the_verdict(
    given: Report, known: list[str], verdict: str, why: str, tmp_path: Path
) -> None:
    with open_backend("null") as backend:
        card = certify(backend, given, known)
    path = tmp_path / "card.json"  # JSON alone is asked for
    assert write(card, path) == [*tmp_path.iterdir()] == [path]
    assert Certificate.model_validate_json(path.read_text()) == card
    assert card.verdict == verdict
    assert card.why.startswith(why)
    text = markdown(card)
    for one in given.outcomes:
        assert f"`{one.name}`" in text and one.detail.replace("|", "/") in text
    words = {
        "conforms": "conforms.",
        "fails": "does not conform: ",
        "incomplete": "is not shown to",
    }
    assert f"**The backend {words[verdict]}" in text


def test_a_family_that_does_not_load_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "lantern_accel.testing.certificate.broken_families", lambda: {"shells": "no sand"}
    )
    with open_backend("null") as backend:
        card = certify(backend, report(PASSED), ["kv.slots"])
    assert (card.verdict, "shells" in card.why) == ("incomplete", True)


def test_it_says_who_served_each_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(self, x, weight, eps):  # hands over what has an odd number of rows
        if x.shape[0] % 2 or x.shape[1] == 1:
            return TensorOps.rms_norm(self, x, weight, eps)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    class Own(scaffold()):
        def swiglu(self, x):
            # A kernel that torch does not see, in place of one that is called by address.
            gate, up = x.numpy()[..., : x.shape[-1] // 2], x.numpy()[..., x.shape[-1] // 2 :]
            return torch.from_numpy(gate / (1 + np.exp(-gate)) * up)

        def mask(self, visible, dtype):
            return super().mask(visible, dtype)

        def fused_step(self, plan):
            return Refused("nothing is fused")

        rms_norm = half

    with Own(0) as backend, backend.inference():
        found = {one.operation: one for one in who_serves(backend, ("vanilla", "eagle2"))}
        assert "swiglu" not in vars(backend) and backend.mask.__func__ is Own.mask
    assert TensorOps.attend.__module__ == "lantern_accel.device.operations"
    by = {name: one.by for name, one in found.items()}
    assert by["swiglu"] == "native"
    assert by["attend"] == by["linear"] == by["filter"] == "reference"
    assert by["rms_norm"] == "override, reference"
    assert 0 < found["rms_norm"].to_reference < found["rms_norm"].calls
    assert by["mask"] == by["fused_step"] == "reference, to which the override hands over"
    assert by["put"] == "not called: nothing needs it"
