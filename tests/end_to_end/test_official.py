"""Official layouts through the command: tiny random checkpoints on disk become pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from support.official import (
    add_drafter,
    class_folder,
    drafter_config,
    drafter_weights,
    text_folder,
    write_drafter,
    write_features,
)


def size(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        return image.size


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = class_folder(tmp_path_factory.mktemp("c2i") / "pretrained_models")
    write_drafter(
        folder / "trained_drafters" / "c2i_drafter", drafter_weights(), drafter_config("c2i")
    )
    return folder


@pytest.fixture(scope="module")
def small_classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class-conditional with 12 x 12 tokens and no drafter."""
    folder = tmp_path_factory.mktemp("small_c2i") / "pretrained_models"
    return class_folder(folder, block_size=144)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = text_folder(tmp_path_factory.mktemp("t2i") / "pretrained_models")
    add_drafter(folder)
    return folder


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_features(tmp_path_factory.mktemp("features") / "captions.safetensors", [9])


@pytest.mark.parametrize("strategy", ["vanilla", "lantern++"])
@pytest.mark.parametrize(
    ("model", "prompt", "side", "tokens", "scale"),
    [("classes", "3", 48, 576, 4.0), ("texts", "a corgi", 32, 256, 7.5)],
)
def test_a_prompt_to_a_picture(
    command, features, tmp_path, request, strategy, model, prompt, side, tokens, scale
):
    use = ["--use", f"embeddings={features}"] if model == "texts" else []
    done = command(
        "generate", prompt, "--model", request.getfixturevalue(model), "--strategy", strategy, *use,
        "--seed", 1, "-o", tmp_path / "c.png", "--stats", tmp_path / "c.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert size(tmp_path / "c.png") == (side, side)
    stats = json.loads((tmp_path / "c.json").read_text())
    assert (stats["tokens"], stats["sampling"]["cfg_scale"]) == (tokens, scale)
    assert (stats["steps"] < tokens - 1) == (strategy == "lantern++")


def test_text_without_an_encoder_says_what_to_get(command, texts, tmp_path):
    done = command("generate", "a corgi", "--model", texts, "-o", tmp_path / "t.png")
    assert done.returncode == 2
    for part in ("google/flan-t5-xl", "--use text-encoder=PATH", "--use embeddings=PATH"):
        assert part in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.long
def test_presets_fill_in_what_is_left_open(command, classes, small_classes, tmp_path):
    def stats(model, *words):
        given = (
            "generate",
            "3",
            "--model",
            model,
            "-o",
            tmp_path / "x.png",
            "--overwrite",
            "--json",
        )
        return json.loads(command(*given, *words).stdout)

    plain = stats(small_classes, "--strategy", "llamagen-cli", "--top-k", 0)
    assert plain["strategy"]["name"] == "vanilla"
    assert (plain["sampling"]["cfg_scale"], plain["sampling"]["top_k"]) == (4.0, 0)
    relaxed = stats(classes, "--strategy", "paper-lantern++:k=5")["strategy"]
    assert relaxed["acceptance"] == {"kind": "lantern++", "k": 5, "lam": 2.0}
    assert (relaxed["residual"], relaxed["neighbour_space"]) == ("official", "raw")


# --- lantern-accel models -----------------------------------------------------------------------


def test_check_says_what_is_there_and_what_is_missing(command, texts):
    done = command("models", "check", texts, "--json")
    assert done.returncode == 0
    report = json.loads(done.stdout)
    parts = {one["part"]: one for one in report["parts"]}
    assert report["usable"] and report["family"] == "llamagen"
    assert parts["target"]["state"] == parts["vq"]["state"] == parts["drafter"]["state"] == "found"
    assert parts["target"]["dtypes"] == ["float32"]
    assert parts["text"]["state"] == "missing" and "flan-t5-xl" in parts["text"]["detail"]
    said = command("models", "check", texts).stdout
    assert "text encoder: missing" in said and "usable: yes" in said
    (texts / "vq_ds16_t2i.pt").rename(texts / "aside")
    try:
        done = command("models", "check", texts)
        assert done.returncode == 1
        assert "image tokenizer: missing; an image tokenizer (vq_ds16_t2i.pt)" in done.stdout
    finally:
        (texts / "aside").rename(texts / "vq_ds16_t2i.pt")
    done = command("models", "check", texts / "nowhere")
    assert done.returncode == 2 and "there is no" in done.stderr


def test_check_knows_the_bundled_model(command):
    from lantern_accel.models.bundle import bundled_models

    done = command("models", "check", bundled_models()["lantern-emoji"])
    assert done.returncode == 0
    assert "text encoder: found" in done.stdout
    assert "draft head: found" in done.stdout and "hidden 128, rank 64" in done.stdout


@pytest.mark.long
def test_a_plan_for_a_device_that_is_not_here(command):
    words = ("models", "plan", "llamagen-t2i-stage2", "--memory", "24GB", "--json")
    done = command(*words, "--batch", 64, "--strategy", "vanilla")
    assert done.returncode == 1
    large = json.loads(done.stdout)
    assert large["fits"] is False
    assert any(f"--batch {large['largest_batch']}" in tip for tip in large["advice"])
    done = command("models", "plan", "llamagen-b-256", "--device", "gpu-of-the-future")
    assert done.returncode == 2 and "--memory 24GB" in done.stderr
