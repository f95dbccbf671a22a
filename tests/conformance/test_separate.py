"""Groups of checks in processes of their own: what a crash, a hang and Ctrl-C cost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.crashing import write_crashing
from support.processes import CACHE

from lantern_accel.cli import main, separate
from lantern_accel.device.conformance import Outcome, Report, difference
from lantern_accel.errors import DeviceRequestError, RequestError
from lantern_accel.testing.certificate import Certificate
from lantern_accel_hpu import software

COMMAND = "import lantern_accel.cli as c; raise SystemExit(c.main())"


@pytest.fixture
def glass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a backend where processes that are started from here find it."""
    monkeypatch.syspath_prepend(str(write_crashing(tmp_path / "site")))
    return tmp_path


@pytest.mark.long
def test_a_crash_and_a_hang_cost_their_groups(glass: Path) -> None:
    written: list[Report] = []
    only = ["drop", "stuck", "whole"]
    run = separate.KitRun(device="glass", places=[{}] * 3, limit=6, on_report=written.append)
    report = run.conform(only, certificate=glass / "card.json")
    card = Certificate.model_validate_json((glass / "card.json").read_text())
    assert card.served == [], "steps of a backend that hangs are not waited for"
    assert not report.not_run
    found = {one.name: one for one in report.outcomes}
    assert list(found) == [
        "drop.first", "drop.crash", "drop.last", "stuck.hang", "stuck.after", "whole.one",
        "whole.leak",
    ]  # fmt: skip
    states = {name: one.state for name, one in found.items()}
    assert states["drop.first"] == states["whole.one"] == "passed"
    crash = found["drop.crash"]
    assert crash.state == "failed"
    assert "the process of the group 'drop' was ended by SIGSEGV" in crash.detail
    assert "in crash" in crash.detail  # the line of Python
    assert found["drop.last"].detail == "the same as drop.crash"
    hang = found["stuck.hang"]
    assert "longer than its limit, 6 s" in hang.detail and "in hang" in hang.detail
    assert states["stuck.after"] == "passed"  # in another process
    assert found["whole.leak"].detail == "it leaks"
    assert "4 failed by 3 causes" in report.summary()
    # After every check there is a report of what ran.
    assert [len(one.outcomes) for one in written] == list(range(len(found) + 1))
    assert {one.name for one in written[0].outcomes} | set(written[0].not_run) == set(found)


@pytest.mark.long
def test_a_crash_costs_its_check_in_a_group_whose_checks_run_apart(glass: Path) -> None:
    report = separate.KitRun(device="glass", limit=30).conform(["single"])
    crash, after = report.outcomes
    assert "the process of the group 'single.crash' was ended by SIGSEGV" in crash.detail
    assert after.state == "passed"


