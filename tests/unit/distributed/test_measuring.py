"""What of a cluster is measured, and the worker that measures; no Ray in sight."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from lantern_accel.distributed import measuring
from lantern_accel.distributed.fleet import Kind
from lantern_accel.distributed.measuring import Measured, measure, measure_fleet, models_of
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
    assert measure("cpu", ["--quick"], "cpu-1") == (b"cell ", "the driver fell over")
    assert measure("cpu", ["--quick"], "cpu-1") == (b"cell cell ", "")
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
        self.answers, self.options = answers, list[dict[str, Any]]()

    def cluster_resources(self) -> dict[str, float]:
        return CLUSTER

    def remote(self, function: Any) -> Any:
        assert not isinstance(function, type)  # of which Ray would make an actor

        def options(**more: Any) -> Any:
            self.options.append(more)
            return SimpleNamespace(remote=lambda device, *given: self.answers[device][bool(given)])

        return SimpleNamespace(options=options)

    def get(self, value: Any, timeout: float | None = None) -> Any:
        if isinstance(value, Exception):
            raise value
        return value


def test_a_silent_device_is_named_and_a_lost_one_costs_its_own_run(tmp_path):
    lost = Ray.exceptions.RayError("The actor died\nstack")
    ray = Ray(cpu=("cpu", (b"{}", "")), gpu=(Ray.exceptions.GetTimeoutError(), None))
    said: list[str] = []
    found = list(measure_fleet(ray, models_of(CLUSTER, "auto"), [], patience=3, say=said.append))
    assert found == [
        Measured("cpu", b"{}", ""),
        Measured("gpu", b"", "it did not answer within 3 s"),
    ]
    assert said == ["measuring cpu", "measuring gpu"]
    assert [more.get("max_retries") for more in ray.options] == [None, 1, None]
    assert ray.options[0]["num_cpus"] == 8 and ray.options[2]["num_gpus"] == 1
    ray = Ray(cpu=("cpu", lost), gpu=("gpu", (b"part", "a cell failed")))
    found = list(measure_fleet(ray, models_of(CLUSTER, "auto"), []))
    assert found[0].error == "its worker was lost (The actor died)"
    written = measuring.write_runs(tmp_path, iter(found), said.append)
    assert [path.name for path in written] == ["gpu.json"]
    assert "gpu: a cell failed" in said
    with pytest.raises(BackendError, match="cpu: its worker was lost"):
        measuring.write_runs(tmp_path, iter(found[:1]), said.append)
