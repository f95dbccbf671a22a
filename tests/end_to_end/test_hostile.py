"""Inputs of a hostile user, as commands and as calls: one sentence and exit code 2, before any work."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from lantern_accel.cli import main
from lantern_accel.errors import DataError

LONG = "9" * 5000


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must be refused; return its one short complaint."""
    assert main(words) == 2, words
    out, told = capsys.readouterr()
    assert not out and "Traceback" not in told
    assert told.startswith("error: ")
    assert len(told) < 900, "what was given is shown in short"
    return told


@pytest.fixture
def words(tiny_model: Path, tmp_path: Path) -> list[str]:
    return ["generate", "red heart", "-m", str(tiny_model), "-d", "cpu", "-o",
            str(tmp_path / "x.png"), "-q"]  # fmt: skip


@pytest.mark.parametrize(
    "place",
    [
        "/dev/zero",
        "pipe",
        *(pytest.param(p, marks=pytest.mark.long) for p in ("/dev/null", "/proc/self/mem", "loop")),
    ],
)
def test_files_that_are_none(
    place: str, words: list[str], tiny_model: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    path = str(tmp_path / place)
    for option in ("-m", "--prompts"):
        assert path in refused([*words, option, path], capsys), "the file is named"
    for part in ("vq", "drafter", "text-encoder", "embeddings"):
        assert path in refused([*words, "--use", f"{part}={path}"], capsys), "the file is named"
    for given in (["compare", path, "-o", "c.html"],
                  ["train", "head", "--model", "lantern-emoji", "--config", path]):  # fmt: skip
        assert path in refused(given, capsys)


@pytest.mark.parametrize("kind", ["pipe", "loop", "device", "folder", "memory"])
@pytest.mark.parametrize(
    "part", ["model.json", "target.safetensors", "vq.safetensors", "text_tokenizer.json"]
)
def test_parts_of_a_model_that_are_no_files(
    part: str, kind: str, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    path = model / part
    path.unlink()
    os.mkfifo(tmp_path / "pipe")
    places = {"loop": path, "device": "/dev/zero", "memory": "/proc/self/mem", "folder": tmp_path}
    path.symlink_to(places.get(kind, tmp_path / "pipe"))
    told = refused(["generate", "red heart", "-m", str(model), "-d", "cpu", "-q"], capsys)
    assert str(model) in told


@pytest.mark.parametrize(
    ("model", "part", "says"),
    [
        ("class_model", "text-encoder=/tmp", "takes no text encoder"),
        ("class_model", "embeddings=none.npz", "class"),
        ("tiny_model", "text-encoder=/tmp", "takes no text encoder"),
    ],
)
def test_parts_that_a_model_has_no_use_for(
    model: str, part: str, says: str, request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = str(request.getfixturevalue(model))
    assert says in refused(["generate", "3", "-m", folder, "-d", "cpu", "--use", part], capsys)


@pytest.mark.parametrize("command", [["bench"], ["profile", "-o", "r.json"], ["evaluate"]])
def test_other_commands_refuse_prompts_that_are_no_class_ids(
    command: list[str], class_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ids.txt").write_text("3\n²\n")
    prompts = {"bench": ["--prompt", "²", "--strategy", "eagle"],
               "profile": ["--prompts", "ids.txt", "--strategy", "eagle"],
               "evaluate": ["--grid", "g.png", "--prompt", "²"]}[command[0]]  # fmt: skip
    given = [*command, "--model", str(class_model), "--device", "cpu", *prompts]
    assert "takes class ids from 0 to 6, not '²'" in refused(given, capsys)


def test_pictures_of_a_training_set_that_are_no_files(tmp_path: Path) -> None:
    from PIL import Image

    from lantern_accel.training.imageset import read_images

    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    names: list[Any] = ["a.png", "pipe", "loop", "/dev/zero", 5, "a.png\0"]
    lines = [json.dumps({"file": name, "prompt": "x"}) for name in names]
    (tmp_path / "captions.jsonl").write_text("\n".join(lines))
    found = read_images(tmp_path, 8)
    assert found.prompts == ["x"] and len(found.skipped) == 5
    (tmp_path / "captions.jsonl").write_text(json.dumps({"file": None, "prompt": "x"}))
    with pytest.raises(DataError, match="line 1: file cannot be None"):
        read_images(tmp_path, 8)
