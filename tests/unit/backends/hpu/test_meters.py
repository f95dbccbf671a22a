"""Opening the device through the documented API: its facts, clock, memory, energy and counters."""

from __future__ import annotations

import builtins
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from support import gaudi
from support.gaudi import GIB, Gaudi, Metric, on_cpu

from lantern_accel.device.backend import dtype_policy
from lantern_accel.errors import BackendError
from lantern_accel.strategy.choices import key_of
from lantern_accel.strategy.values import AUTO, DynamicTree, NoTree, named_strategy
from lantern_accel.testing.result import Failed
from lantern_accel_hpu import bridge, cards, checks, environment
from lantern_accel_hpu.backend import DeviceBackend, arithmetic
from lantern_accel_hpu.bridge import UNSAFE, Bridge
from lantern_accel_hpu.meters import EnergyMeter
from lantern_accel_hpu.spec import Spec


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch):
    """Install the double of the SDK as modules, with its fused kernels."""

    def make(*, lazy: bool = False, modules: int = 1) -> Gaudi:
        hpu = Gaudi(lazy=lazy, modules=modules)
        monkeypatch.setattr(DeviceBackend, "_arithmetic", (True, True))  # it computes nothing
        for name, content in gaudi.sdk(hpu).items():
            module = ModuleType(name)
            vars(module).update(content, __path__=[])
            monkeypatch.setitem(sys.modules, name, module)
            parent, _, child = name.rpartition(".")
            if parent:  # an attribute, as importing a submodule sets it
                monkeypatch.setattr(sys.modules[parent], child, module, raising=False)
        return hpu

    # Tensors of the device need a real bridge; the driver's part of a first use is current_device().
    monkeypatch.setattr(bridge, "_allocate", lambda: None)
    return make


def test_what_float32_is_like_is_measured(monkeypatch) -> None:
    """Sums of products aligned to 26 bits, and a quotient by a reciprocal, are told from IEEE's."""
    assert arithmetic(torch.device("cpu")) == (True, True)

    def aligned(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        parts = left.double() * right.double().t()
        last = torch.exp2(torch.floor(torch.log2(parts.amax(1, keepdim=True))) - 25)
        return ((parts / last).trunc() * last).sum(1, keepdim=True).float()

    monkeypatch.setattr(torch, "matmul", aligned)
    monkeypatch.setattr(torch, "div", lambda above, below: above * (1 / below))
    assert arithmetic(torch.device("cpu")) == (False, False)


def test_the_device_opens_through_the_documented_api(sdk, monkeypatch) -> None:
    hpu = sdk()
    monkeypatch.setitem(sys.modules, "pyhlml", gaudi.hlml([4]))
    monkeypatch.setattr(environment, "sdk_version", lambda: "1.24.1")
    backend = Spec().open(0, {})
    facts = backend.facts()
    assert (facts.name, facts.vendor, facts.memory_bytes) == ("GAUDI2", "Intel", 94 * GIB)
    assert (facts.driver, facts.sdk) == ("1.24.1-abc", "habana-torch-plugin 1.24.1")
    kernels = "fused kernels: FusedSDPA, FusedRMSNorm, RoPE"
    division = "float32 division: correctly rounded"
    assert facts.notes == ("mode: compile", kernels, "float32 matmuls: IEEE", division)
    assert not backend.simulated
    assert backend.support("capture") and backend.support("energy") and backend.support("memory")
    assert backend.energy_mj() == 7000
    assert str(dtype_policy(backend).compute) == "torch.bfloat16"
    hpu.log.clear()
    with backend.stopwatch() as watch:
        hpu.log.append("work")
    assert hpu.log == ["synchronize", "record", "work", "record", "event.synchronize"]
    assert 0 < watch.seconds < 5
    backend.memory(new_peak=True)
    assert hpu.log[-1] == "reset_peak_memory_stats"
    assert backend.memory().limit == 94 * GIB
    backend.close()


def test_the_compiler_is_kept_from_losing_and_reordering_writes(sdk, monkeypatch) -> None:
    sdk()
    assert Bridge.from_sdk(fused=True).compile_options() == dict.fromkeys(UNSAFE, False)
    monkeypatch.setenv("PT_HPU_USE_EAGER_FALLBACK", "1")  # what the user set stays
    assert "use_eager_fallback" not in (Bridge.from_sdk(fused=True).compile_options() or {})
    config = sys.modules["habana_frameworks.torch.dynamo.compile_backend.config"]
    for name in UNSAFE:
        vars(config).pop(name)
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


@pytest.mark.parametrize("kind", [ImportError, AttributeError])
def test_an_sdk_that_refuses_to_load_says_why(
    sdk, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bridge reads a part of torch's version that only some builds have."""
    sdk()
    real = builtins.__import__

    def refusing(name: str, *rest: object, **more: object) -> object:
        if name == "habana_frameworks.torch.utils.internal":
            raise kind("'NoneType' object has no attribute 'startswith'")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refusing)
    with pytest.raises(BackendError, match=r"habana_frameworks does not load: .*; use the torch"):
        Spec().open(0, {})


# --- cards --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "index", "module"),
    [("", 3, 3), ("", 7, 7), ("2,5", 0, 2), ("2,5", 1, 5), ("4", 0, 4)],
)
def test_any_card_is_opened_as_the_only_one_torch_knows(
    sdk, monkeypatch: pytest.MonkeyPatch, visible: str, index: int, module: int
) -> None:
    hpu = sdk(modules=8)
    if visible:
        monkeypatch.setenv("HABANA_VISIBLE_MODULES", visible)
    backend = Spec().open(index, {})
    assert (hpu.module, str(backend.device)) == (module, "hpu:0")
    assert f"module {module}" in backend.facts().notes
    assert checks.cards_index(backend).detail == f"hpu:0 is module {module}"
    assert Spec().open(index, {}).device == backend.device  # again in the same process
    with pytest.raises(BackendError, match=r"has opened hpu:\d, and a process has one Gaudi"):
        Spec().open(index + 1, {})
    # The software HPU's own answer.
    monkeypatch.setattr(backend.bridge.hpu, "module_id", lambda: 9, raising=False)
    with pytest.raises(Failed, match="this process has module 9"):
        checks.cards_index(backend)
    monkeypatch.setenv("HLS_MODULE_ID", "9")
    with pytest.raises(Failed, match="the driver reads 9"):
        checks.cards_index(backend)


