"""The environment tells what is known and says why the rest is not."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lantern_accel.device import host_load
from lantern_accel.device.plugins import open_backend
from lantern_accel.errors import BackendError
from lantern_accel_profiles.measure import environment
from lantern_accel_profiles.measure.record import is_measured


def git(folder: Path, *words: str) -> None:
    name = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(folder), *name, *words], check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_commit_and_whether_it_was_changed(tmp_path: Path) -> None:
    git(tmp_path, "init")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    commit, _ = environment.commit_of(package)
    assert commit.startswith(
        "not measured: the package is not a git checkout"
    )  # below one, not of it
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    commit, dirty = environment.commit_of(package)
    assert len(commit) == 40
    assert dirty is False
    (package / "__init__.py").write_text("changed = True")
    assert environment.commit_of(package) == (commit, True)


def test_without_git_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert environment.commit_of(tmp_path)[0].startswith("not measured: ")


def test_conditions_are_numbers_or_reasons() -> None:
    with open_backend("cpu") as backend:
        found = environment.conditions(backend)
    assert found["power_limit_w"] == "not measured: backend 'cpu' does not read it"
    assert all(is_measured(v) or v.startswith("not measured: ") for v in found.values())


def test_our_own_work_is_not_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks, own = iter([1000, 1100]), iter([5.0, 5.25])
    monkeypatch.setattr(host_load, "_system_ticks", lambda: next(ticks))
    monkeypatch.setattr(host_load, "_own_seconds", lambda: next(own))
    monkeypatch.setattr(host_load.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(host_load.os, "cpu_count", lambda: 2)
    clock = iter([10.0, 11.0])
    # The module's own clock: threads of other tests read the shared one.
    monkeypatch.setattr(host_load, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    # A second of two cores: 1 busy of 2, of which 0.25 ours.
    assert environment.LoadWatch().others() == pytest.approx(0.375)


def test_what_the_clock_cannot_show_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    load = environment.LoadWatch()
    found = load.others()
    assert str(found).startswith("not measured: ")
    monkeypatch.setattr(host_load, "_system_ticks", lambda: None)
    time.sleep(0)
    assert environment.LoadWatch().others() == "not measured: the system has no /proc/stat"


def test_a_busy_machine_is_waited_for_where_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter(["others work", "others work", ""])
    monkeypatch.setattr(environment, "busy_note", lambda seconds=0.5: next(looks, "others work"))
    said: list[str] = []
    environment.wait_for_quiet(60.0, said.append)
    assert "no verdict; waiting for them, 60 s" in said[0] and next(looks, None) is None
    with pytest.raises(BackendError, match=r"after 0\.05 s other programs"):
        environment.wait_for_quiet(0.05, said.append)
    del said[:]
    environment.wait_for_quiet(0.0, said.append)  # it only says so
    assert len(said) == 1 and "waiting" not in said[0]
