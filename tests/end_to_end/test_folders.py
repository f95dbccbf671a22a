"""A file of prompts becomes a folder of images: kills, resumption, and shares of its rows."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from PIL import Image

import lantern_accel
from lantern_accel.errors import LanternWarning, RequestError
from lantern_accel.generation import folder
from lantern_accel.prompts import read_items

PROMPTS = ["red heart", "dog face", "a blue fish", "red heart", "fish", "dog"]


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS))
    return path


@pytest.fixture
def run(tiny_model, prompts, tmp_path, monkeypatch):
    """Draw the file into a folder, four images a chunk."""
    usual = {"model": str(tiny_model), "device": "cpu", "dtype": "float32"}
    monkeypatch.setattr(folder, "CHUNK", 4)

    def call(out="out", resume=False, slots=2, file=prompts, share="1/1", load=None, **settings):
        given = {"strategy": "vanilla", "batch_size": slots, **settings}
        parts = usual | (load or {})
        opened = partial(lantern_accel.load, **parts)
        return folder.generate_file(
            file, tmp_path / out, opened, parts, given, share=share, resume=resume
        )

    return call


def watched(monkeypatch, seen):
    """Let ``seen`` have the items of every chunk before they are drawn."""
    draw = folder.FolderImages.generate
    monkeypatch.setattr(
        folder.FolderImages, "generate", lambda self, items: (seen(items), draw(self, items))[1]
    )


def pictures(folder: Path) -> dict[str, bytes]:
    return {p.name: Image.open(p).tobytes() for p in sorted(folder.glob("*.png"))}


def journal(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def test_a_folder_is_of_one_process(run, tmp_path):
    """A lock is of an open file, so that this process may stand for the other."""
    (tmp_path / "out").mkdir()
    with (
        FileLock(tmp_path / "out" / folder.LOCK),
        pytest.raises(RequestError, match="another process generates into"),
    ):
        run()
    assert run()["images"] == 6


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_the_images_are_those_of_one_generate(run, tiny_model, prompts, tmp_path, slots):
    summary = run(seed=5, slots=slots)
    with lantern_accel.load(tiny_model, device="cpu", dtype="float32") as pipeline:
        whole = pipeline.generate(PROMPTS, strategy="vanilla", seed=5)
    found = pictures(tmp_path / "out")
    assert list(found) == [f"{n:06d}.png" for n in range(6)]
    assert list(found.values()) == [image.tobytes() for image in whole.images]
    assert sorted(one["number"] for one in journal(tmp_path / "out")) == list(range(6))
    mine = summary["this_call"]
    assert (summary["images"], mine["images"], mine["tokens"]) == (6, 6, 96)
    assert mine["images_per_second"] > 0 and mine["tokens_per_step"] == 1.0
    assert mine["joules"] is None and mine["joules_per_image"] is None  # no meter is not 0 joules
    assert json.loads((tmp_path / "out/summary.json").read_text()) == summary


def test_a_folder_says_what_relaxation_lost_per_token(run, tiny_model, tmp_path):
    rule = {"strategy": "lantern++", "k": 5, "lam": 3}
    mine = run(seed=5, **rule)["this_call"]
    with lantern_accel.load(tiny_model, device="cpu", dtype="float32") as pipeline:
        stats = pipeline.generate(PROMPTS, seed=5, **rule).stats
    assert stats.total_variation_per_token > 0
    assert mine["total_variation_per_token"] == pytest.approx(stats.total_variation_per_token)
    lost = [one["total_variation_per_token"] for one in journal(tmp_path / "out")]
    assert sum(lost) / len(lost) == pytest.approx(stats.total_variation_per_token)


def test_a_run_that_was_killed_is_continued_to_the_same_images(run, tmp_path, monkeypatch):
    run("whole", seed=5)
    calls: list[object] = []

    def stop_after_one(items):
        calls.append(items)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        watched(patch, stop_after_one)
        run(seed=5)
    out = tmp_path / "out"
    assert len(pictures(out)) == 4
    # As a kill while writing leaves it: a torn line, half a file; and an image that somebody deleted.
    journal = (out / "journal.jsonl").read_bytes()
    (out / "journal.jsonl").write_bytes(journal[: len(journal) - 20])
    (out / ".lantern-x.part").write_bytes(b"half")
    (out / "000000.png").unlink()
    with pytest.raises(RequestError, match="--resume continues it"):
        run(seed=5)
    with pytest.raises(RequestError, match="made with --seed 5, not 6; name another"):
        run(seed=6, resume=True)
    drawn: list[int] = []
    watched(monkeypatch, lambda items: drawn.extend(i.number for i in items))
    summary = run(seed=5, resume=True)
    assert drawn == [0, 3, 4, 5] and summary["images"] == 6
    assert pictures(out) == pictures(tmp_path / "whole")
    assert not list(out.glob(".lantern-*"))
    noted = (out / "run.json").read_text()
    again = run(seed=5, resume=True)
    assert again["images"] == 6 and again["this_call"]["images"] == 0 and len(drawn) == 4
    assert (out / "run.json").read_text() == noted  # and what the images were made with is kept


def test_shares_of_the_rows_are_the_rows_of_the_whole(run, tmp_path):
    run("whole", seed=5)
    shares = [run(f"share-{k}", seed=5, share=f"{k}/4") for k in (1, 2, 3, 4)]
    assert [one["images"] for one in shares] == [2, 2, 1, 1]
    found: dict[str, bytes] = {}
    for k in (1, 2, 3, 4):
        found |= pictures(tmp_path / f"share-{k}")
    assert found == pictures(tmp_path / "whole")
    with pytest.raises(RequestError, match="made with --share 1/4, not 2/4"):
        run("share-1", seed=5, share="2/4", resume=True)
    for wrong in ("0/4", "5/4", "1/4/2"):
        with pytest.raises(RequestError, match="write K/N"):
            run("other", share=wrong)
    assert not (tmp_path / "other").exists()


def written(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize("share", ["1/1", "2/2"])
def test_rows_that_are_added_at_the_end_are_drawn(run, tmp_path, monkeypatch, share):
    rows = [{"prompt": text} for text in PROMPTS]
    file = written(tmp_path / "rows.jsonl", rows[:3])
    first = run(file=file, share=share)
    drawn: list[int] = []
    watched(monkeypatch, lambda items: drawn.extend(one.number for one in items))
    written(file, rows)
    # The seed is the one that the first command drew; how many are decoded together changes no image.
    summary = run(file=file, resume=True, share=share, slots=1)
    assert drawn == ([3, 4, 5] if share == "1/1" else [3, 5])
    assert summary["seed"] == first["seed"]
    run("whole", seed=summary["seed"], file=file, share=share)
    assert pictures(tmp_path / "out") == pictures(tmp_path / "whole")


@pytest.mark.parametrize(
    ("rows", "settings", "says"),
    [
        ([{"prompt": "ghost"}], {}, "row 3 was 'a blue fish', is 'ghost' now"),
        ([{"prompt": "a blue fish", "seed": 9}], {}, "the seed of row 3 was 5, is 9 now"),
        ([{"prompt": "a blue fish", "seed": -1}], {}, "the seed of row 3 was 5, is -1 now"),
        ([{"prompt": "a blue fish", "id": "b"}], {}, "of row 3 was '000002.png', is 'b.png' now"),
        ([], {}, "row 3 was 'a blue fish', and is gone"),
        (None, {"seed": 6}, "made with --seed 5, not 6"),
        (None, {"top_k": 3}, "made without --top-k, not with 3"),
        (None, {"strategy": "scd"}, "made with --strategy vanilla, not scd"),
        (None, {"cfg_scale": None}, "made with --cfg-scale 2.0, not without"),
        (None, {"load": {"model": "a"}}, "made with --model .*tiny, not a"),
        (None, {"load": {"dtype": "bfloat16"}}, "made with --dtype float32, not bfloat16"),
        (None, {"load": {"vq": "a"}}, "made without --use vq, not with a"),
    ],
)
def test_a_run_that_is_another_says_what_differs(run, tmp_path, rows, settings, says):
    first = [{"prompt": text} for text in PROMPTS[:2]]
    file = written(tmp_path / "rows.jsonl", [*first, {"prompt": PROMPTS[2]}])
    run(seed=5, file=file, cfg_scale=2.0)
    before = pictures(tmp_path / "out")
    if rows is not None:
        written(file, [*first, *rows])
    with pytest.raises(RequestError, match=says):
        run(file=file, resume=True, **{"seed": 5, "cfg_scale": 2.0, **settings})
    assert pictures(tmp_path / "out") == before


def test_a_row_that_was_not_drawn_may_change(run, tmp_path):
    rows: list[dict[str, object]] = [{"prompt": "red heart"}, {"prompt": "fish", "id": "a" * 120}]
    file = written(tmp_path / "rows.jsonl", rows)
    assert list(run(seed=5, file=file)["failed"]) == ["1"]
    rows[1] = {"prompt": "dog face", "id": "a"}
    summary = run(seed=5, file=written(file, rows), resume=True)
    assert list(pictures(tmp_path / "out")) == ["000000.png", "a.png"] and not summary["failed"]


def test_a_prompt_that_cannot_be_drawn_costs_its_row_alone(run, tmp_path):
    rows = [{"prompt": "red heart"}, {"prompt": 3}, {"prompt": "dog face", "id": "dog"}]
    rows += [{"prompt": "fish", "id": "nul.txt"}, {"prompt": "fish", "seed": 1.5}, {"id": "b"}]
    summary = run(seed=5, file=written(tmp_path / "some.jsonl", rows))
    assert list(pictures(tmp_path / "out")) == ["000000.png", "dog.png"]
    said = ["takes text", "names no file on Windows", "an integer from 0", "no prompt"]
    for number, says in zip(("1", "3", "4", "5"), said, strict=True):
        assert says in summary["failed"].pop(number)
    assert summary["images"] == 2 and not summary["failed"]


def test_the_journal_says_what_was_cut_of_a_prompt(run, tmp_path):
    file = tmp_path / "long.txt"
    file.write_text("red heart\n" + "red heart " * 40)
    with pytest.warns(LanternWarning, match="tokens"):
        run(file=file, seed=5)
    short, long = sorted(journal(tmp_path / "out"), key=lambda one: one["number"])
    assert "note" not in short
    assert "tokens" in long["note"]


def test_an_item_is_drawn_by_its_own_seed(tiny_model, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "red heart", "seed": 9}\n{"prompt": "red heart", "seed": 9}')
    with lantern_accel.load(tiny_model, device="cpu", dtype="float32") as pipeline:
        found = folder.FolderImages(pipeline, {"strategy": "vanilla"}).generate(read_items(path, 1))
        whole = pipeline.generate("red heart", strategy="vanilla", seed=9)
    assert len({picture for _, picture, _ in found}) == 1
    assert found[0][2]["tokens_sha256"] == whole.stats.tokens_sha256


def test_the_command_draws_a_folder_and_says_what_it_cannot(command, tiny_model, prompts, tmp_path):
    words = ["generate", "--prompts", prompts, "-m", tiny_model, "-d", "cpu", "--dtype", "float32"]
    done = command(*words, "-o", tmp_path / "out", "-s", "vanilla", "--seed", 5)
    assert done.returncode == 0, done.stderr
    assert "6 images in" in done.stdout and "images/s" in done.stdout
    prompts.write_text("\n".join([*PROMPTS, "star"]))
    again = command(*words, "-o", tmp_path / "out", "-s", "vanilla", "--resume")
    assert again.returncode == 0 and "7 images in" in again.stdout
    for more, says in (
        (["--share", "1/2", "-o", tmp_path / "x.png"], "-o FOLDER"),
        (["-o", tmp_path / "x", "--grid"], "leave --grid out"),
        (["-o", tmp_path / "x", "-n", 2], "one image per row"),
        (["-o", tmp_path], "holds other files"),
    ):
        refused = command(*words, *more)
        assert refused.returncode == 2 and says in refused.stderr, refused.stderr