def test_without_a_wish_the_driver_gives_a_free_card(sdk) -> None:
    hpu = sdk(modules=8)
    hpu.busy = {0, 1}
    backend = Spec().open(0, {})
    assert hpu.module == 2
    assert not [note for note in backend.facts().notes if note.startswith("module")]


def test_a_card_that_cannot_be_had_leaves_another_to_be_opened(
    sdk, monkeypatch: pytest.MonkeyPatch
) -> None:
    hpu = sdk(modules=8)
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", "2,5")
    hpu.busy = {5}
    monkeypatch.setattr(bridge, "PATIENCE", 0.0)
    with pytest.raises(BackendError, match="module number 5 cannot be opened: another process"):
        Spec().open(1, {})
    # Not another card in its place; and what failed leaves no trace.
    assert hpu.module is None
    assert os.environ["HABANA_VISIBLE_MODULES"] == "2,5" and "HLS_MODULE_ID" not in os.environ
    assert Spec().open(0, {}) and hpu.module == 2


@pytest.mark.parametrize(
    ("index", "environ", "shown", "used", "says"),
    [
        # There the driver numbers it 0, and refuses the number that it has on the host.
        (5, {}, 1, False, "shows one Gaudi, which is hpu:0"),
        (2, {"HABANA_VISIBLE_MODULES": "2,5"}, 8, False, "HABANA_VISIBLE_MODULES=2,5 leaves this"),
        (3, {}, 8, True, "set HABANA_VISIBLE_MODULES=3 before Python starts"),
        (3, {"HLS_MODULE_ID": "4"}, 8, False, "HLS_MODULE_ID=4 gives this process another"),
    ],
)
def test_a_card_that_this_process_does_not_have(
    sdk, monkeypatch, index: int, environ: dict[str, str], shown: int, used: bool, says: str
) -> None:
    hpu = sdk(modules=8)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(environment, "devices", lambda: ["Gaudi"] * shown)
    if used:
        hpu.current_device()
    with pytest.raises(BackendError, match=says):
        Spec().open(index, {})
    assert {name: os.environ.get(name) for name in environ} == environ
    if not used:
        Spec().open(0, {})
        assert str(hpu.module) == environ.get("HLS_MODULE_ID", str(hpu.module))


