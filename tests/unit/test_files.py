"""Files are written whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lantern_accel.errors import RequestError
from lantern_accel.files import cache_dir, check_name, check_target, write_json, write_whole


def test_a_write_that_fails_leaves_the_old_file_and_no_rest(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write_whole(path, lambda stream: stream.write(b"old"))

    def fail(stream: object) -> None:
        stream.write(b"new")  # type: ignore[attr-defined]
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_whole(path, fail)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_json_is_readable_by_others_as_any_new_file(tmp_path: Path) -> None:
    write_json(tmp_path / "deep" / "a.json", {"b": "é"})
    (tmp_path / "plain").write_text("")
    assert json.loads((tmp_path / "deep" / "a.json").read_text(encoding="utf-8")) == {"b": "é"}
    modes = [(tmp_path / n).stat().st_mode & 0o777 for n in ("deep/a.json", "plain")]
    assert modes[0] == modes[1]


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("LANTERN_ACCEL_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir().parts[-2:] == (".cache", "lantern_accel")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert cache_dir() == tmp_path / "caches" / "lantern_accel"


ENDS = ("CON", "nul.txt", "aux .png", "Lpt1.tar.gz", "a.", "a ")


@pytest.mark.parametrize("name", [*ENDS, *(f"a{sign}b.png" for sign in '<>:"|?*')])
def test_a_name_that_windows_cannot_hold_is_refused_on_every_system(tmp_path, name) -> None:
    with pytest.raises(RequestError, match="on Windows"):
        check_target(tmp_path / name)


@pytest.mark.parametrize(
    "name", ["console.png", "a b.png", ".a", "com.png", "null", "a..b", "日本.png"]
)
def test_a_name_that_windows_can_hold_is_taken(tmp_path, name) -> None:
    check_name(name)
    check_target(tmp_path / name)
