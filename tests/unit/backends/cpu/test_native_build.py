"""Finding and compiling the native library: said where it cannot be, whole where two build at once."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import native

from lantern_accel.device.plugins import open_backend
from lantern_accel.errors import BackendError
from lantern_accel_cpu.native import build, library

#: Where the libraries of these tests lie.
LIBRARIES = os.environ[build.FOLDER_VARIABLE]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let nothing of a wheel, of other tests or of the machine's compiler be found."""
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "none.so")
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LANTERN_ACCEL_CPU_LIBRARIES", raising=False)
    monkeypatch.setattr(library, "_load", library._load.__wrapped__)


def _compiler(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> Path:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(build, "compiler", lambda: str(path))
    return path


def _twice_at_once(call: Callable[[], None]) -> None:
    both = [threading.Thread(target=call) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()


def _kernels(options: dict[str, str]) -> object:
    with open_backend("cpu", options) as backend:
        weight, x = torch.eye(40), native.draw(1, 3, 40)
        assert torch.allclose(backend.linear(x, backend.pack(weight)), x)
        return getattr(backend, "kernels", None)


@native.needs_native
@pytest.mark.parametrize("unit", sorted(build.UNITS.get(build.family() or "", {})))
def test_every_unit_of_this_family_compiles(unit: str) -> None:
    """Those of other processors too: checked, not built."""
    tool, flags = build.compiler(), build.UNITS[build.family() or ""][unit].flags
    assert tool is not None
    given = (*build._FLAGS, *flags, f"-DUNIT={unit}", "-fsyntax-only", "-w")
    done = subprocess.run([tool, *given, str(build.HERE / "unit.cpp")], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[:500]


@native.needs_native
def test_without_a_compiler_decoding_goes_on_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "compiler", lambda: None)
    assert _kernels({}) is None
    assert library.describe().startswith("no native kernels: no C++ compiler was found; install")
    with open_backend("cpu") as backend:
        assert backend.slowed.startswith("without native kernels decoding takes several times as")
    with open_backend("cpu", {"native": "off"}) as backend:
        assert not backend.slowed, "it was asked for"
    with pytest.raises(BackendError, match=r"no C\+\+ compiler was found; install g\+\+"):
        open_backend("cpu", {"native": "on"})


@native.needs_native
def test_the_unit_that_multiplies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    units = build.UNITS[build.family() or ""]
    assert {name for name, unit in units.items() if not unit.test} <= {*library.MULTIPLY}
    for name in build.wheel_units():
        monkeypatch.setenv(build.UNIT_VARIABLE, name)
        said = f"native kernels ({name}: {library.MULTIPLY[name]}; compiled on first use)"
        assert library.describe() == said


@native.needs_native
def test_a_compiler_that_fails_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _compiler(monkeypatch, tmp_path, "echo 'x.h:1: error: no such thing' >&2; exit 1")
    with pytest.warns(UserWarning, match=r"x.h:1: error: no such thing.*goes on without") as told:
        assert _kernels({}) is None
    assert len(told) == 1
    with pytest.raises(BackendError, match=r"no such thing; try another compiler with CXX"):
        open_backend("cpu", {"native": "on"})
    assert not list((tmp_path / "cache").rglob("*.so"))


@native.needs_native
def test_a_library_that_cannot_be_loaded_is_told_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _compiler(monkeypatch, tmp_path, 'for last; do :; done; echo nothing > "$last"')
    with pytest.warns(UserWarning, match="cannot be loaded"):
        assert _kernels({}) is None


@native.needs_native
def test_a_wheels_library_of_other_sources_is_built_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.FOLDER_VARIABLE, LIBRARIES)
    units, built = build.chosen_units(), []
    monkeypatch.setattr(build, "PREBUILT", build.build_library(units))
    assert library.load().unit in units
    monkeypatch.setattr(build, "digest", lambda: "other")
    monkeypatch.setattr(build, "build_library", lambda units: built.append(units) or build.PREBUILT)
    for compiler, made in (("c++", [units]), (None, [])):
        built.clear()
        monkeypatch.setattr(build, "compiler", lambda compiler=compiler: compiler)
        with pytest.raises(BackendError, match="of other sources"):
            library.load()
        assert built == made


@native.needs_native
def test_two_builders_leave_one_whole_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _compiler(monkeypatch, tmp_path, 'for last; do :; done; sleep 0.2; seq 1 5000 > "$last"')
    path = tmp_path / "cache" / "native" / "x.so"
    units = build.chosen_units()
    _twice_at_once(lambda: build.compile_library(units, path))
    assert path.read_text().splitlines()[-1] == "5000"
    assert os.listdir(path.parent) == ["x.so"]


@native.needs_native
@pytest.mark.long
def test_a_library_runs_no_unit_when_it_is_loaded(tmp_path: Path) -> None:
    """A wheel's has units that this processor lacks; the widest has all that others have, and more."""
    path = tmp_path / "wide.so"
    build.compile_library(build.wheel_units()[:1], path)
    load = f"import ctypes; print(ctypes.CDLL({str(path)!r}).lantern_sources())"
    done = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.returncode
    symbols = subprocess.run(["nm", path], capture_output=True, text=True, check=True).stdout
    assert "lantern_sources" in symbols
    for source in ("unit", "race", "copy"):
        assert f"_GLOBAL__sub_I_{source}.cpp" not in symbols


@native.needs_native
def test_a_first_use_says_that_it_builds_and_a_second_one_waits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = tmp_path / "calls"
    script = f'echo called >> {calls}; for last; do :; done; sleep 0.3; echo whole > "$last"'
    _compiler(monkeypatch, tmp_path, script)
    units = build.chosen_units()
    found: list[str] = []
    _twice_at_once(lambda: found.append(build.build_library(units).read_text()))
    assert found == ["whole\n", "whole\n"]
    # Every source of every unit, and the link.
    assert len(calls.read_text().splitlines()) == len(units) * len(build._SOURCES) + 1
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == "building native CPU kernels, once"
    assert told[-1].startswith("building native CPU kernels, once: done in ")
    build.build_library(units)
    assert len(told) == len(caplog.records)


@native.needs_native
def test_an_interrupt_leaves_no_compiler_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[subprocess.Popen[str]] = []

    class Compiler(subprocess.Popen[str]):
        def __init__(self, call: list[str], **given: Any) -> None:
            super().__init__(["sleep", "60"], **given)
            started.append(self)

        def communicate(self, *given: Any, **named: Any) -> Any:
            raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Compiler)
    with pytest.raises(KeyboardInterrupt):
        build.compile_library(build.chosen_units(), tmp_path / "library.so")
    for one in started:
        with one:
            assert one.wait(10) == -9


@native.needs_native
def test_sources_flags_and_compiler_name_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    units = build.chosen_units()
    first = build.target(units)
    monkeypatch.setattr(build, "compiler", lambda: "/another/c++")
    second = build.target(units)
    monkeypatch.setattr(build, "digest", lambda: "other sources")
    assert len({first, second, build.target(units)}) == 3


@native.needs_native
def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.UNIT_VARIABLE, "mmx")
    with pytest.raises(BackendError, match=r"is 'mmx'.*give one of"):
        build.chosen_units()


def test_options_that_exclude_each_other_are_refused() -> None:
    for options, says in (
        ({"native": "maybe"}, "native='maybe'; give on, off or auto"),
        ({"compile": "maybe"}, "compile='maybe'; give on, off or auto"),
        ({"native": "on", "compile": "on"}, "native=on and compile=on"),
    ):
        with pytest.raises(BackendError, match=says):
            open_backend("cpu", options)
    assert _kernels({"native": "off"}) is None


def test_another_processor_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "riscv64")
    assert "riscv64" in build.missing()
    assert _kernels({}) is None
