"""Stopwatch, memory and what NVML tells, on doubles."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from support.cuda_double import doubled_backend

from lantern_accel.generation.engines import Engines
from lantern_accel.generation.measurements import Measurements
from lantern_accel.strategy.trees import EAGLE2_TREE, NAIVE_EXTEND_57
from lantern_accel.strategy.values import Sampling, named_strategy
from lantern_accel.testing import tiny
from lantern_accel_cuda import meters
from lantern_accel_cuda.meters import Card
from lantern_accel_cuda.spec import Spec


class NVMLError(Exception):
    pass


def nvml(**answers: object) -> ModuleType:
    """Return a double of pynvml; a function without an answer raises, as on a card that lacks it."""
    module = ModuleType("pynvml")
    values: dict[str, object] = {
        "nvmlDeviceGetTotalEnergyConsumption": 123456,
        "nvmlDeviceGetUUID": "GPU-1234-56",
        "nvmlDeviceGetEnforcedPowerLimit": 350_000,
        "nvmlDeviceGetPowerUsage": 101_500,
        "nvmlDeviceGetClockInfo": {"sm": 1395, "mem": 9501},
        "nvmlDeviceGetMaxClockInfo": {"sm": 1695},
        "nvmlDeviceGetTemperature": 45,
        "nvmlDeviceGetComputeMode": 0,
        "nvmlDeviceGetComputeRunningProcesses": [
            SimpleNamespace(pid=os.getpid()),
            SimpleNamespace(pid=1),
            SimpleNamespace(pid=2),
        ],
        **answers,
    }

    def function(name: str):
        def ask(handle: object, *given: str) -> object:
            assert handle == "handle of GPU-1234-56"
            answer = values[name]
            if answer is None:
                raise NVMLError("Not Supported")
            return answer[given[0]] if given and isinstance(answer, dict) else answer

        return ask

    vars(module).update({name: function(name) for name in values})
    vars(module).update(
        NVMLError=NVMLError, NVML_CLOCK_SM="sm", NVML_CLOCK_MEM="mem", NVML_TEMPERATURE_GPU="gpu",
        NVML_COMPUTEMODE_EXCLUSIVE_PROCESS=3, nvmlInit=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "550.54.15",
        nvmlDeviceGetHandleByUUID=lambda uuid: f"handle of {uuid}",
    )  # fmt: skip
    return module


def test_facts_name_the_card_its_driver_and_its_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    backend, _ = doubled_backend(monkeypatch)
    facts = backend.facts()
    assert (facts.name, facts.driver) == ("Double of a GPU", "550.54.15")
    assert facts.architecture == "compute capability 8.6"
    assert facts.memory_bytes == 24 * 2**30
    assert facts.notes == ("preset=safe, graph=step",)
    assert facts.readings == (
        "uuid GPU-1234-56",
        "clock_mhz 1395",
        "clock_limit_mhz 1695",
        "memory_clock_mhz 9501",
        "power_w 101.5",
        "power_limit_w 350.0",
        "temperature_c 45",
        "other_processes 2",
    )
    assert backend.energy_mj() == 123456
    assert backend.support("energy")


@pytest.mark.parametrize("mode, places", [(0, None), (3, [{}]), (None, None)])
def test_a_gpu_in_exclusive_mode_is_held_by_one_process(
    monkeypatch: pytest.MonkeyPatch, mode: int | None, places: object
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlDeviceGetComputeMode=mode))
    doubled_backend(monkeypatch)
    assert Spec().processes(0) == places


#: Other answers of NVML, each of which changes from one moment to the next, or with another card.
LATER = {
    "nvmlDeviceGetTotalEnergyConsumption": 7,
    "nvmlDeviceGetEnforcedPowerLimit": 300_000,
    "nvmlDeviceGetPowerUsage": 99_000,
    "nvmlDeviceGetClockInfo": {"sm": 210, "mem": 405},
    "nvmlDeviceGetMaxClockInfo": {"sm": 2100},
    "nvmlDeviceGetTemperature": 71,
    "nvmlDeviceGetComputeRunningProcesses": [],
}


def test_what_is_kept_of_measurements_serves_whatever_the_card_reads_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = named_strategy("auto", static=NAIVE_EXTEND_57, dynamic=EAGLE2_TREE)
    keys = []
    for number, answers in enumerate(({}, LATER)):
        monkeypatch.setitem(sys.modules, "pynvml", nvml(**answers))
        backend, double = doubled_backend(monkeypatch)
        double.free -= number * 2**29
        model = tiny.tiny_model(backend, backend.device, torch.float32)
        auto = Measurements(Engines(model, backend, torch.float32))
        named = auto.key(usual, 1, Sampling()), auto.tree_key(usual, 1.0)
        keys.append((backend.facts().notes, *named))
        backend.close()
    assert keys[0] == keys[1]


def test_without_nvml_nothing_is_known_and_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    backend, _ = doubled_backend(monkeypatch)
    assert backend.energy_mj() is None
    assert backend.facts().driver is None
    assert len(backend.facts().notes) == 1
    assert not backend.support("energy")


def test_the_stopwatch_reads_events_around_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, double = doubled_backend(monkeypatch)
    with backend.stopwatch() as watch:
        double.clock += 3.0
        double.done.append("work")
    assert watch.seconds == pytest.approx(3.25)
    assert double.done[0] == "host waits for the device"
    assert [line.split()[0] for line in double.done[1:]] == ["event", "work", "event", "host"]


def test_a_stopwatch_does_not_hide_the_error_in_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, double = doubled_backend(monkeypatch)
    with pytest.raises(KeyError), backend.stopwatch():
        double.lost = "CUDA error: unspecified launch failure"
        raise KeyError("first")


def test_memory_counts_what_others_and_the_allocator_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, double = doubled_backend(monkeypatch)
    double.allocated = 3 * 2**30
    double.pools["a"] = 2**30  # reserved, and free for tensors
    use = backend.memory()
    assert (use.in_use, use.limit) == (3 * 2**30, 24 * 2**30)
    assert use.free == 20 * 2**30 + 2**30


def test_the_memory_s_clock_is_read_while_the_gpu_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "LOAD", 0.0)
    asked: list[str] = []

    class Clocks(dict[str, int]):
        """At rest until the host has given the GPU something to do."""

        def __getitem__(self, which: str) -> int:
            asked.append(double.done[-1] if double.done else "nothing")
            return {"sm": 1395, "mem": 9501 if copies else 405}[which]

    copies: list[int] = []
    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlDeviceGetClockInfo=Clocks()))
    backend, double = doubled_backend(monkeypatch)
    honest = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x: copies.append(1) or honest(x))
    assert backend.conditions().memory_clock_mhz == 9501
    assert double.done == ["host waits for the device"] and asked[-1] == "nothing"
    assert backend.conditions().memory_clock_mhz == 9501 and len(copies) == 1


@pytest.mark.parametrize("counter", ["energy_accumulator", "power"])
def test_amd_s_counter_is_read_in_its_own_unit(
    counter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    amdsmi = ModuleType("amdsmi")
    counted = {counter: 1_000_000, "counter_resolution": 15.3, "timestamp": 1}
    vars(amdsmi)["amdsmi_get_energy_count"] = lambda handle: counted if handle == "card 1" else {}
    monkeypatch.setitem(sys.modules, "amdsmi", amdsmi)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "_get_amdsmi_handler", lambda i: f"card {i}", raising=False)
    for name, value in {"clock_rate": 1900, "power_draw": 250, "temperature": 61}.items():
        monkeypatch.setattr(torch.cuda, name, lambda index, value=value: value)
    card = Card(1)
    assert card.energy_mj() == 15_300  # 15.3 microjoules a count
    assert card.conditions() == {"clock_mhz": 1900, "power_w": 250, "temperature_c": 61}
    assert card.notes() == ("clock_mhz 1900", "power_w 250", "temperature_c 61")
