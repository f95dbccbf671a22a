"""How OpenMP's threads wait is said before torch is loaded, where steps are native."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lantern_accel_cpu.native import build
from lantern_accel_cpu.spec import WAITING, Spec


@pytest.mark.parametrize(
    ("options", "environ", "missing", "waiting"),
    [
        ({}, {}, "", {"OMP_WAIT_POLICY": "passive"}),
        # What the user has set stays.
        *(({}, {name: "7"}, "", {name: "7"}) for name in WAITING),
        # Steps by torch's operators keep OpenMP's way.
        ({"native": "off"}, {}, "", {}),
        ({"compile": "on"}, {}, "", {}),
        ({}, {}, "no C++ compiler was found", {}),
    ],
)
def test_threads_sleep_while_they_wait_for_native_steps(
    options: dict[str, str],
    environ: dict[str, str],
    missing: str,
    waiting: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "missing", lambda: missing)
    given = dict(environ)
    Spec().configure(options).prepare(given)
    assert {name: given[name] for name in WAITING if name in given} == waiting


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
