"""What other packages add to the command and to the service."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lantern_accel.errors import LanternWarning
from lantern_accel.extensions import COMMANDS, ROUTES, load_extensions


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with a command, and one whose command does not exist."""
    (tmp_path / "measured_beads.py").write_text("def beads():\n    return 7\n")
    info = tmp_path / "measured_beads-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: measured-beads\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{COMMANDS}]\nbeads = measured_beads:beads\nbroken = measured_beads:no_such\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "measured_beads", raising=False)


def test_a_package_adds_commands_and_a_broken_one_is_named(package: None) -> None:
    with pytest.warns(LanternWarning, match="'broken'.*update or remove"):
        found = dict(load_extensions(COMMANDS))
    assert found["beads"]() == 7
    assert "broken" not in found


def test_our_own_are_found() -> None:
    assert {"bench", "compare", "profile", "stepcost", "tune"} <= dict(
        load_extensions(COMMANDS)
    ).keys()
    assert [name for name, _ in load_extensions(ROUTES)] == ["run"]