# --- energy -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "modules", "millijoules", "reason"),
    [
        ({}, (3,), 7000, ""),
        ({"HABANA_VISIBLE_MODULES": "5"}, (0, 2, 5), 7002, ""),
        ({"HABANA_VISIBLE_MODULES": "5,2", "HLS_MODULE_ID": "2"}, (0, 2, 5), 7001, ""),
        ({"HLS_MODULE_ID": "2"}, (0, 2, 5), 7001, ""),
        ({}, (0, 1), None, "2 such Gaudis; set HABANA_VISIBLE_MODULES"),
        ({"HABANA_VISIBLE_MODULES": "9"}, (0, 1), None, "0 such Gaudis"),
    ],
)
def test_the_card_is_found_by_its_module(
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    modules: tuple[int, ...],
    millijoules: int | None,
    reason: str,
) -> None:
    monkeypatch.setitem(sys.modules, "pyhlml", gaudi.hlml(modules))
    meter = EnergyMeter(cards.module(environ))
    assert meter.millijoules() == millijoules
    assert reason in meter.reason


def test_no_meter_is_a_reason_and_nothing_on_the_output(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "pyhlml", None)
    assert "habana-pyhlml is not installed" in EnergyMeter().reason
    monkeypatch.setitem(sys.modules, "pyhlml", gaudi.hlml([0], fails="Lib not initialized"))
    meter = EnergyMeter()
    assert meter.millijoules() is None
    assert meter.reason == "no energy meter: habana-pyhlml says Lib not initialized"
    assert capsys.readouterr().out == ""  # the library prints, and --json writes there


# --- keys of what is kept -----------------------------------------------------------------------


@pytest.mark.parametrize("fails", ["", "AIP Lost"])
def test_no_reading_is_in_the_key_of_what_is_kept(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Auto and tune measure anew where a key changes: every image, if a reading were part of it."""
    monkeypatch.setattr(DeviceBackend, "_arithmetic", (True, True))
    model = SimpleNamespace(manifest=SimpleNamespace(name="tiny"), weights_hash="0")
    strategy = named_strategy(AUTO, static=NoTree(), dynamic=DynamicTree())
    keys = []
    for number, library in enumerate((gaudi.hlml([0]), gaudi.hlml([0], fails, joules=9))):
        monkeypatch.setitem(sys.modules, "pyhlml", library)
        hpu = Gaudi()
        hpu.in_use += number * GIB
        backend = DeviceBackend(Bridge(hpu))
        hpu.compile_operator(number)
        backend.energy_mj()
        keys.append(key_of("auto", model, backend, torch.bfloat16, strategy, batch=1))
    assert keys[0] == keys[1]


# --- memory -------------------------------------------------------------------------------------


def test_a_cache_that_does_not_fit_says_what_would() -> None:
    hpu = Gaudi(limit=2 * GIB)
    backend = on_cpu(DeviceBackend(Bridge(hpu)))
    layout = backend.kv_layout(36, 6, 1400, 20, 64, torch.bfloat16)
    row = layout.nbytes // 6
    says = (
        rf"no memory for a key-value cache of {layout.nbytes / GIB:.2f} GiB: 1.00 GiB of 2.00 GiB are "
        rf"free; at most {GIB // row} of its 6 rows fit .* \(--batch\)"
    )
    with pytest.raises(BackendError, match=says):
        backend.allocate(layout)


# --- counters -----------------------------------------------------------------------------------


def test_counters_name_what_fell_back_and_leave_hits_out() -> None:
    hpu = Gaudi()
    hpu.compile(3)
    hpu.fall_back("aten::sort.stable")
    hpu.counted["recipe_cache"] = Metric(TotalHit=9, RecipeHit={"r": 9}, TotalMiss=2, RecipeMiss={})
    assert DeviceBackend(Bridge(hpu)).counters() == {
        "graph_compilation.TotalNumber": 3,
        "graph_compilation.TotalTime": 3000,
        "cpu_fallback.TotalNumber": 1,
        "buckets.graphs": 0,
        "cpu_fallback.aten::sort.stable": 1,
        "recipe_cache.TotalMiss": 2,
    }


def test_phases_are_ranges_of_the_profiler() -> None:
    backend = DeviceBackend(Bridge(Gaudi()))
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile, backend.phase("verify"):
        torch.ones(2).add_(1)
    assert "lantern.verify" in {event.key for event in profile.key_averages()}
