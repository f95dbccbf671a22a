"""A file of prompts becomes a folder of images: the worker without Ray, kills and resumption."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

import lantern_accel
from lantern_accel.distributed.painter import Painter
from lantern_accel.distributed.run import Here, draw_file
from lantern_accel.errors import LanternWarning, RequestError
from lantern_accel.prompts import read_items

PROMPTS = ["red heart", "dog face", "a blue fish", "red heart", "fish", "dog"]


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS))
    return path


@pytest.fixture
def run(tiny_model, prompts, tmp_path):
    """Draw the file into a folder with one worker in this process."""
    load = {"model": str(tiny_model), "device": "cpu", "dtype": "float32"}

    def call(out="out", resume=False, slots=2, watch=None, file=prompts, **settings):
        given = {"strategy": "vanilla", **settings}

        def make():
            here = Here(Painter(load, given, slots=slots), chunk=4)
            if watch is not None:
                watch(here)
            return here

        return draw_file(file, tmp_path / out, make, load, given, resume=resume)

    return call


def pictures(folder: Path) -> dict[str, bytes]:
    return {p.name: Image.open(p).tobytes() for p in sorted(folder.glob("*.png"))}


def test_the_images_are_those_of_one_generate(run, tiny_model, prompts, tmp_path):
    summary = run(seed=5)
    with lantern_accel.load(tiny_model, device="cpu", dtype="float32") as pipeline:
        whole = pipeline.generate(PROMPTS, strategy="vanilla", seed=5)
    found = pictures(tmp_path / "out")
    assert list(found) == [f"{n:06d}.png" for n in range(6)]
    assert list(found.values()) == [image.tobytes() for image in whole.images]
    lines = [json.loads(line) for line in (tmp_path / "out/journal.jsonl").read_text().splitlines()]
    assert sorted(one["number"] for one in lines) == list(range(6))
    mine = summary["workers_of_this_call"]["worker"]
    assert (summary["images"], mine["images"], mine["tokens"]) == (6, 6, 96)
    assert mine["images_per_second"] > 0 and mine["tokens_per_step"] == 1.0
    assert mine["joules"] is None and mine["joules_per_image"] is None  # no meter is not 0 joules
    assert json.loads((tmp_path / "out/summary.json").read_text()) == summary


@pytest.mark.parametrize("slots", [1, 3])
def test_the_batch_changes_no_image(run, tmp_path, slots):
    run("two", seed=5)
    run("other", seed=5, slots=slots)
    assert pictures(tmp_path / "two") == pictures(tmp_path / "other")


def test_a_run_that_was_killed_is_continued_to_the_same_images(run, tmp_path):
    run("whole", seed=5)

    def stop_after_one(here):
        draw, calls = here.painter.draw, []

        def once(items):
            calls.append(items)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return draw(items)

        here.painter.draw = once

    with pytest.raises(KeyboardInterrupt):
        run(seed=5, watch=stop_after_one)
    folder = tmp_path / "out"
    assert len(pictures(folder)) == 4
    # As a kill while writing leaves it: a torn line, half a file; and an image that somebody deleted.
    journal = (folder / "journal.jsonl").read_bytes()
    (folder / "journal.jsonl").write_bytes(journal[: len(journal) - 20])
    (folder / ".lantern-x.part").write_bytes(b"half")
    (folder / "000000.png").unlink()
    with pytest.raises(RequestError, match="--resume continues it"):
        run(seed=5)
    with pytest.raises(RequestError, match=r"its settings is .* name another folder"):
        run(seed=6, resume=True)
    drawn: list[int] = []

    def count(here):
        draw = here.painter.draw
        here.painter.draw = lambda items: drawn.extend(i.number for i in items) or draw(items)

    summary = run(seed=5, resume=True, watch=count)
    assert drawn == [0, 3, 4, 5] and summary["images"] == 6
    assert pictures(folder) == pictures(tmp_path / "whole")
    assert not list(folder.glob(".lantern-*"))
    again = run(seed=5, resume=True, watch=lambda here: pytest.fail("nothing is left to generate"))
    assert again["images"] == 6 and again["workers_of_this_call"] == {}


def test_a_seed_that_was_drawn_is_kept_for_the_rest(run, tmp_path):
    run("out")
    (tmp_path / "out/000002.png").unlink()
    before = pictures(tmp_path / "out")
    run("out", resume=True)
    after = pictures(tmp_path / "out")
    assert before.items() <= after.items() and len(after) == 6


def test_a_prompt_that_cannot_be_drawn_costs_its_row_alone(run, tmp_path):
    path = tmp_path / "some.jsonl"
    rows = [{"prompt": "red heart"}, {"prompt": 3}, {"prompt": "dog face", "id": "dog"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    summary = run(seed=5, file=path)
    assert list(pictures(tmp_path / "out")) == ["000000.png", "dog.png"]
    assert list(summary["failed"]) == ["1"] and "takes text" in summary["failed"]["1"]
    assert summary["images"] == 2


def test_the_journal_says_what_was_cut_of_a_prompt(run, tmp_path):
    file = tmp_path / "long.txt"
    file.write_text("red heart\n" + "red heart " * 40)
    with pytest.warns(LanternWarning, match="tokens"):
        run(file=file, seed=5)
    lines = [json.loads(line) for line in (tmp_path / "out/journal.jsonl").read_text().splitlines()]
    short, long = sorted(lines, key=lambda one: one["number"])
    assert "note" not in short
    assert "tokens" in long["note"]


def test_workers_that_would_draw_other_images_are_refused(run):
    def differ(here):
        here.workers.append({**here.workers[0], "dtype": "bfloat16"})

    with pytest.raises(RequestError, match="--dtype float32"):
        run(seed=5, watch=differ)


def test_an_item_is_drawn_by_its_own_seed(tiny_model, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "red heart", "seed": 9}\n{"prompt": "red heart", "seed": 9}')
    painter = Painter(
        {"model": str(tiny_model), "device": "cpu", "dtype": "float32"}, {"strategy": "vanilla"}
    )
    batch = painter.draw(read_items(path, 1))
    assert len({one.picture for one in batch.images}) == 1
    whole = painter.pipeline.generate("red heart", strategy="vanilla", seed=9)
    assert batch.images[0].tokens_sha256 == whole.stats.tokens_sha256
    painter.close()


def test_the_command_draws_a_folder_and_says_what_it_cannot(command, tiny_model, prompts, tmp_path):
    words = ["generate", "--prompts", prompts, "-m", tiny_model, "-d", "cpu", "--dtype", "float32"]
    done = command(*words, "-o", tmp_path / "out", "-s", "vanilla", "--seed", 5)
    assert done.returncode == 0, done.stderr
    assert "6 images in" in done.stdout and "images/s" in done.stdout
    for more, says in (
        (["--workers", "auto"], "name one with --output"),
        (["--workers", "auto", "-o", tmp_path / "x.png"], "a folder of images"),
        (["-o", tmp_path / "x", "--grid"], "leave --grid out"),
        (["-o", tmp_path / "x", "-n", 2], "one image per row"),
        (["--workers", "auto", "-o", tmp_path / "x"], "leave --device out"),
        (["-o", tmp_path], "holds other files"),
    ):
        refused = command(*words, *more)
        assert refused.returncode == 2 and says in refused.stderr, refused.stderr
