"""Every method of the backend interface, wrong once or more: the kit finds each and names it."""

from __future__ import annotations

import pytest
import torch
from support.faults import FAULTS, WITHOUT, Fault, scaffold, small_shapes

from lantern_accel.device.backend import methods
from lantern_accel.testing import CHECKS, run_check

#: What the scaffold's backend has no answer to.
UNANSWERED = {"device.energy", "device.memory", "replay.stable", "static.operators"}
PASS_WHERE_RIGHT = sorted({fault.check for fault in FAULTS} - UNANSWERED)


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.words for fault in FAULTS])
def test_a_fault_is_found_and_named(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    small_shapes(monkeypatch)
    outcome = run_check(fault.backend(), fault.check, CHECKS[fault.check])
    assert outcome.state == "failed", outcome
    assert fault.says in outcome.detail


#: Methods whose first argument has the dtype that a device computes in.
IN_ANY_DTYPE = ("linear", "linear_add", "logits", "rms_norm", "swiglu", "rotate", "attend", "trunk")
ROUGH = [fault for fault in FAULTS if fault.method in IN_ANY_DTYPE]


@pytest.mark.parametrize("fault", ROUGH, ids=[fault.words for fault in ROUGH])
def test_a_fault_of_bfloat16_alone_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    small_shapes(monkeypatch)
    outcome = run_check(fault.backend(torch.bfloat16), fault.check, CHECKS[fault.check])
    assert outcome.state == "failed", outcome
    assert fault.says in outcome.detail and "bfloat16" in outcome.detail


@pytest.mark.parametrize("check", PASS_WHERE_RIGHT)
def test_the_scaffold_s_backend_passes(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_shapes(monkeypatch)
    outcome = run_check(scaffold()(0), check, CHECKS[check])
    assert outcome.state == "passed", outcome


def test_every_method_of_the_interface_has_a_fault() -> None:
    planted = {fault.method for fault in FAULTS}
    assert not planted & set(WITHOUT)
    assert planted | set(WITHOUT) == set(methods())
