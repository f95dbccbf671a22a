"""``lantern-accel port``: a package that is installed and passes as it is, or a sentence on why not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lantern_accel.cli import main
from lantern_accel.device import plugins
from lantern_accel.porting import scaffold
from lantern_accel.testing import static

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Scaffold a device and install it, as far as Python looks."""
    folder = scaffold.scaffold("slide_rule", tmp_path)
    info = folder / "lantern_accel_slide_rule-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: x\nVersion: 0.1.0\n")
    points = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [f"{name} = {value}" for name, value in points["lantern_accel"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[lantern_accel]", *lines]))
    monkeypatch.syspath_prepend(str(folder))
    plugins.load_plugins.cache_clear()
    yield folder
    for name in [one for one in sys.modules if one.startswith("lantern_accel_slide_rule")]:
        del sys.modules[name]
    plugins.load_plugins.cache_clear()


@pytest.mark.long
def test_it_is_found_draws_and_passes_at_once(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["devices"]) == 0
    assert "slide_rule: ready (Slide Rule, torch's CPU in its place)" in capsys.readouterr().out
    monkeypatch.setattr(static, "CHECKED", ("vanilla",))
    words = "conform slide_rule --in-process --only static.host_read --only kv.round_trip"
    assert main(words.split()) == 0
    assert " 0 failed" in capsys.readouterr().out
    assert main(["devices", "slide_rule"]) == 0


@pytest.mark.long
def test_its_own_tests_pass(made: Path) -> None:
    paths = [str(made), str(scaffold.Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
    call = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-W", "error"]
    done = subprocess.run(
        [*call, "-k", "plugin or tokens or round_trip"],
        cwd=made,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_nothing_of_the_template_s_name_is_left(made: Path) -> None:
    files = [path for path in made.rglob("*") if path.is_file()]
    assert len(files) >= 11
    assert not [path for path in files if "abacus" in str(path.relative_to(made)).lower()]
    assert not [path for path in files if "abacus" in path.read_text().lower()]
    project = tomllib.loads((made / "pyproject.toml").read_text())["project"]
    assert project["name"] == "lantern-accel-slide-rule"


def test_the_checklist_s_commands_are_commands(made: Path) -> None:
    import typer.main

    from lantern_accel.cli.app import app

    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    text = (made / "CHECKLIST.md").read_text() + (made / "README.md").read_text()
    commands = re.findall(r"lantern-accel ([a-z-]+)((?: --?[\w-]+)*)", text)
    assert len(commands) > 10
    for command, _ in commands:
        assert command in known, command


def test_the_checklist_s_checks_are_checks(made: Path) -> None:
    from lantern_accel.testing import CHECKS

    named = re.findall(r"--only ([\w.]+)", (made / "CHECKLIST.md").read_text())
    groups = {name.partition(".")[0] for name in CHECKS}
    assert set(named) <= groups | set(CHECKS)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Abacus", "cannot name a device: .*; did you mean abacus"),
        ("my-npu", "did you mean my_npu"),
        ("9lives", "did you mean lives"),
        ("", "cannot name a device"),
        ("a__b", "did you mean a_b"),
        ("a_", "did you mean a"),
        ("../up", "did you mean up"),
        ("ä", "cannot name a device"),
        ("x" * 41, "cannot name a device: use up to 40"),
        ("x" * 9000, "cannot name a device"),
        *((name, f"'{name}' names a device already") for name in ("auto", "gpu", "cpu", "sand")),
    ],
)
def test_a_name_that_no_device_can_have_is_a_sentence(
    name: str,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scaffold, "broken_plugins", lambda: {"sand": "no tray"})
    assert main(["port", "--out", str(tmp_path), "--", name]) == 2
    said = capsys.readouterr().err
    assert re.search(says, said), said
    assert len(said.splitlines()) == 1 and len(said) < 400
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", ["folder", "file", "broken link", "out is a file"])
def test_nothing_is_overwritten(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there, out = tmp_path / "lantern_accel_slate", tmp_path
    if what == "folder":
        there.mkdir()
    elif what == "file":
        there.write_text("mine")
    elif what == "broken link":
        there.symlink_to(tmp_path / "nowhere")
    else:
        out = tmp_path / "file"
        out.write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    assert main(["port", "slate", "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert ("is not a folder" if "out" in what else "is there already") in said
    assert len(said.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_the_folder_is_there_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        scaffold.scaffold("slate", tmp_path)
    assert not list(tmp_path.iterdir())
