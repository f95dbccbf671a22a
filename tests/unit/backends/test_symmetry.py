"""Whoever knows one backend knows them all, and nothing else knows any."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from lantern_accel.device.backend import SEAM, Backend, methods
from lantern_accel.device.plugins import backend_specs
from lantern_accel.device.spec import BackendSpec

ROOT = Path(__file__).parents[3]
FOLDERS = sorted((ROOT / "backends").glob("lantern_accel_*"))
DEVICE_NAMES = re.compile(
    r"""["'](cuda|hpu|xla|xpu|mps|rocm)(:\d+)?["']|torch\.(cuda|hpu|xpu|mps)\b|habana|pynvml"""
)


def _classes(path: Path) -> list[ast.ClassDef]:
    return [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]


def _methods(node: ast.ClassDef) -> list[str]:
    return [item.name for item in node.body if isinstance(item, ast.FunctionDef)]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_the_same_files_and_definitions_in_the_same_order(folder: Path) -> None:
    """A device may add modules of its own; these are where one looks first."""
    files = {path.name for path in folder.iterdir()}
    assert files >= {"__init__.py", "spec.py", "backend.py", "py.typed"}
    (spec,) = _classes(folder / "spec.py")
    assert spec.name == "Spec"
    hooks = ["prepare", "probe", "open"]
    assert [name for name in _methods(spec) if name in hooks] == hooks
    backend = _classes(folder / "backend.py")[0]
    assert backend.name == "DeviceBackend"
    for part in SEAM:
        order = list(methods(part))
        found = [name for name in _methods(backend) if name in order]
        assert found == sorted(found, key=order.index), part


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
