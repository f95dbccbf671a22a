"""Opening the device through the documented API: its facts, clock, memory, energy and counters."""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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

from lantern_accel.device.backend import dtype_policy
from lantern_accel.errors import BackendError
from lantern_accel.strategy.choices import key_of
from lantern_accel.strategy.values import AUTO, DynamicTree, NoTree, named_strategy
from lantern_accel_hpu import bridge, cards, environment
from lantern_accel_hpu.backend import DeviceBackend, arithmetic
from lantern_accel_hpu.bridge import UNSAFE, Bridge
from lantern_accel_hpu.meters import EnergyMeter
from lantern_accel_hpu.spec import Spec


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch):
    """Install a double of the SDK as modules, with the kernels that are named."""

    def make(*, lazy: bool = False, kernels: bool = True, modules: int = 1) -> Gaudi:
        hpu = Gaudi(lazy=lazy, modules=modules)
        monkeypatch.setattr(DeviceBackend, "_arithmetic", (True, True))  # it computes nothing
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
            ".torch.dynamo.compile_backend.config": dict.fromkeys(UNSAFE, True),
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
    # Tensors of the device need a real bridge; the driver's part of a first use is current_device().
    monkeypatch.setattr(bridge, "_allocate", lambda: None)
    monkeypatch.setattr(cards, "_taken", [])
    monkeypatch.setattr(cards, "_before", {})
    for name in (cards.VISIBLE, cards.MODULE, environment.FALLBACK):
        monkeypatch.setenv(name, "")  # so that whatever a test sets is undone
        monkeypatch.delenv(name)
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
    hlml(monkeypatch, (4,))
    backend = Spec().open(0, {})
    facts = backend.facts()
    assert (facts.name, facts.vendor, facts.memory_bytes) == ("GAUDI2", "Intel", 94 * GIB)
    assert facts.driver == "1.24.1-abc"
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
    assert Spec().open(index, {}).device == backend.device  # again in the same process
    with pytest.raises(BackendError, match=r"has opened hpu:\d, and a process has one Gaudi"):
        Spec().open(index + 1, {})


def test_without_a_wish_the_driver_gives_a_free_card(sdk) -> None:
    hpu = sdk(modules=8)
    hpu.busy = {0, 1}
    backend = Spec().open(0, {})
    assert hpu.module == 2
    assert not [note for note in backend.facts().notes if note.startswith("module")]


def test_a_container_of_one_card_has_no_other_whatever_its_number(sdk, monkeypatch) -> None:
    """There the driver numbers it 0, and refuses the number that it has on the host."""
    sdk()
    monkeypatch.setattr(environment, "devices", lambda: ["Gaudi at /dev/accel/accel0"])
    with pytest.raises(BackendError, match=r"no hpu:5: .* shows one Gaudi, which is hpu:0"):
        Spec().open(5, {})
    Spec().open(0, {})
    assert cards.VISIBLE not in os.environ


def test_a_card_that_cannot_be_had_says_which_and_why(sdk, monkeypatch: pytest.MonkeyPatch) -> None:
    hpu = sdk(modules=8)
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", "2,5")
    with pytest.raises(BackendError, match=r"no hpu:2: HABANA_VISIBLE_MODULES=2,5 leaves 2 Gaudis"):
        Spec().open(2, {})
    hpu.busy = {5}
    monkeypatch.setattr(bridge, "PATIENCE", 0.0)
    with pytest.raises(BackendError, match="module number 5 cannot be opened: another process"):
        Spec().open(1, {})
    # Not another card in its place; and what failed leaves no trace, so that a free one can be opened.
    assert hpu.module is None
    assert os.environ["HABANA_VISIBLE_MODULES"] == "2,5" and "HLS_MODULE_ID" not in os.environ
    assert hpu.module is None and Spec().open(0, {}) and hpu.module == 2


def test_a_card_used_before_is_not_exchanged(sdk, monkeypatch: pytest.MonkeyPatch) -> None:
    hpu = sdk(modules=8)
    hpu.current_device()
    with pytest.raises(BackendError, match=r"set HABANA_VISIBLE_MODULES=3 before Python starts"):
        Spec().open(3, {})
    monkeypatch.setenv("HLS_MODULE_ID", "4")
    with pytest.raises(BackendError, match="HLS_MODULE_ID=4 gives this process another"):
        Spec().open(3, {})


