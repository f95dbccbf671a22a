"""Steps are recorded with the graphs that a device's maker registers, and only where these are right."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import beads, slate
from support.processes import passes
from torch.torch_version import TorchVersion

from lantern_accel.device.plugins import open_backend
from lantern_accel.errors import BackendError, NotCapturableError
from lantern_accel.testing import tiny
from lantern_accel_torch import graphs, meters, selfcheck
from lantern_accel_torch.backend import DeviceBackend
from lantern_accel_torch.options import Options

registers = pytest.mark.skipif(
    TorchVersion(torch.__version__) < slate.SINCE or shutil.which("g++") is None,
    reason=f"needs torch {slate.SINCE} and g++",
)

#: Decodes on the device in a process of its own: quick checks of the device, one of its graphs.
SCRIPT = """
import json, sys
from pathlib import Path
from support import slate
slate.register(Path(sys.argv[1]), sys.argv[2])
from lantern_accel.device.plugins import open_backend
from lantern_accel.testing import tiny
from lantern_accel_torch import selfcheck
selfcheck.CHECKS, selfcheck.RECORDED = ("kv.round_trip", "attention.float64"), (sys.argv[3],)
with open_backend("slate", json.loads(sys.argv[4])) as backend:
    engine = tiny.tiny_engine(backend, "lantern++")
    before = slate.replays()
    with tiny.capture_engine(backend, engine) as (prefill, step):
        tokens = [tiny.decode_tokens(engine, seed, prefill, step).tolist() for seed in (0, 1)]
        how = step.how
    notes, able = backend.facts().notes, backend.support("capture")
print(json.dumps({"tokens": tokens, "notes": notes, "able": [able.yes, able.reason], "how": how,
                  "replays": slate.replays() - before}))
"""


@pytest.fixture(scope="module")
def device() -> Path:
    return slate.library()


@pytest.fixture(scope="module")
def expected() -> list[list[list[int]]]:
    """What the CPU's operators draw."""
    with open_backend("cpu", {"native": "off"}) as backend:
        engine = tiny.tiny_engine(backend, "lantern++")
        return [tiny.decode_tokens(engine, seed).tolist() for seed in (0, 1)]


def drawn(
    device: Path, cache: Path, graphs: str, check: str = "replay.kind", **options: str
) -> dict[str, Any]:
    call = [sys.executable, "-c", SCRIPT, str(device), graphs, check, json.dumps(options)]
    path = os.pathsep.join(filter(None, sys.path))
    env = {**os.environ, "PYTHONPATH": path, "LANTERN_ACCEL_CACHE": str(cache)}
    done = subprocess.run(call, capture_output=True, text=True, timeout=600, env=env, check=False)
    return dict(json.loads(passes(done).splitlines()[-1]))


@registers
@pytest.mark.long
def test_a_registered_graph_class_records_steps(
    device: Path, tmp_path: Path, expected: object
) -> None:
    found = drawn(device, tmp_path, "right")
    assert found["tokens"] == expected
    assert (found["how"], found["able"]) == ("recorded", [True, ""])
    assert found["replays"] > 10
    assert "steps: recorded" in found["notes"]


@registers
@pytest.mark.long
@pytest.mark.parametrize(("graphs", "options"), [("none", {}), ("right", {"capture": "off"})])
def test_without_graphs_operators_run_one_by_one(
    graphs: str, options: dict[str, str], device: Path, tmp_path: Path, expected: object
) -> None:
    found = drawn(device, tmp_path, graphs, **options)
    assert found["tokens"] == expected
    assert (found["how"], found["replays"]) == ("eager", 0)
    assert ("not supported" if graphs == "none" else "capture=off") in found["able"][1]


@registers
@pytest.mark.long
def test_graphs_that_replay_stale_results_are_not_used(
    device: Path, tmp_path: Path, expected: object
) -> None:
    for _ in range(2):  # checked; then known
        found = drawn(device, tmp_path, "stale", "replay.eager")
        assert found["tokens"] == expected
        assert (found["how"], found["replays"]) == ("eager", 0)
        assert "replay.eager" in found["able"][1]


# --- a device's own class, and faults ---------------------------------------------------------------


