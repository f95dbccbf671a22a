"""Everything that can be wrong with a request is told before the run."""

from __future__ import annotations

import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lantern_accel.errors import RequestError
from lantern_accel.families.llamagen.family import CAPTIONS
from lantern_accel.families.registry import family
from lantern_accel.measure import asking, output

Usage = namedtuple("Usage", "total used free")


def pipeline(conditioning: str = "text") -> Any:
    target = SimpleNamespace(conditioning=conditioning, num_classes=1000)
    model = SimpleNamespace(manifest=SimpleNamespace(target=target), family=family("llamagen"))
    return SimpleNamespace(model=model, check_prompts=lambda prompts: None)


def test_blank_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\n  red heart \n\n\t\r\ndog face\n")
    found = asking.read_prompts(path, pipeline())
    assert (found.used, found.count, found.source) == (["red heart", "dog face"], 2, "prompts.txt")


def test_ten_thousand_lines_are_a_digest_and_the_first(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(f"thing {i}" for i in range(10_000)))
    found = asking.read_prompts(path, pipeline())
    assert found.count == 10_000
    assert len(found.used) == asking.USED
    path.write_text("\n".join(f"thing {i}" for i in range(9_999)) + "\nanother")
    assert asking.read_prompts(path, pipeline()).sha256 != found.sha256


@pytest.mark.parametrize(
    ("data", "says"), [(b"\n \n", "has no prompt"), (b"\xff\xfe\xff", "not UTF-8 text")]
)
def test_a_file_without_prompts_is_refused(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(data)
    with pytest.raises(RequestError, match=says):
        asking.read_prompts(path, pipeline())
    with pytest.raises(RequestError, match="cannot be read"):
        asking.read_prompts(tmp_path / "none.txt", pipeline())


def test_built_in_prompts_are_what_the_model_takes() -> None:
    assert asking.read_prompts(None, pipeline()).used == list(CAPTIONS)
    assert asking.read_prompts(None, pipeline("class")).used[:3] == [0, 125, 250]


def test_no_room_is_told_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run.json"
    output.check_output(out, resume=False)
    monkeypatch.setattr(output.shutil, "disk_usage", lambda path: Usage(1, 1, 50 * 2**20))
    output.check_output(out, resume=False)
    with pytest.raises(RequestError, match=r"has 50 MiB of room, t\.json may need 256"):
        output.check_output(out, resume=False, trace=tmp_path / "t.json")
    monkeypatch.setattr(output.shutil, "disk_usage", lambda path: Usage(1, 1, 2**20))
    with pytest.raises(RequestError, match=r"has 1 MiB of room, run\.json may need 32"):
        output.check_output(out, resume=False)


def test_a_file_that_is_there_is_not_lost(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    out.write_text("{}")
    with pytest.raises(RequestError, match="is there already; --resume completes it"):
        output.check_output(out, resume=False)
    output.check_output(out, resume=True)


def test_names_that_cannot_be_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"not named \.json"):
        output.check_output(tmp_path / "run.txt", resume=False)
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(RequestError, match="is a folder"):
        output.check_output(tmp_path / "folder.json", resume=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="cannot be written"):
        output.check_output(tmp_path / "file" / "run.json", resume=False)


def test_a_name_without_end_is_refused() -> None:
    output.check_name(None)
    output.check_name("n" * 80)
    with pytest.raises(RequestError, match="has 81 characters; 80 are the most"):
        output.check_name("n" * 81)


def test_two_runs_get_two_names() -> None:
    names = {asking.fresh_name("cpu:0") for _ in range(20)}
    assert len(names) == 20
    assert all(name.startswith("cpu-0-") for name in names)


def test_nothing_before_the_device_imports_torch() -> None:
    # Some vendors read the environment while torch is imported, so the device comes first.
    program = (
        "import sys; import lantern_accel.cli.profile, lantern_accel.measure.output; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
