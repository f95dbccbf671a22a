"""Official layouts through the command: tiny random checkpoints on disk become pictures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from PIL import Image
from support.official import (
    add_drafter,
    class_folder,
    drafter_config,
    drafter_weights,
    hugging_face,
    text_folder,
    write_drafter,
    write_features,
    write_shards,
    write_sizes,
)

from lantern_accel.checkpoints.weights import open_checkpoint


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


def test_lanterns_folder_in_shards_draws_the_same(command, texts, features, tmp_path):
    """The same weights in LlamaGen's layout and in LANTERN's: the same picture."""
    root = tmp_path / "ckpts" / "llamagen"
    source = open_checkpoint(texts / "t2i_tiny_stage1_256.pt")
    weights = hugging_face({key: source.read(key) for key in source})
    model = write_shards(root / "LlamaGen-T2I", weights, 2)
    write_sizes(model / "config.json", num_attention_heads=4, input_type="t2i")
    words = (
        "--strategy",
        "vanilla",
        "--seed",
        1,
        "--use",
        f"embeddings={features}",
        "--no-metadata",
    )
    for path, name in ((texts, "a"), (model, "b")):
        done = command(
            "generate", "a corgi", "--model", path, *words, "-o", tmp_path / f"{name}.png",
            "--use", f"vq={texts / 'vq_ds16_t2i.pt'}",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_text_without_an_encoder_says_what_to_get(command, texts, tmp_path):
    done = command("generate", "a corgi", "--model", texts, "-o", tmp_path / "t.png")
    assert done.returncode == 2
    for part in ("google/flan-t5-xl", "--use text-encoder=PATH", "--use embeddings=PATH"):
        assert part in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.long
def test_presets_fill_in_what_is_left_open(command, classes, small_classes, tmp_path):
    words = (
        "generate", "3", "--model", small_classes, "--overwrite", "-o", tmp_path / "x.png", "--json",
    )  # fmt: skip
    done = command(*words, "--strategy", "llamagen-cli", "--top-k", 0)
    stats = json.loads(done.stdout)
    assert stats["strategy"]["name"] == "vanilla"
    assert (stats["sampling"]["cfg_scale"], stats["sampling"]["top_k"]) == (4.0, 0)
    words = ("generate", "3", "--model", classes, *words[4:])
    done = command(*words, "--strategy", "paper-lantern++:k=5")
    stats = json.loads(done.stdout)
    assert stats["strategy"]["acceptance"] == {"kind": "lantern++", "k": 5, "lam": 2.0}
    assert stats["strategy"]["residual"] == "official"
    assert stats["strategy"]["neighbour_space"] == "raw"
    for preset, told in (
        ("llamagen-fid", "has no settings for the model"),
        ("paper-latern", "did you mean paper-lantern"),
    ):
        done = command(*words, "--strategy", preset)
        assert done.returncode == 2
        assert told in done.stderr


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


def test_check_names_a_missing_shard(command, texts, tmp_path):
    source = open_checkpoint(texts / "t2i_tiny_stage1_256.pt")
    folder = tmp_path / "LlamaGen-T2I"
    write_shards(folder, hugging_face({key: source.read(key) for key in source}), 2)
    (folder / "model-00001-of-00002.safetensors").unlink()
    done = command("models", "check", folder)
    assert done.returncode == 1
    assert "lacks model-00001-of-00002.safetensors" in done.stdout
    done = command("models", "check", tmp_path / "nowhere")
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
    small = json.loads(command(*words, "--strategy", "eagle", "--drafts", "0").stdout)
    assert small["fits"] and small["largest_batch"] > 8
    assert small["peak"] == (
        sum(small["weights"].values()) + small["buffers"] + small["tables"] + small["runtime"]
        + max(small["workspace"].values())
    )  # fmt: skip
    done = command(*words, "--batch", 64, "--strategy", "vanilla")
    assert done.returncode == 1
    large = json.loads(done.stdout)
    assert large["fits"] is False
    assert any(f"--batch {large['largest_batch']}" in tip for tip in large["advice"])
    done = command("models", "plan", "llamagen-b-256", "--device", "gpu-of-the-future")
    assert done.returncode == 2 and "--memory 24GB" in done.stderr


@pytest.mark.long
def test_a_batch_that_does_not_fit_is_refused_before_anything_is_allocated(
    command, classes, tmp_path, monkeypatch
):
    from lantern_accel.device.backend import MemoryUse
    from lantern_accel_cpu.backend import DeviceBackend

    use = MemoryUse(in_use=0, limit=10**9, free=12 * 10**6)
    monkeypatch.setattr(DeviceBackend, "memory", lambda self: use)
    words = ("generate", "3", "--model", classes, "--strategy", "vanilla", "--num-images", 64)
    done = command(*words, "--batch", 64, "-o", tmp_path / "x.png")
    assert done.returncode == 5
    assert "a batch of 64 takes" in done.stderr and "fits" in done.stderr
    tight = MemoryUse(in_use=0, limit=10**9, free=1000)
    monkeypatch.setattr(DeviceBackend, "memory", lambda self: tight)
    done = command(*words, "-o", tmp_path / "x.png")
    assert done.returncode == 5
    assert re.search(r"the model c2i_tiny_384 in \w+ takes .* free", done.stderr)