# --- energy -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "modules", "millijoules", "reason"),
    [
        ({}, (3,), 7000, ""),
        ({"HABANA_VISIBLE_MODULES": "5"}, (0, 2, 5), 7002, ""),
        ({"HABANA_VISIBLE_MODULES": "5,2", "HLS_MODULE_ID": "2"}, (0, 2, 5), 7001, ""),
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
    meter = EnergyMeter(cards.module(environ))
    assert meter.millijoules() == millijoules
    assert reason in meter.reason


def test_no_meter_is_a_reason_and_nothing_on_the_output(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "pyhlml", None)
    assert "habana-pyhlml is not installed" in EnergyMeter().reason
    hlml(monkeypatch, (0,), fails="Lib not initialized")
    meter = EnergyMeter()
    assert meter.millijoules() is None
    assert meter.reason == "no energy meter: habana-pyhlml says Lib not initialized"
    assert capsys.readouterr().out == ""  # the library prints, and --json writes there


# --- keys of what is kept -------------------------------------------------------------------------


#: What the card's tools and the bridge show, which changes while nobody changes anything.
READINGS = st.fixed_dictionaries(
    {
        "millijoules": st.one_of(st.integers(0, 2**63), st.none()),  # None: the meter fails
        "driver": st.sampled_from(("1.24.1-fw-60", None)),  # None: it fails when it is loaded
        "in_use": st.integers(GIB, 90 * GIB),
        "compiled": st.integers(0, 5),
        "clock": st.integers(200, 1900),
        "watts": st.integers(50, 900),
        "degrees": st.integers(20, 105),
    }
)


@settings(max_examples=60, deadline=None)
@given(READINGS, READINGS)
def test_no_reading_is_in_the_key_of_what_is_kept(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    """Auto and tune measure anew where a key changes: every image, if a reading were part of it."""
    assert kept_under(one) == kept_under(other)


def kept_under(shown: dict[str, Any]) -> dict[str, Any]:
    """Open a card that shows these readings, use its meters, and return the key of a choice."""

    def read(value: Any) -> Callable[..., Any]:
        def call(*of: Any) -> Any:
            if value is None:
                raise RuntimeError("AIP Lost")
            return value

        return call

    library: Any = ModuleType("pyhlml")
    library.hlmlInit = lambda: None
    library.hlmlGetDriverVersion = read(shown["driver"])
    library.hlmlDeviceGetCount = lambda: 1
    library.hlmlDeviceGetHandleByIndex = lambda index: index
    library.hlmlDeviceGetTotalEnergyConsumption = read(shown["millijoules"])
    library.hlmlDeviceGetClockInfo = read(shown["clock"])
    library.hlmlDeviceGetPowerUsage = read(shown["watts"])
    library.hlmlDeviceGetTemperature = read(shown["degrees"])
    model = SimpleNamespace(manifest=SimpleNamespace(name="tiny"), weights_hash="0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pyhlml", library)
        patch.setattr(DeviceBackend, "_arithmetic", (True, True))
        hpu = Gaudi()
        hpu.in_use = shown["in_use"]
        backend = DeviceBackend(Bridge(hpu))
        hpu.compile_operator(shown["compiled"])
        backend.energy_mj()
        strategy = named_strategy(AUTO, static=NoTree(), dynamic=DynamicTree())
        return key_of("auto", model, backend, torch.bfloat16, strategy, batch=1)


# --- memory -------------------------------------------------------------------------------------


def test_a_cache_that_does_not_fit_says_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    hpu = Gaudi(limit=2 * GIB)
    backend = on_cpu(DeviceBackend(Bridge(hpu)))
    layout = backend.kv_layout(36, 16, 1400, 20, 64, torch.bfloat16)
    row = layout.nbytes // 16
    says = (
        rf"no memory for a key-value cache of {layout.nbytes / GIB:.2f} GiB: 1.00 GiB of 2.00 GiB are "
        rf"free; at most {GIB // row} of its 16 rows fit .* \(--batch\)"
    )
    with pytest.raises(BackendError, match=says):
        backend.allocate(layout)

    def refuse(*shape: object, **options: object) -> None:
        raise RuntimeError("Allocation failed for size::12345 (0)MB")

    small = backend.kv_layout(1, 1, 64, 4, 16, torch.float32)
    monkeypatch.setattr(torch, "zeros", refuse)
    with pytest.raises(BackendError, match=r"no memory for a key-value cache of 0\.00 GiB"):
        backend.allocate(small)


def test_an_error_while_decoding_is_explained_where_it_is_the_memorys() -> None:
    backend = DeviceBackend(Bridge(Gaudi()))
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
    assert DeviceBackend(Bridge(hpu)).counters() == {
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