@pytest.mark.long
def test_an_interrupted_run_leaves_what_ran_and_is_resumed(glass: Path) -> None:
    out = glass / "report.json"
    words = ["conform", "glass", "--only", "whole.one", "--only", "slow", "-o", str(out)]
    path = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *words],
        env={**os.environ, "PYTHONPATH": path, "GLASS": str(glass / "pid")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    end = time.monotonic() + 120
    while time.monotonic() < end and not (glass / "pid").is_file():
        time.sleep(0.2)
    assert Report.model_validate_json(out.read_text()).not_run == ["slow.wait"]  # written at once
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    with pytest.raises(ProcessLookupError):
        os.kill(int((glass / "pid").read_text()), 0)
    stopped = Report.model_validate_json(out.read_text())
    assert [one.name for one in stopped.outcomes] == ["whole.one"]
    assert stopped.summary().endswith("1 not run")
    seen: list[str] = []
    more = separate.KitRun(device="glass", limit=60, on_outcome=lambda one: seen.append(one.name))
    again = more.conform(["whole"], resume=out)
    assert seen == ["whole.leak"]
    assert [one.name for one in again.outcomes] == ["whole.one", "whole.leak"]


@pytest.mark.long
def test_no_second_process_opens_a_card_that_serves_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if reason := software.missing():
        pytest.skip(reason)
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", CACHE)
    monkeypatch.setenv("LANTERN_HPU_SOFTWARE_LOCKS", str(tmp_path))
    monkeypatch.setenv("LANTERN_HPU_SOFTWARE_MODULES", "1")
    only = ["--only", "accept.ties", "--only", "kv.separate"]
    assert main(["conform", "hpu", "--software", "--jobs", "3", *only]) == 0
    assert "--jobs=1" in capfd.readouterr().err
    # Three processes for the one card: the first holds it while others want it.
    options = {"software": True}
    run = separate.KitRun(device="hpu", options=options, places=[{}] * 3, limit=300)
    found = run.conform(["replay", "kv", "accept"]).outcomes
    assert any("held now by" in one.detail for one in found if one.state == "failed")


@pytest.mark.long
def test_a_certificate_is_made_in_one_more_process(glass: Path) -> None:
    page = glass / "card.md"
    only = ["whole.one", "drop.first"]
    run = separate.KitRun(device="glass", limit=60)
    run.conform(only, certificate=page, command="as it was typed")
    card = Certificate.model_validate_json(page.with_suffix(".json").read_text())
    assert (card.verdict, card.command) == ("incomplete", "as it was typed")
    assert {one.name for one in card.report.outcomes} == set(only)
    assert "drop.crash" in card.not_run and "kv.slots" in card.not_run
    assert card.counters_after == {"opened": 2}  # of both groups' processes
    assert {one.by for one in card.served if one.calls} == {"reference"}


def test_a_run_that_is_complete_gets_its_certificate(glass: Path) -> None:
    out, page = glass / "report.json", glass / "card.md"
    report = separate.KitRun(device="glass", limit=60).conform(["whole.one"])
    out.write_text(report.model_dump_json())
    again = separate.KitRun(device="glass", limit=60)
    again.conform(["whole.one"], resume=out, certificate=page)
    card = Certificate.model_validate_json(page.with_suffix(".json").read_text())
    assert [one.name for one in card.report.outcomes] == ["whole.one"]


def test_what_opening_raises_is_raised_here() -> None:
    with pytest.raises(DeviceRequestError, match="no backend is named 'nothing'"):
        separate.KitRun(device="nothing", limit=60).conform()


def test_options_that_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    for words, says in (
        (["conform"], "name the backend"),
        (["conform", "cpu", "--in-process", "--jobs", "2"], "leave --in-process out"),
        (["conform", "cpu", "--resume"], "name it with -o"),
    ):
        assert main(words) == 2
        assert says in capsys.readouterr().err


# --- what an update changed -----------------------------------------------------------------------


def report(torch: str, **states: str) -> Report:
    """A report whose checks have these states; "passed 9" took nine seconds."""
    outcomes = []
    for name, said in states.items():
        state, _, seconds = said.partition(" ")
        outcomes.append(
            Outcome(name=f"kv.{name}", state=state.replace("_", " "), seconds=float(seconds or 1))
        )
    return Report(
        backend="glass", backend_version="1", device="cpu", device_name="glass", torch=torch,
        outcomes=outcomes,
    )  # fmt: skip


def test_a_difference_names_what_broke_mended_slowed_and_went(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = report("2.9", a="passed", b="failed", c="passed 4", d="passed", e="passed", f="failed")
    new = report(
        "2.10", a="failed", b="passed", c="passed 9", d="not_applicable", f="failed", g="failed"
    )
    files = [tmp_path / "old.json", tmp_path / "new.json"]
    for path, one in zip(files, (old, new), strict=True):
        path.write_text(one.model_dump_json())
    words = ["conform", "--diff", *map(str, files)]
    assert main(words) == 1
    assert capsys.readouterr().out.splitlines() == [
        "torch: 2.9 -> 2.10",
        "broke: kv.a: passed -> failed",
        "broke: kv.g: not run -> failed",
        "mended: kv.b: failed -> passed",
        "slower: kv.c: 4.0 s -> 9.0 s",
        "lost: kv.d: passed -> not applicable",
        "lost: kv.e: passed -> not run",
        "2 broke, 1 mended, 1 slower, 2 lost",
    ]
    assert main([*words, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["slower"] == ["kv.c: 4.0 s -> 9.0 s"]
    assert main(["conform", "--diff", str(files[0]), str(files[0])]) == 0
    other = json.loads(files[0].read_text()) | {"schema_version": 2}
    (tmp_path / "other.json").write_text(json.dumps(other))
    assert main(["conform", "--diff", str(files[0]), str(tmp_path / "other.json")]) == 2
    assert "schema_version" in capsys.readouterr().err
    for now in (report("2.9", a="passed"), report("2.9", a="passed", c="not_applicable")):
        files[0].write_text(report("2.9", a="passed", c="passed").model_dump_json())
        files[1].write_text(now.model_dump_json())
        assert main(words) == 1 and "1 lost" in capsys.readouterr().out
    other = old.model_copy(update={"backend": "clay"})
    with pytest.raises(RequestError, match="of two backends"):
        difference(old, other)
