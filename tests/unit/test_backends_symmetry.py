"""Whoever knows one backend knows them all, and nothing else knows any."""

from __future__ import annotations

import ast
import importlib
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from lantern_accel.backend import Backend, BackendSpec
from lantern_accel.ops import TensorOps
from lantern_accel.plugins import backend_specs

ROOT = Path(__file__).parents[2]
FOLDERS = sorted((ROOT / "backends").glob("lantern_accel_*"))
DEVICE_NAMES = re.compile(
    r"""["'](cuda|hpu|xla|xpu|mps|rocm)(:\d+)?["']|torch\.(cuda|hpu|xpu|mps)\b|habana|pynvml"""
)


def _classes(path: Path) -> list[ast.ClassDef]:
    return [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]


def _methods(node: ast.ClassDef) -> list[str]:
    return [item.name for item in node.body if isinstance(item, ast.FunctionDef)]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_the_same_core_of_files(folder: Path) -> None:
    """A device may add modules of its own; these are where one looks first."""
    files = {path.name for path in folder.iterdir()}
    assert files >= {"__init__.py", "spec.py", "backend.py", "py.typed"}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_the_same_definitions_in_the_same_order(folder: Path) -> None:
    (spec,) = _classes(folder / "spec.py")
    assert spec.name == "Spec"
    assert _methods(spec) == ["prepare", "probe", "open"]
    backend = _classes(folder / "backend.py")[0]
    assert backend.name == "DeviceBackend"
    order = [name for base in (TensorOps, Backend) for name in vars(base)]
    found = [name for name in _methods(backend) if name != "__init__"]
    assert found == sorted(found, key=order.index)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_each_writes_its_api_version_and_its_name(folder: Path) -> None:
    name = folder.name.removeprefix("lantern_accel_")
    spec = backend_specs()[name]
    assert "api_version" in vars(type(spec))
    assert spec.summary
    assert type(spec).__module__ == f"{folder.name}.spec"
    opened = importlib.import_module(f"{folder.name}.backend").DeviceBackend
    assert (opened.name, issubclass(opened, Backend)) == (name, True)
    assert issubclass(type(spec), BackendSpec)


def test_priorities_put_the_reference_last_and_the_null_device_nowhere() -> None:
    order = [name for name, spec in backend_specs().items() if spec.priority >= 0]
    assert order[-1] == "cpu"
    assert "null" not in order


def test_no_device_is_named_outside_its_folder() -> None:
    files = list((ROOT / "lantern_accel").rglob("*.py"))
    assert len(files) > 10
    named = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if DEVICE_NAMES.search(line)
    ]
    assert named == []


def test_hpu_lists_only_its_own_accelerators(tmp_path: Path) -> None:
    spec = importlib.import_module("lantern_accel_hpu.spec")
    for node, vendor in (("accel0", "0x8086"), ("accel1", "0x1da3"), ("accel2", "")):
        (tmp_path / "dev/accel").mkdir(parents=True, exist_ok=True)
        (tmp_path / "dev/accel" / node).touch()
        if vendor:
            folder = tmp_path / "sys/class/accel" / node / "device"
            folder.mkdir(parents=True)
            (folder / "vendor").write_text(vendor + "\n")
    assert spec._devices(tmp_path) == ["Gaudi at /dev/accel/accel1", "Gaudi at /dev/accel/accel2"]
    assert spec._devices(tmp_path / "nothing") == []


def test_hpu_keeps_the_mode_that_the_user_chose() -> None:
    spec = backend_specs()["hpu"]
    environ: dict[str, str] = {}
    spec.prepare(environ)
    assert environ == {"PT_HPU_LAZY_MODE": "0"}
    environ = {"PT_HPU_LAZY_MODE": "1"}
    spec.prepare(environ)
    assert environ == {"PT_HPU_LAZY_MODE": "1"}


def test_cuda_says_what_torch_says_about_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> bool:
        warnings.warn("CUDA initialization: Found no driver. Please check", stacklevel=1)
        return False

    spec = importlib.import_module("lantern_accel_cuda.spec")
    monkeypatch.setattr(spec, "_torch_build", lambda: {"cuda": "12.8"})
    monkeypatch.setattr(torch.cuda, "is_available", no_driver)
    assert spec.Spec().probe().reason == "CUDA initialization: Found no driver"
    monkeypatch.setattr(spec, "_torch_build", lambda: {"__version__": "2.9+cpu"})
    assert spec.Spec().probe().reason == "this torch build (2.9+cpu) has no CUDA support"


class _Event:
    clock = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        _Event.clock += 250.0
        self.at = _Event.clock

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: _Event) -> float:
        return other.at - self.at


def test_hpu_opens_through_the_documented_api(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the real backend's code on a recording of the bridge's API; nothing is measured."""
    metric = SimpleNamespace(stats=lambda: [("TotalNumber", 3), ("AvgTime", 0.5)])
    hpu = ModuleType("habana_frameworks.torch.hpu")
    metrics = ModuleType("habana_frameworks.torch.hpu.metrics")
    internal = ModuleType("habana_frameworks.torch.utils.internal")
    vars(metrics)["metric_global"] = {"graph_compilation": metric}.get
    vars(internal)["is_lazy"] = lambda: False
    vars(hpu).update(
        metrics=metrics,
        device_count=lambda: 1,
        get_device_name=lambda: "GAUDI2",
        synchronize=lambda: None,
        memory_stats=lambda: {"InUse": 1, "MaxInUse": 2, "Limit": 3},
        reset_peak_memory_stats=lambda: None,
        Event=_Event,
    )
    torch_part = ModuleType("habana_frameworks.torch")
    vars(torch_part)["hpu"] = hpu
    top = ModuleType("habana_frameworks")
    vars(top)["torch"] = torch_part
    for module in (top, torch_part, hpu, metrics, internal):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(
        sys.modules, "habana_frameworks.torch.utils", ModuleType("habana_frameworks.torch.utils")
    )
    backend = backend_specs()["hpu"].open(0, {})
    facts = backend.facts()
    assert (facts.name, facts.memory_bytes, facts.notes) == ("GAUDI2", 3, ("mode: eager",))
    assert backend.counters() == {"graph_compilation.TotalNumber": 3}
    with backend.stopwatch() as watch:
        pass
    assert watch.seconds == 0.25
    assert not backend.support("capture")
    assert str(backend.dtypes().compute) == "torch.bfloat16"
    with pytest.raises(Exception, match="'hpu' failed in open: the bridge gives this process 1"):
        backend_specs()["hpu"].open(1, {})
