"""Where a command meets the system: a full disk, no standard output, targets that cannot be written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lantern_accel.cli import main
from lantern_accel.cli.edge import run_guarded
from lantern_accel.errors import LanternError
from lantern_accel.files import check_target, write_whole

#: Commands that write a file when their work is done, and the option that names it.
WRITERS: list[tuple[list[str], str, str]] = [
    (["bench"], "-o", "r.json"),
    (["profile", "--quick"], "-o", "r.json"),
    (["profile", "--quick", "-o", "run.json"], "--trace", "t.json"),
    (["tune"], "-o", "t.json"),
    (["stepcost"], "-o", "s.json"),
    (["evaluate"], "-o", "e.json"),
    (["evaluate"], "--grid", "g.png"),
    (["conform", "cpu"], "-o", "c.json"),
    (["conform", "cpu"], "--certificate", "c.md"),
    (["compare", "measured.json"], "-o", "c.html"),
    (["generate", "dog"], "-o", "a.png"),
    (["generate", "dog"], "--stats", "a.json"),
]


@pytest.mark.parametrize(("command", "option", "name"), WRITERS, ids=lambda one: str(one))
def test_what_cannot_be_written_is_refused_before_work(
    command: list[str], option: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lantern_accel.load", lambda *given, **options: pytest.fail("loaded"))
    monkeypatch.setattr(
        "lantern_accel.device.plugins.open_backend", lambda *given: pytest.fail("opened")
    )
    monkeypatch.setattr(
        "lantern_accel.testing.kit.run_checks", lambda *given, **options: pytest.fail("checked")
    )
    suffix = Path(name).suffix
    (tmp_path / f"folder{suffix}").mkdir()
    (tmp_path / f"loop{suffix}").symlink_to(tmp_path / f"loop{suffix}")
    (tmp_path / "file").write_text("")
    (tmp_path / "measured.json").write_text("{}")
    for target in (f"folder{suffix}", f"loop{suffix}", f"{'n' * 252}{suffix}", f"file/{name}"):
        assert main([*command, option, target]) == 2, target
        told = capsys.readouterr().err
        assert told.startswith("error: ") and len(told.splitlines()) == 1
        assert target[:20] in told


def test_a_target_is_looked_at_and_not_made(tmp_path: Path) -> None:
    check_target(tmp_path / "a" / "b" / "c.json")
    assert not (tmp_path / "a").exists()
    check_target(Path("/dev/null"))
    for odd in ("nul\0.json", "é" * 130 + ".json"):
        with pytest.raises(LanternError, match=r"cannot be written|longer than 255 bytes"):
            check_target(tmp_path / odd)


def test_a_loop_of_links_is_an_error_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError, match=r"[Ll]oop|links"):
        write_whole(tmp_path / "loop", lambda stream: stream.write(b"x"))


def test_standard_output_that_takes_nothing_is_one_sentence() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "lantern_accel", "hardware", "--json"],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 5
    assert done.stderr.startswith("error: No space left on device; free some space or choose")
    assert len(done.stderr.splitlines()) == 1


def test_what_was_given_is_shown_in_short(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise LanternError(f"no {'9' * 5000} is known; give another")

    assert run_guarded(fail) == 2
    told = capsys.readouterr().err
    assert len(told) < 300 and told.endswith("is known; give another\n")


@pytest.mark.long
def test_two_tuners_at_once_leave_one_whole_choice(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lantern_accel.files import read_record
    from lantern_accel.strategy.choices import Choice, choices_dir

    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path))
    words = [sys.executable, "-m", "lantern_accel", "tune", "--model", str(tiny_model), "--device",
             "cpu", "--batch", "1", "--repeats", "1"]  # fmt: skip
    told = subprocess.PIPE
    both = [subprocess.Popen(words, stdout=told, stderr=told, text=True) for _ in range(2)]
    said = [one.communicate(timeout=120)[1][-500:] for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    kept = [path for path in choices_dir().rglob("*") if path.is_file()]
    assert [path.suffix for path in kept] == [".json"], "one choice, and nothing half-written"
    found = read_record(kept[0])
    assert found is not None and Choice.model_validate(found).source == "tune"
