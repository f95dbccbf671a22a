"""Everything that can be wrong with a request is told before the run."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections import namedtuple
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lantern_accel import bounds
from lantern_accel.errors import RequestError
from lantern_accel.generation import built_in_prompts
from lantern_accel.generation.request import GenerationRequest
from lantern_accel_profiles import store
from lantern_accel_profiles.measure import prompts, run

Usage = namedtuple("Usage", "total used free")


def pipeline(conditioning: str = "text") -> Any:
    family = SimpleNamespace(examples=lambda manifest: ())
    manifest = SimpleNamespace(conditioning=conditioning, target=SimpleNamespace(num_classes=1000))
    model = SimpleNamespace(manifest=manifest, family=family)
    backend = SimpleNamespace(inference=nullcontext)
    return SimpleNamespace(model=model, backend=backend, check_prompts=lambda prompts: None)


def test_blank_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\n  red heart \n\n\t\r\ndog face\n")
    found = prompts.read_prompts(path, pipeline())
    assert (found.used, found.count, found.source) == (["red heart", "dog face"], 2, "prompts.txt")


def test_ten_thousand_lines_are_a_digest_and_the_first(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(f"thing {i}" for i in range(10_000)))
    found = prompts.read_prompts(path, pipeline())
    assert found.count == 10_000
    assert len(found.used) == prompts.USED
    path.write_text("\n".join(f"thing {i}" for i in range(9_999)) + "\nanother")
    assert prompts.read_prompts(path, pipeline()).sha256 != found.sha256


@pytest.mark.parametrize(
    ("data", "says"), [(b"\n \n", "holds no prompt"), (b"\xff\xfe\xff", "it is not text")]
)
def test_a_file_without_prompts_is_refused(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(data)
    with pytest.raises(RequestError, match=says):
        prompts.read_prompts(path, pipeline())
    with pytest.raises(RequestError, match="is not a file of prompts"):
        prompts.read_prompts(tmp_path / "none.txt", pipeline())


def test_built_in_prompts_are_the_random_draw_that_they_are_said_to_be() -> None:
    style = (
        r"\b(fluent|noto|twemoji|emojione|fxemoji|openmoji|emoji|emotion|style|icon|picture|v1|3d|flat"
        r"|modern)\b|\d"
    )
    given = Path(__file__).parents[4] / "tools/lantern-emoji/prompts.txt"
    lines = sorted({line.strip() for line in given.read_text().splitlines()})
    plain = [line for line in lines if line and not re.search(style, line)]
    drawn = random.Random(21).sample(plain, 64)
    assert drawn == [*built_in_prompts.TUNING, *built_in_prompts.REPORTING]
    assert not set(built_in_prompts.TUNING) & set(built_in_prompts.REPORTING)


def test_built_in_prompts_are_what_the_model_takes() -> None:
    assert prompts.read_prompts(None, pipeline()).used == list(built_in_prompts.REPORTING)
    classes = prompts.read_prompts(None, pipeline("class")).used
    assert classes[:3] == [0, 31, 62]
    assert not set(classes) & set(built_in_prompts.built_in_prompts(pipeline("class"), "tuning"))

    def knows_rats(given: list[Any]) -> None:
        if given != ["rat"]:
            raise RequestError("no")

    some = pipeline()
    some.check_prompts = knows_rats
    assert built_in_prompts.built_in_prompts(some) == ["rat"]
    with pytest.raises(RequestError, match="takes none of the built-in prompts"):
        built_in_prompts.built_in_prompts(some, "tuning")


def test_a_command_begins_anew_and_names_no_folder_of_this_machine() -> None:
    words = ["profile", "--model", "/srv/own", "--prompts=/home/me/a b.txt", "-o", "x/run.json"]
    short = "lantern-accel profile --model own '--prompts=a b.txt' -o run.json"
    assert run.command_of([*words, "--resume"]) == short


def test_bounds_are_those_of_a_request() -> None:
    fields = GenerationRequest.model_fields

    def most(name: str) -> set[Any]:
        limits = [getattr(one, key, None) for one in fields[name].metadata for key in ("le", "lt")]
        return {*limits} - {None}

    assert most("batch_size") == {bounds.MOST_BATCH}
    assert most("num_images") == {bounds.MOST_IMAGES}
    assert most("seed") == {bounds.MOST_SEED + 1}


def test_no_room_is_told_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, trace = tmp_path / "run.json", tmp_path / "t.json"
    for free, file, fragment in (
        (50, trace, "50 MiB free, t.json"),
        (1, None, "1 MiB free, run.js"),
    ):
        store.check_output(out, resume=False)
        space = Usage(1, 1, free * 2**20)
        monkeypatch.setattr(store.shutil, "disk_usage", lambda path, space=space: space)
        with pytest.raises(RequestError, match=fragment):
            store.check_output(out, resume=False, trace=file)


def test_files_that_cannot_be_written_or_would_be_lost_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "folder.json").mkdir()
    for name, resume, fragment in (
        ("run.json", False, "--resume completes it"),
        ("run.txt", False, "not named .json"),
        ("folder.json", True, "is a folder"),
        ("run.json/a.json", False, "cannot be written"),
    ):
        with pytest.raises(RequestError, match=re.escape(fragment)):
            store.check_output(tmp_path / name, resume=resume)
    store.check_output(tmp_path / "run.json", resume=True)


def test_a_name_without_end_is_refused() -> None:
    store.check_name(None)
    store.check_name("n" * 80)
    with pytest.raises(RequestError, match="81 characters"):
        store.check_name("n" * 81)


def test_two_runs_get_two_names() -> None:
    names = {run.fresh_name("cpu:0") for _ in range(20)}
    assert len(names) == 20
    assert all(name.startswith("cpu-0-") for name in names)


def test_nothing_before_the_device_imports_torch() -> None:
    # Some vendors read the environment while torch is imported, so the device comes first.
    program = (
        "import sys; import lantern_accel_profiles.commands.profile, lantern_accel_profiles.store; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