class Graph:
    """A device's own graph class: what it records and replays is counted."""

    fails = ""

    def __init__(self) -> None:
        self.said: list[str] = []

    def capture_begin(self) -> None:
        self.said.append("begin")

    def capture_end(self) -> None:
        self.said.append("end")
        if self.fails:
            raise RuntimeError(self.fails)

    def replay(self) -> None:
        self.said.append("replay")

    def reset(self) -> None:
        self.said.append("reset")


@pytest.fixture
def beaded(monkeypatch: pytest.MonkeyPatch) -> DeviceBackend:
    """A device whose module has a graph class, on streams that only count as such."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    own = SimpleNamespace(BEADSGraph=Graph)
    monkeypatch.setattr(torch, "beads", own, raising=False)
    monkeypatch.setattr(torch, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.accelerator, "set_stream", lambda other: None)
    monkeypatch.setattr(Graph, "fails", "")
    return DeviceBackend(0, beads.Beads("beads", 1))


def test_a_device_s_own_class_serves_where_torch_has_none(beaded: DeviceBackend) -> None:
    runs: list[int] = []
    replay = beaded.capture(lambda: runs.append(1))
    assert len(runs) == graphs.WARMUPS + 1
    replay()
    graph = replay._graph  # type: ignore[attr-defined]
    beaded.close()
    assert graph.said == ["begin", "end", "replay", "reset"]
    with pytest.raises(BackendError, match="released"):
        replay()


def test_what_is_not_recorded_is_said_once_and_not_tried_again(
    beaded: DeviceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Graph, "fails", "the host read\nmore")
    with pytest.raises(NotCapturableError, match=r"\(the host read\).*capture=off"):
        beaded.capture(lambda: None)
    with pytest.raises(NotCapturableError, match="an earlier recording failed"):
        beaded.capture(lambda: None)


def test_a_step_s_own_error_ends_the_recording(beaded: DeviceBackend) -> None:
    count = iter(range(9))

    def step() -> None:
        if next(count) == graphs.WARMUPS:
            raise ValueError("once recorded")

    with pytest.raises(NotCapturableError, match="once recorded"):
        beaded.capture(step)


def test_a_driver_that_ends_the_process_leaves_its_verdict(
    beaded: DeviceBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path))
    monkeypatch.setattr(selfcheck, "CHECKS", ())
    key = selfcheck.key_of(beads.Beads("beads", 1), 0)

    def first_failure(backend: DeviceBackend, names: tuple[str, ...]) -> str:
        if names == selfcheck.RECORDED:
            raise SystemExit
        return ""

    monkeypatch.setattr(selfcheck, "_first_failure", first_failure)
    with pytest.raises(SystemExit):
        selfcheck.examine(beaded, key)
    verdict = selfcheck.load_verdict(key)
    assert verdict is not None and verdict.passed
    assert verdict.not_recorded == selfcheck.INTERRUPTED


def test_the_option_is_read() -> None:
    assert Options.read({}) == Options("on", True, False)
    assert Options.read({"capture": "on"}).capture_asked
    assert not Options.read({"capture": "off"}).capture
    with pytest.raises(BackendError, match="on or off"):
        Options.read({"capture": "yes"})


@pytest.mark.parametrize(
    ("kind", "watts"), [("xpu", 150.5), ("beads", None)], ids=["xpu", "another unit"]
)
def test_power_is_read_where_its_unit_is_known(
    kind: str, watts: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = SimpleNamespace(power_draw=lambda device: 150.5)
    monkeypatch.setattr(torch, kind, own, raising=False)
    backend = DeviceBackend(0, beads.Beads(kind, 1))
    assert backend.conditions().power_w == watts
    assert (backend.energy_mj() is None) == (watts is None)
    backend.close()
    assert "power meter" not in [one.name for one in threading.enumerate()]


def test_power_that_is_read_now_and_then_adds_up_to_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "EVERY", 1000.0)
    shown, clock = iter([100.0, 200.0, None, 0.0]), iter([0.0, 1.0, 3.0, 5.0])
    monkeypatch.setattr(meters, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    meter = meters.PowerMeter(lambda: next(shown))
    assert meter.millijoules() == 150_000  # a second at 100 to 200 W
    assert meter.millijoules() == 550_000  # two more, of which nothing is known but the 200 W
    assert meter.millijoules() == 750_000
    meter.close()
