"""How OpenMP's threads wait is said before torch is loaded, where steps are native."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lantern_accel_cpu.native import build
from lantern_accel_cpu.spec import WAITING, Spec


@pytest.fixture(autouse=True)
def _compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "missing", lambda: "")


def prepared(spec: Spec, **environ: str) -> dict[str, str]:
    given = dict(environ)
    spec.prepare(given)
    return {name: given[name] for name in WAITING if name in given}


def test_threads_sleep_while_they_wait() -> None:
    assert prepared(Spec()) == {"OMP_WAIT_POLICY": "passive"}


@pytest.mark.parametrize("name", WAITING)
def test_what_the_user_set_stays(name: str) -> None:
    assert prepared(Spec(), **{name: "7"}) == {name: "7"}


@pytest.mark.parametrize("options", [{"native": "off"}, {"compile": "on"}])
def test_steps_by_torch_s_operators_keep_openmp_s_way(options: dict[str, str]) -> None:
    spec = Spec().configured(options)
    assert isinstance(spec, Spec)
    assert prepared(spec) == {}


def test_without_a_compiler_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "missing", lambda: "no C++ compiler was found")
    assert prepared(Spec()) == {}


def test_a_process_says_it_before_torch_is_loaded() -> None:
    script = (
        "import os, sys\n"
        "from lantern_accel_cpu.native import build\n"
        "build.missing = lambda: ''\n"
        "from lantern_accel_cpu import spec\n"
        "spec.Spec().prepare(os.environ)\n"
        "assert 'torch' not in sys.modules\n"
        "print(os.environ['OMP_WAIT_POLICY'])"
    )
    environ = {name: value for name, value in os.environ.items() if name not in WAITING}
    run = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=120
    )
    assert run.stdout.strip() == "passive", run.stderr
