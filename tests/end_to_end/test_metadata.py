"""What a written picture says of how it was drawn."""

from __future__ import annotations

import json

import pytest
from PIL import Image

import lantern_accel


def test_a_png_says_what_it_was_drawn_from(command, tiny_model, tmp_path):
    words = [
        "generate",
        "ein grünes Haus 🏠",
        "red heart",
        "-m",
        tiny_model,
        "-d",
        "cpu",
        "-q",
        "-s",
        "eagle",
    ]
    done = command(*words, "--seed", 7, "-o", tmp_path / "a.png")
    assert done.returncode == 0 and not done.stdout
    with Image.open(tmp_path / "a-0.png") as picture:
        text = picture.text
    assert text["prompt"] == "ein grünes Haus 🏠" and text["seed"] == "7" and text["image"] == "0"
    assert text["strategy"] == "eagle" and text["lantern_accel"] == lantern_accel.__version__
    assert text["model"] and json.loads(text["sampling"])["temperature"] >= 0
    with Image.open(tmp_path / "a-1.png") as picture:
        assert (picture.text["prompt"], picture.text["image"]) == ("red heart", "1")
    command(*words, "--seed", 7, "--grid", "-o", tmp_path / "grid.png")
    with Image.open(tmp_path / "grid.png") as picture:
        assert picture.text["prompt"] == "ein grünes Haus 🏠\nred heart"
        assert picture.text["seed"] == "7"


def test_metadata_is_left_out_where_it_is_not_wanted(command, tiny_model, tmp_path):
    words = ["generate", "red heart", "-m", tiny_model, "-d", "cpu", "-q", "--no-metadata"]
    assert command(*words, "-o", tmp_path / "a.png").returncode == 0
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.text == {}


def test_results_of_python_are_saved_with_it_and_streams_images_have_it(tiny_model, tmp_path):
    with lantern_accel.load(tiny_model, device="cpu") as pipeline:
        result = pipeline.generate("red heart", seed=3)
        stream = pipeline.stream("red heart", seed=3)
        last = list(stream)[-1]
    (path,) = result.save(tmp_path / "a.png")
    with Image.open(path) as picture:
        assert picture.text == result.images[0].info == last.image.info
        assert picture.text["seed"] == "3"
    (path,) = result.save(tmp_path / "b.png", metadata=False)
    with Image.open(path) as picture:
        assert picture.text == {}
    result.save(tmp_path / "c.jpg")


@pytest.mark.parametrize(
    ("words", "bound"),
    [
        (["--temperature", "2000000"], "2000000"),
        (["--cfg-scale", "12345678"], "12345678"),
        (["--seed", "9223372036854775808"], "9223372036854775808"),
    ],
)
def test_bounds_are_whole_numbers(command, tiny_model, words, bound):
    done = command("generate", "red heart", "-m", tiny_model, *words)
    assert done.returncode == 2
    assert bound in done.stderr and "e+" not in done.stderr
