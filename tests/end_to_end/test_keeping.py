"""What a command finished is kept, what it may write is checked first, and no error is a traceback."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lantern_accel.cli import main, output_images
from lantern_accel.files import cache_dir, write_json
from lantern_accel.generation.result import image_format


@pytest.fixture
def words(tiny_model: Path, tmp_path: Path) -> list[str]:
    return ["generate", "red heart", "--model", str(tiny_model), "--strategy", "vanilla",
            "-d", "cpu", "--seed", "3", "-o", str(tmp_path / "p.png")]  # fmt: skip


def stop_after(monkeypatch: pytest.MonkeyPatch, images: int, stop: Any) -> None:
    """Call ``stop`` after ``images`` images were written."""
    real, left = output_images.save_image, [images]

    def save(image: Any, path: Path, *more: Any) -> None:
        if left[0] == 0:
            stop(path)
        left[0] -= 1
        real(image, path, *more)

    monkeypatch.setattr(output_images, "save_image", save)


def interrupt(path: Path) -> None:
    raise KeyboardInterrupt


def terminate(path: Path) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def fill(path: Path) -> None:
    raise OSError(28, "No space left on device", str(path))


@pytest.mark.parametrize(
    ("stop", "code", "says"),
    [
        (interrupt, 130, ""),
        (fill, 5, "error: No space left on device"),
        pytest.param(terminate, 143, "", marks=pytest.mark.long),
    ],
)
def test_what_is_done_at_a_stop_is_kept_and_resume_draws_the_rest(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], stop: Any, code: int, says: str,
) -> None:  # fmt: skip
    whole = [*words, "-n", "4", "--batch", "1"]
    assert main([*whole, "-o", str(tmp_path / "q.png")]) == 0
    want = [(tmp_path / f"q-{i}.png").read_bytes() for i in range(4)]
    with monkeypatch.context() as patch:
        stop_after(patch, 2, stop)
        assert main(whole) == code
    told = capsys.readouterr().err
    assert "kept: " in told and says in told
    assert sorted(p.name for p in tmp_path.glob("p-*.png")) == ["p-0.png", "p-1.png"]
    before = (tmp_path / "p-0.png").stat().st_mtime_ns
    assert main([*whole, "--resume", "--seed", "4"]) == 2
    assert "made with --seed 3, not 4" in capsys.readouterr().err
    assert main([*whole, "--resume"]) == 0
    assert [(tmp_path / f"p-{i}.png").read_bytes() for i in range(4)] == want
    assert (tmp_path / "p-0.png").stat().st_mtime_ns == before
    assert not list(tmp_path.glob(".*.json"))


@pytest.mark.parametrize("count", ["1", "2"])
def test_resume_keeps_images_that_another_command_finished(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], count: str
) -> None:
    assert main([*words, "-n", count]) == 0
    before = {path: path.read_bytes() for path in tmp_path.glob("p*.png")}
    assert main([*words, "-n", count, "--seed", "4", "--resume"]) == 2
    assert "is there already, and nothing says" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in tmp_path.glob("p*.png")}
    assert main([*words, "-n", count, "--seed", "4", "--resume", "--overwrite"]) == 0
    assert before != {path: path.read_bytes() for path in tmp_path.glob("p*.png")}


def test_resume_without_a_seed_goes_on_with_the_seed_that_was_drawn(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = words.index("--seed")
    several = [*words[:at], *words[at + 2 :], "-n", "3", "-b", "1"]
    with monkeypatch.context() as patch:
        stop_after(patch, 1, interrupt)
        assert main(several) == 130
    (notes,) = tmp_path.glob(".*.json")
    seed = json.loads(notes.read_text())["seed"]
    assert main([*several, "--resume", "--stats", str(tmp_path / "f.json")]) == 0
    assert json.loads((tmp_path / "f.json").read_text())["seed"] == seed


@pytest.mark.parametrize(
    ("strategy", "seed"),
    [
        ("scd", ["--resume"]),
        *(
            pytest.param(name, ["--seed", "3"], marks=pytest.mark.long)
            for name in ("vanilla", "eagle")
        ),
    ],
)
def test_an_image_under_way_goes_on_from_its_tokens(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str,
    seed: list[str],
) -> None:  # fmt: skip
    """By the same command with the same seed; --resume knows the seed that was drawn."""
    at = words.index("--seed")
    asked = [*words[:at], *words[at + 2 :], "--dtype", "float32", "-n", "2", "-b", "2"]
    asked, stats = [*asked, "--strategy", strategy], tmp_path / "f.json"

    def note(self: Any, snapshot: Any) -> None:
        if min(map(len, snapshot().values()), default=0) > 8:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("lantern_accel.generation.unfinished.Unfinished.note", note)
        assert main([*asked, *(seed if "--seed" in seed else [])]) == 130
    (left,) = tmp_path.glob(".*.tokens")
    assert main([*asked, *seed, "--stats", str(stats)]) == 0
    figures = json.loads(stats.read_text())
    assert figures["resumed"] > 14 and not left.is_file()
    whole = [*asked, "--seed", str(figures["seed"]), "--stats", str(stats), "--overwrite"]
    assert main(whole) == 0
    again = json.loads(stats.read_text())
    assert again["resumed"] == 0 and again["tokens_sha256"] == figures["tokens_sha256"]


def test_prompts_of_a_file_follow_those_of_the_command(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("dog face\n\na blue fish\n")
    assert main([*words, "--prompts", str(tmp_path / "prompts.txt"), "--json", "-q"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["prompts"] == ["red heart", "dog face", "a blue fish"]
    assert len(list(tmp_path.glob("p-*.png"))) == 3


def test_devices_pipes_and_links_are_written_through(words: list[str], tmp_path: Path) -> None:
    real, link, pipe = tmp_path / "real.json", tmp_path / "link.json", tmp_path / "pipe"
    real.write_text("old")
    link.symlink_to(real)
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    for target in (Path("/dev/null"), link, pipe):
        assert main([*words, "--overwrite", "--stats", str(target)]) == 0
    reader.join(timeout=10)
    assert json.loads(read[0])["model"] == "tiny"
    assert not Path("/dev/null").is_file()
    assert link.is_symlink() and json.loads(real.read_text())["model"] == "tiny"
    assert pipe.is_fifo()


def test_every_suffix_that_is_accepted_writes_a_picture(tmp_path: Path) -> None:
    from lantern_accel.errors import RequestError
    from lantern_accel.generation.result import save_image

    accepted = 0
    for suffix in Image.registered_extensions():
        path = tmp_path / f"x{suffix}"
        try:
            image_format(path)
        except RequestError:
            continue
        save_image(Image.new("RGB", (8, 8)), path)
        accepted += 1
    assert accepted > 5


def test_a_cache_that_cannot_be_used_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file" / "below", tmp_path / ("n" * 300)):
        monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(bad))
        with pytest.warns(UserWarning, match="cannot be used .*so nothing is kept; set") as said:
            kept = cache_dir()
        assert len(said) == 1
        write_json(kept / "trees" / "a.json", {})
        assert cache_dir() == kept, "said once"


def test_a_fault_is_one_sentence_after_what_is_kept_and_a_traceback_with_debug(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for more, traceback in ((), False), (("--debug",), True):
        stop_after(monkeypatch, 0, lambda path: {}["no such key"])
        assert main([*more, *words]) == 3
        *kept, told = capsys.readouterr().err.splitlines()
        assert ("Traceback" in " ".join(kept)) == traceback
        if not traceback:
            assert told.startswith("error: this should not have happened: KeyError: 'no such key'")
            assert all(line.startswith("kept: ") for line in kept)


def test_a_picture_that_is_there_is_kept(
    tiny_model: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    picture = tmp_path / "heart.png"
    picture.write_bytes(b"somebody's")
    words = ["generate", "red heart", "--quiet", "--strategy", "vanilla", "-m", str(tiny_model)]
    assert main([*words, "-o", str(picture)]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert picture.read_bytes() == b"somebody's"
    assert main([*words, "-o", str(picture), "--overwrite"]) == 0
    assert picture.read_bytes() != b"somebody's"
    assert main(words) == 0 and main(words) == 0
    assert {one.name for one in tmp_path.glob("lantern*")} == {"lantern.png", "lantern-a.png"}
