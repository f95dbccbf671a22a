"""What of a cluster is measured, and the worker that measures; no Ray in sight."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from lantern_accel.distributed import measuring
from lantern_accel.distributed.fleet import Kind
from lantern_accel.distributed.measuring import Gauge, Measured, measure_fleet, models_of
from lantern_accel.errors import BackendError, RequestError

CLUSTER = {"CPU": 8.0, "GPU": 4.0, "memory": 1e9, "node:a": 1.0}


def test_every_kind_is_measured_once_and_types_of_cards_apart():
    assert [one.name for one in models_of(CLUSTER, "auto")] == ["cpu", "gpu"]
    assert models_of(CLUSTER, "GPU=4") == [Kind("GPU", 1, "gpu")]
    typed = {**CLUSTER, "accelerator_type:A100": 1.0, "accelerator_type:H100": 1.0}
    assert [one.name for one in models_of(typed, "auto")] == ["cpu", "gpu-a100", "gpu-h100"]
    with pytest.raises(RequestError, match="no device to measure"):
        models_of({"memory": 1.0}, "auto")


def test_the_worker_runs_the_command_and_goes_on_where_it_was_broken_off(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring.tempfile, "gettempdir", lambda: str(tmp_path))
    calls: list[list[str]] = []
    ends = iter([(2, "the driver fell over"), (0, "")])

    def run(call: list[str], **more: Any) -> Any:
        calls.append(call)
        code, said = next(ends)
        with open(call[call.index("-o") + 1], "a") as file:
            file.write("cell ")
        return SimpleNamespace(returncode=code, stderr=f"noise\n{said}\n")

    monkeypatch.setattr(measuring.subprocess, "run", run)
    gauge = Gauge("cpu")
    assert gauge.answer() == "cpu"
    assert gauge.measure(["--quick"], "cpu-1") == (b"cell ", "the driver fell over")
    assert gauge.measure(["--quick"], "cpu-1") == (b"cell cell ", "")
    assert calls[0][:4] == [sys.executable, "-m", "lantern_accel", "profile"]
    assert "--resume" not in calls[0] and "--resume" in calls[1]
    assert not list(tmp_path.rglob("*.json"))  # what was given back is not kept


class Ray:
    """Stands for Ray: each device answers as the test says."""

    class exceptions:
        class RayError(Exception):
            pass

        class GetTimeoutError(RayError):
            pass

    def __init__(self, **answers: Any) -> None:
        self.answers, self.killed = answers, 0

    def cluster_resources(self) -> dict[str, float]:
        return CLUSTER

    def remote(self, kind: type) -> Any:
        outer = self

        class Handle:
            def options(self, **more: Any) -> Handle:
                return self

            def remote(self, device: str) -> Any:
                def answering() -> Any:
                    return outer.answers[device]

                answer = SimpleNamespace(remote=lambda: answering()[0])
                measure = SimpleNamespace(remote=lambda words, key: answering()[1])
                return SimpleNamespace(answer=answer, measure=measure)

        return Handle()

    def get(self, value: Any, timeout: float | None = None) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    def kill(self, worker: Any) -> None:
        self.killed += 1


def test_a_silent_device_is_named_and_a_lost_one_costs_its_own_run(tmp_path):
    lost = Ray.exceptions.RayError("The actor died\nstack")
    ray = Ray(cpu=("cpu", (b"{}", "")), gpu=(Ray.exceptions.GetTimeoutError(), None))
    said: list[str] = []
    found = list(measure_fleet(ray, models_of(CLUSTER, "auto"), [], patience=3, say=said.append))
    assert found == [
        Measured("cpu", b"{}", ""),
        Measured("gpu", b"", "it did not answer within 3 s"),
    ]
    assert ray.killed == 2 and said == ["measuring cpu", "measuring gpu"]
    ray = Ray(cpu=("cpu", lost), gpu=("gpu", (b"part", "a cell failed")))
    found = list(measure_fleet(ray, models_of(CLUSTER, "auto"), []))
    assert found[0].error == "its worker was lost (The actor died)"
    written = measuring.write_runs(tmp_path, iter(found), said.append)
    assert [path.name for path in written] == ["gpu.json"]
    assert "gpu: a cell failed" in said
    with pytest.raises(BackendError, match="cpu: its worker was lost"):
        measuring.write_runs(tmp_path, iter(found[:1]), said.append)
