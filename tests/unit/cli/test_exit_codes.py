"""Exit codes: one table, in the code and in the documentation, and an error class for each refusal."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lantern_accel import errors
from lantern_accel.cli import main
from lantern_accel.cli.edge import run_guarded
from lantern_accel.errors import EXIT_CODES, Ended, LanternError

PAGE = Path(__file__).resolve().parents[3] / "docs" / "troubleshooting.md"


def raising(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


def test_the_page_has_the_table_of_the_code() -> None:
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", PAGE.read_text(encoding="utf-8"), re.M)
    assert {int(code): text for code, text in rows} == EXIT_CODES


def test_every_error_has_a_code_of_the_table() -> None:
    kinds = [one for one in vars(errors).values() if isinstance(one, type)]
    kinds = [one for one in kinds if issubclass(one, LanternError)]
    assert {one.exit_code for one in kinds} == {2, 4, 5, 6}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.RequestError("x"), 2),
        (errors.StrategyError("x"), 2),
        (errors.DeviceRequestError("x"), 2),
        (errors.BackendError("x"), 4),
        (errors.DeviceLostError("x"), 4),
        (errors.DoesNotFitError("x"), 5),
        (errors.DeviceMemoryError("x"), 5),
        (errors.DiskFullError("x"), 5),
        (MemoryError(), 5),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 5 bytes"), 5),
        (OSError(28, "No space left on device"), 5),
        (OSError(13, "Permission denied"), 2),
        (errors.FetchError("x"), 6),
        (KeyError("x"), 3),
        (KeyboardInterrupt(), 130),
        (Ended(), 143),
    ],
)
def test_an_error_ends_with_its_code(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path))
    assert run_guarded(raising(error)) == code
    told = capsys.readouterr().err
    assert told.count("\n") == (code < 100)
    if code == 3:
        assert "this should not have happened: KeyError" in told
        (kept,) = (tmp_path / "errors").iterdir()
        assert "Traceback" in kept.read_text()


def test_commands_that_fetch_stand_on_lines_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_guarded(raising(errors.FetchError("not here. Run:\n  hf a\nThen b"))) == 6
    assert capsys.readouterr().err == "error: not here. Run:\n  hf a\nThen b\n"


def test_a_library_that_crashes_is_named_by_its_file() -> None:
    lines = (
        "from lantern_accel.cli.edge import run_guarded",
        "run_guarded(lambda: ctypes.string_at(0))",
    )
    words = "; ".join(("import ctypes", *lines))
    ended = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True)
    assert ended.returncode < 0 and "in string_at" in ended.stderr


@pytest.mark.parametrize("number", [1, 2])
def test_a_command_whose_output_is_closed_does_its_work(number: int) -> None:
    command = f"{sys.executable} -m lantern_accel models --presets {number}>&-"
    ended = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_help_says_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for code, text in EXIT_CODES.items():
        assert f"{code}: {text.partition(':')[0]}" in out
