"""A card that is busy, absent or lost, and a compiler that refuses: what the user is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from support.gaudi import Gaudi

from lantern_accel.errors import BackendError, DeviceLostError, DeviceMemoryError
from lantern_accel_hpu import bridge, faults
from lantern_accel_hpu.backend import DeviceBackend
from lantern_accel_hpu.bridge import Bridge


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "PATIENCE", 0.0)


def test_a_card_that_nobody_holds_any_more_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver keeps a card for some seconds after its process has ended."""
    hpu = Gaudi()
    hpu.busy = {0}
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            hpu.busy = set()

    monkeypatch.setattr(bridge, "PATIENCE", 30.0)
    monkeypatch.setattr(bridge.time, "sleep", sleep)
    monkeypatch.setattr(faults, "holders", lambda *of: [])
    DeviceBackend(Bridge(hpu))
    assert len(waited) == 3
    # One that is not there, and one that a process here has, are not waited for.
    with pytest.raises(BackendError, match="no free Gaudi"):
        DeviceBackend(Bridge(Gaudi(modules=0)))
    hpu = Gaudi()
    hpu.busy = {0}
    monkeypatch.setattr(faults, "holders", lambda *of: ["python (pid 12)"])
    with pytest.raises(BackendError, match="held now by python"):
        DeviceBackend(Bridge(hpu))
    assert len(waited) == 3


@pytest.mark.parametrize(
    ("text", "of_the_card"),
    [
        ("aten::view.dtype isn't registered in KernelRegistry!", False),
        ("synNodeCreateWithId failed for node: cast with synStatus 26 [Generic failure]. .", False),
        ("Graph compile failed. synStatus=synStatus 7 [Failed to open]. ", False),
        ("synStatus 4 [Out of device memory]. workspace", True),
        ("synStatus=22 [Busy] Device acquire failed.", True),
        ("synLaunch failed. synStatus 22 [Busy]. ", True),
        ("synStatus=26 [Generic failure] Device acquire failed.", True),
        ("synStatus=17 [Device is in reset] Device synchronize failed", True),
    ],
)
def test_what_is_the_cards_own_fault_is_no_reason_to_fall_back(
    text: str, of_the_card: bool
) -> None:
    assert faults.of_the_card(RuntimeError(text)) == faults.of_the_card(_wrapped(text))
    assert faults.of_the_card(RuntimeError(text)) == of_the_card


@pytest.mark.parametrize(
    ("modules", "busy", "refusal", "says"),
    [
        (1, {0}, "", r"another process holds it.*synStatus=26.*--device hpu:N"),
        (0, set(), "", r"no free Gaudi .*synStatus=8 .*check with hl-smi"),
        # The first allocation is part of opening.
        (1, set(), "Allocation failed for size::1024 (0)MB", "out of memory while being opened"),
        (1, set(), "libSynapse: something else", "opened: libSynapse: .*check with hl-smi"),
    ],
)
def test_what_fails_is_told_when_a_card_is_opened(
    modules: int, busy: set[int], refusal: str, says: str
) -> None:
    def first_use() -> None:
        if refusal:
            raise RuntimeError(refusal)

    hpu = Gaudi(modules=modules)
    hpu.busy = busy
    with pytest.raises(BackendError, match=says):
        DeviceBackend(Bridge(hpu, first_use=first_use))


def test_the_process_that_holds_a_card_is_named(tmp_path: Path) -> None:
    card = "/dev/accel/accel3"
    for pid, name, opened in (
        (12, "python", card),
        (13, "bash", "/dev/null"),
        (os.getpid(), "it", card),
    ):
        folder = tmp_path / "proc" / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "comm").write_text(f"{name}\n")
        os.symlink(opened, folder / "fd/4")
    (tmp_path / "proc/14/fd").mkdir(parents=True)  # one that ended meanwhile
    assert faults.holders(root=tmp_path) == ["python (pid 12)"]
    # Of one module: everybody's as long as the driver does not say which node that is.
    assert faults.holders(7, tmp_path) == ["python (pid 12)"]
    node = tmp_path / "sys/class/accel/accel3/device"
    node.mkdir(parents=True)
    (node / "module_id").write_text("5\n")
    assert [bool(faults.holders(module, tmp_path)) for module in (5, 7)] == [True, False]
    busy = RuntimeError("synStatus=26 [Generic failure] Device acquire failed.")
    assert "held now by python (pid 12); end that" in str(faults.not_acquired(busy, tmp_path))
    nobody = str(faults.not_acquired(busy, tmp_path / "empty"))
    assert "look on the host: fuser" in nobody


LOST = "synStatus=17 [Device is in reset] Device synchronize failed"
REFUSED = "Graph compile failed. synStatus=synStatus 26 [Generic failure]. "
SIZED = "Allocation failed for size::1073741824 (1024)MB"


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        (LOST, DeviceLostError, "stopped working while decoding .synStatus=17"),
        ("Synapse detected a device critical error", DeviceLostError, "start a new process"),
        (
            REFUSED,
            BackendError,
            r"refused a graph while decoding \(Graph compile failed.*26.*\); open",
        ),
        ("Habana exception raised from X", BackendError, "Gaudi's software failed while decoding"),
        (SIZED, DeviceMemoryError, r"size::1073741824 \(1024\)MB\): 93.00 GiB of 94.00 GiB"),
    ],
)
def test_the_drivers_texts_become_sentences(text: str, kind: type, says: str) -> None:
    backend = DeviceBackend(Bridge(Gaudi()))
    for error in (RuntimeError(text), _wrapped(text)):
        found = backend.explain(error)
        assert type(found) is kind
        with pytest.raises(kind, match=says):
            raise found
    explained = BackendError("it is known")
    explained.__cause__ = RuntimeError(text)
    for other in (RuntimeError("shapes do not match"), KeyError(text), explained):
        assert backend.explain(other) is None


def _wrapped(text: str) -> Exception:
    """Return the error as torch.compile raises it on."""
    try:
        try:
            raise RuntimeError(text)
        except RuntimeError as inner:
            raise torch._dynamo.exc.TorchDynamoException("backend='hpu_backend' raised") from inner
    except Exception as error:
        return error


def test_a_card_lost_while_it_is_waited_for_is_told() -> None:
    hpu = Gaudi()
    backend = DeviceBackend(Bridge(hpu))

    def lost() -> None:
        raise RuntimeError(LOST)

    hpu.later(lost)
    with pytest.raises(DeviceLostError, match="hl-smi"):
        backend.synchronize()
