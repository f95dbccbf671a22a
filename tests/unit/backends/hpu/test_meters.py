"""Opening the device through the documented API: its facts, clock, memory, energy and counters."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.gaudi import (
    GIB,
    FusedRMSNorm,
    FusedSDPA,
    Gaudi,
    Metric,
    RotaryPosEmbeddingMode,
    apply_rotary_pos_emb,
    on_cpu,
)

from lantern_accel.errors import BackendError
from lantern_accel_hpu import environment
from lantern_accel_hpu.backend import DeviceBackend
from lantern_accel_hpu.bridge import Bridge
from lantern_accel_hpu.meters import EnergyMeter
from lantern_accel_hpu.spec import Spec


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch):
    """Install a double of the SDK as modules, with the kernels that are named."""

    def make(*, lazy: bool = False, kernels: bool = True) -> Gaudi:
        hpu = Gaudi(lazy=lazy)
        marks: list[str] = hpu.log
        parts: dict[str, dict[str, Any]] = {
            "": {},
            ".torch": {},
            ".torch.hpu": {name: getattr(hpu, name) for name in dir(hpu) if name[0] != "_"},
            ".torch.core": {
                "mark_step": lambda device_str="", sync=False: marks.append("mark_step")
            },
            ".torch.utils": {},
            ".torch.utils.internal": {"is_lazy": lambda: lazy},
            ".torch.dynamo": {},
            ".torch.dynamo.compile_backend": {},
            ".torch.dynamo.compile_backend.config": {"use_inplace_index_copy": True},
            ".torch.hpex": {},
        }
        if kernels:
            parts[".torch.hpex.kernels"] = {
                "FusedSDPA": FusedSDPA,
                "RotaryPosEmbeddingMode": RotaryPosEmbeddingMode,
                "apply_rotary_pos_emb": apply_rotary_pos_emb,
            }
            parts[".torch.hpex.normalization"] = {"FusedRMSNorm": FusedRMSNorm}
        for name, content in parts.items():
            module = ModuleType(f"habana_frameworks{name}")
            vars(module).update(content, __path__=[])
            monkeypatch.setitem(sys.modules, module.__name__, module)
        for name in parts:  # attributes, as importing a submodule sets them
            parent, _, child = f"habana_frameworks{name}".rpartition(".")
            if parent:
                monkeypatch.setattr(
                    sys.modules[parent], child, sys.modules[f"{parent}.{child}"], raising=False
                )
        return hpu

    monkeypatch.delenv("LANTERN_HPU_SOFTWARE", raising=False)
    monkeypatch.delenv("LANTERN_HPU_MODE", raising=False)
    monkeypatch.setattr(environment, "_ours", {})
    return make


def hlml(monkeypatch: pytest.MonkeyPatch, modules: tuple[int, ...], fails: str = "") -> None:
    """Install a double of habana-pyhlml: a card a module number, 7 J used by each."""

    def start() -> None:
        print("Failed to load libhlml" if fails else "", end="")
        if fails:
            raise RuntimeError(fails)

    double = SimpleNamespace(
        hlmlInit=start,
        hlmlGetDriverVersion=lambda: b"1.24.1-abc\n",
        hlmlDeviceGetCount=lambda: len(modules),
        hlmlDeviceGetHandleByIndex=lambda index: index,
        hlmlDeviceGetModuleID=lambda device: modules[device],
        hlmlDeviceGetTotalEnergyConsumption=lambda device: 7000 + device,
    )
    monkeypatch.setitem(sys.modules, "pyhlml", double)


def test_the_device_opens_through_the_documented_api(sdk, monkeypatch) -> None:
    hpu = sdk()
    hlml(monkeypatch, (4,))
    backend = Spec().open(0, {})
    facts = backend.facts()
    assert (facts.name, facts.vendor, facts.memory_bytes) == ("GAUDI2", "Intel", 94 * GIB)
    assert facts.driver == "1.24.1-abc"
    assert facts.notes == ("mode: compile", "fused kernels: FusedSDPA, FusedRMSNorm, RoPE")
    assert not backend.simulated
    assert backend.support("capture") and backend.support("energy") and backend.support("memory")
    assert backend.energy_mj() == 7000
    assert str(backend.dtypes().compute) == "torch.bfloat16"
    hpu.log.clear()
    with backend.stopwatch() as watch:
        hpu.log.append("work")
    assert hpu.log == ["synchronize", "record", "work", "record", "event.synchronize"]
    assert 0 < watch.seconds < 5
    backend.reset_peak_memory()
    assert hpu.log[-1] == "reset_peak_memory_stats"
    assert backend.memory().limit == 94 * GIB
    backend.close()


def test_the_compiler_is_kept_from_losing_writes(sdk) -> None:
    sdk()
    assert Bridge.from_sdk(fused=True).compile_options() == {"use_inplace_index_copy": False}
    vars(sys.modules["habana_frameworks.torch.dynamo.compile_backend.config"]).pop(
        "use_inplace_index_copy"
    )
    assert Bridge.from_sdk(fused=True).compile_options() is None


def test_lazy_mode_is_flushed_where_time_is_taken(sdk) -> None:
    hpu = sdk(lazy=True)
    backend = Spec().open(0, {})
    assert backend.mode == "graph"
    hpu.log.clear()
    with backend.stopwatch():
        pass
    want = ["mark_step", "synchronize", "record", "mark_step", "record", "event.synchronize"]
    assert hpu.log == want
    backend.synchronize()
    assert hpu.log[-2:] == ["mark_step", "synchronize"]


@pytest.mark.parametrize(("kernels", "fused"), [(False, True), (True, False)])
def test_a_missing_kernel_and_one_that_is_not_wanted_are_told(sdk, kernels, fused) -> None:
    sdk(kernels=kernels)
    backend = Spec().open(0, {"fused": fused})
    assert backend.kernels.names == ()
    assert "fused kernels: none" in backend.facts().notes


def test_an_sdk_that_refuses_to_load_says_why(sdk, monkeypatch: pytest.MonkeyPatch) -> None:
    sdk()
    monkeypatch.setitem(sys.modules, "habana_frameworks.torch.utils.internal", None)
    with pytest.raises(BackendError, match=r"habana_frameworks does not load: .*; use the torch"):
        Spec().open(0, {})


def test_a_second_card_is_named_by_the_environment(sdk) -> None:
    sdk()
    with pytest.raises(BackendError, match=r"gives this process 1 of .* HABANA_VISIBLE_MODULES=1"):
        Spec().open(1, {})


# --- energy -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "modules", "millijoules", "reason"),
    [
        ({}, (3,), 7000, ""),
        ({"HABANA_VISIBLE_MODULES": "5,2"}, (0, 2, 5), 7002, ""),
        ({"HLS_MODULE_ID": "2"}, (0, 2, 5), 7001, ""),
        ({}, (0, 1), None, "several Gaudis; set HABANA_VISIBLE_MODULES"),
        ({"HABANA_VISIBLE_MODULES": "9"}, (0, 1), None, "several Gaudis"),
    ],
)
def test_the_card_is_found_by_its_module(
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    modules: tuple[int, ...],
    millijoules: int | None,
    reason: str,
) -> None:
    hlml(monkeypatch, modules)
    meter = EnergyMeter(0, environ)
    assert meter.millijoules() == millijoules
    assert reason in meter.reason


def test_no_meter_is_a_reason_and_nothing_on_the_output(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "pyhlml", None)
    assert "habana-pyhlml is not installed" in EnergyMeter(0).reason
    hlml(monkeypatch, (0,), fails="Lib not initialized")
    meter = EnergyMeter(0)
    assert meter.millijoules() is None
    assert meter.reason == "no energy meter: habana-pyhlml says Lib not initialized"
    assert capsys.readouterr().out == ""  # the library prints, and --json writes there


def test_a_meter_that_fails_later_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    hlml(monkeypatch, (0,))
    meter = EnergyMeter(0)

    def lost(device: int) -> int:
        raise RuntimeError("AIP Lost")

    monkeypatch.setattr(sys.modules["pyhlml"], "hlmlDeviceGetTotalEnergyConsumption", lost)
    assert meter.millijoules() is None
    assert meter.reason.endswith("AIP Lost")


# --- memory -------------------------------------------------------------------------------------


def test_a_cache_that_does_not_fit_says_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    hpu = Gaudi(limit=2 * GIB)
    backend = on_cpu(DeviceBackend(0, Bridge(hpu)))
    layout = backend.kv_layout(36, 16, 1400, 20, 64, torch.bfloat16)
    row = layout.nbytes // 16
    says = (
        rf"no room for a key-value cache of {layout.nbytes / GIB:.2f} GiB: 1.00 GiB of 2.00 GiB are "
        rf"free; at most {GIB // row} of its 16 rows fit .* \(batch_size\)"
    )
    with pytest.raises(BackendError, match=says):
        backend.allocate(layout)

    def refuse(*shape: object, **options: object) -> None:
        raise RuntimeError("Allocation failed for size::12345 (0)MB")

    small = backend.kv_layout(1, 1, 64, 4, 16, torch.float32)
    monkeypatch.setattr(torch, "zeros", refuse)
    with pytest.raises(BackendError, match=r"no room for a key-value cache of 0\.00 GiB"):
        backend.allocate(small)


def test_an_error_while_decoding_is_explained_where_it_is_the_memorys() -> None:
    backend = DeviceBackend(0, Bridge(Gaudi()))
    refused = RuntimeError("Allocation failed for size::1073741824 (1024)MB")
    says = "ran out of memory while decoding when it asked for 1.00 GiB: 93.00 GiB of 94.00 GiB are"
    assert says in str(backend.explain(refused))
    assert backend.explain(RuntimeError("shapes do not match")) is None
    assert backend.explain(KeyError("Allocation failed")) is None


# --- counters -----------------------------------------------------------------------------------


def test_counters_name_what_fell_back_and_leave_hits_out() -> None:
    hpu = Gaudi()
    hpu.compile(3)
    hpu.fall_back("aten::sort.stable")
    hpu.counted["recipe_cache"] = Metric(TotalHit=9, RecipeHit={"r": 9}, TotalMiss=2, RecipeMiss={})
    assert DeviceBackend(0, Bridge(hpu)).counters() == {
        "graph_compilation.TotalNumber": 3,
        "graph_compilation.TotalTime": 3000,
        "cpu_fallback.TotalNumber": 1,
        "cpu_fallback.aten::sort.stable": 1,
        "recipe_cache.TotalMiss": 2,
    }


def test_phases_are_ranges_of_the_profiler() -> None:
    backend = DeviceBackend.for_tracing()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile, backend.phase("verify"):
        torch.ones(2).add_(1)
    assert "lantern.verify" in {event.key for event in profile.key_averages()}
