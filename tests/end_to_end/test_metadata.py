"""What a written picture says of how it was drawn."""

from __future__ import annotations

import json

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

import lantern_accel


def test_a_png_says_what_it_was_drawn_from(command, tiny_model, tmp_path):
    words = ["generate", "ein grünes Haus 🏠", "red heart", "-m", tiny_model, "-d", "cpu", "-q"]
    words += ["-s", "eagle", "--seed", 7]
    done = command(*words, "-o", tmp_path / "a.png")
    assert done.returncode == 0 and not done.stdout
    with Image.open(tmp_path / "a-0.png") as picture:
        text = picture.text
    assert text["prompt"] == "ein grünes Haus 🏠" and text["seed"] == "7" and text["image"] == "0"
    assert text["strategy"] == "eagle" and text["lantern_accel"] == lantern_accel.__version__
    assert text["model"] and json.loads(text["sampling"])["temperature"] >= 0
    with Image.open(tmp_path / "a-1.png") as picture:
        assert (picture.text["prompt"], picture.text["image"]) == ("red heart", "1")
    command(*words, "--grid", "-o", tmp_path / "grid.png")
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


def figures(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "strategy",
    [
        "lantern++:k=5,lambda=3,residual=optimal,drafts=0,1,00,01,000",
        "lantern:k=6,delta=0.7,drafts=chain:3",
    ],
)
def test_a_relaxed_png_is_made_again_from_itself(command, tiny_model, tmp_path, strategy):
    words = ["generate", "red heart", "-m", tiny_model, "-d", "cpu", "--json", "-b", 2, "-n", 3]
    words += ["--seed", 5, "-s", strategy, "-t", 1.3, "--cfg-scale", 2]
    words += ["--negative-prompt", "dog face"]
    first = figures(command(*words, "-o", tmp_path / "a.png"))
    assert first["total_variation_per_token"] > 0
    losses, made = [], []
    for index in range(3):
        one, again = tmp_path / f"a-{index}.png", tmp_path / f"b-{index}.png"
        done = command("generate", "--like", one, "-m", tiny_model, "--json", "-o", again)
        with Image.open(one) as old, Image.open(again) as new:
            assert old.tobytes() == new.tobytes()
            was, now = dict(old.text), dict(new.text)
        assert was == now
        stats = figures(done)
        assert stats["strategy"] == first["strategy"] and "differs" not in done.stderr
        assert stats["tokens_sha256"] == was["tokens_sha256"]
        made.append(was["tokens_sha256"])
        losses.append(float(was["total_variation_per_token"]))
    assert len(set(made)) == 3  # another image under the seed has other tokens
    assert sum(losses) / 3 == pytest.approx(first["total_variation_per_token"])


@pytest.fixture(scope="module")
def made_png(tiny_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("like") / "a.png"
    result = lantern_accel.generate(
        "red heart", model=tiny_model, device="cpu", strategy="lantern++", k=5, lam=3, seed=5
    )
    result.save(path)
    return path


def changed(png, out, **update):
    """Write a PNG with other fields in its decision, or another text of its own."""
    with Image.open(png) as picture:
        info = PngInfo()
        for name, text in picture.text.items():
            decision = json.loads(text) if name == "decision" else {}
            fields = {key: value for key, value in update.items() if key in decision}
            info.add_text(
                name, json.dumps({**decision, **fields}) if fields else update.get(name, text)
            )
        picture.save(out, pnginfo=info)
    return out


def test_like_refuses_what_it_cannot_make_again(
    command, tiny_model, class_model, made_png, tmp_path
):
    plain, grid = tmp_path / "plain.png", tmp_path / "grid.png"
    Image.new("RGB", (8, 8)).save(plain)
    changed(made_png, grid, image="0\n1")
    damaged = changed(made_png, tmp_path / "damaged.png", seed="many")
    text = tmp_path / "text.png"
    text.write_text("no picture")
    other = changed(made_png, tmp_path / "other.png", backend="warp 1.0")
    half = changed(made_png, tmp_path / "half.png", dtype="float8")
    model = ["-m", tiny_model]
    for words, said in (
        ([plain, *model], "does not say"),
        ([text, *model], "not a PNG"),
        ([tmp_path / "none.png", *model], "No such file"),
        ([grid, *model], "one image"),
        ([damaged, *model], "seed"),
        ([made_png, "-m", class_model], "weights"),
        ([made_png], "--model"),
        ([other, *model], "rounding may change tokens"),
        ([half, *model], "rounding may change tokens"),
        ([made_png, *model, "dog face"], "PROMPT"),
        ([made_png, *model, "--seed", 3], "--seed"),
        ([made_png, *model, "-s", "vanilla"], "--strategy"),
        ([made_png, *model, "--weights", "int8"], "--weights"),
        ([made_png, *model, "--resume"], "--resume"),
    ):
        done = command("generate", "--like", *words, "-o", tmp_path / "out.png")
        assert done.returncode not in (0, 1), words
        assert said in done.stderr and not (tmp_path / "out.png").exists(), done.stderr
    there = command("generate", "--like", other, *model, "-d", "cpu", "-o", tmp_path / "out.png")
    assert there.returncode == 0 and "the tokens are those of" in there.stderr


def test_like_says_where_tokens_are_not_those_of_the_file(command, tiny_model, made_png, tmp_path):
    of = changed(made_png, tmp_path / "of.png", seed="6", device="A Faster One")
    done = command("generate", "--like", of, "-m", tiny_model, "-o", tmp_path / "out.png")
    assert done.returncode == 0
    assert "differs" in done.stderr and "A Faster One" in done.stderr
