"""The command and the Python call on tiny random models: what they write, say and refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

import lantern_accel
from lantern_accel.generation.result import LABEL, LOSS
from lantern_accel.strategy.values import STRATEGIES


def size(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        return image.size


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_writes_a_picture_and_its_figures(command, tiny_model, tmp_path, strategy):
    done = command(
        "generate", "red heart", "--model", tiny_model, "--seed", 1,
        "--strategy", f"{strategy}:k=3" if "lantern" in strategy else strategy,
        "-o", tmp_path / "out.png", "--stats", tmp_path / "out.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert size(tmp_path / "out.png") == (8, 8)
    stats = json.loads((tmp_path / "out.json").read_text())
    assert stats["tokens"] == 16
    assert stats["seed"] == 1
    assert stats["strategy"]["name"] == strategy
    assert set(stats["seconds"]) == {"text", "prefill", "decode", "pixels", "total", "measuring"}
    assert stats["step_compression"] == 15 / stats["steps"]
    assert (stats["step_compression"] == 1) == (strategy == "vanilla" or stats["steps"] == 15)
    assert sum(stats["accepted_histogram"]) == stats["steps"]
    assert lantern_accel.GenerationStats.model_validate(stats).model_dump(mode="json") == stats
    loss = "0: exact"
    if "lantern" in strategy:
        loss = f"{stats['total_variation_per_token']:.4f} (upper bound)"
    assert f"{LOSS}: {loss} with: " in " ".join(done.stdout.split())


def test_many_prompts_and_images_come_in_order_whatever_the_batch(pipeline):
    asked = {"num_images": 2, "seed": 1, "strategy": "lantern++", "k": 3}
    seen: list[tuple[int, int]] = []
    whole, parts = (
        pipeline.generate(
            ["red heart", "dog face"], batch_size=batch, **asked,
            on_progress=lambda known, total: seen.append((known, total)),
        )
        for batch in (4, None)
    )  # fmt: skip
    assert whole.tokens.shape == (4, 16)
    assert whole.tokens.dtype == torch.int64
    assert len(whole.images) == 4
    assert torch.equal(whole.tokens, parts.tokens)
    assert (whole.stats.batch_size, parts.stats.batch_size) == (4, 1)
    assert seen.count((64, 64)) == 2 and seen[-1] == (64, 64), "progress ends at the total"
    known = [one for one, _ in seen[seen.index((64, 64)) + 1 :]]
    assert known == sorted(known)


def test_class_ids(command, class_model, tmp_path):
    words = ("--model", class_model, "--strategy", "lantern++:k=3", "-o", tmp_path / "c.png")
    done = command("generate", "3", *words, "--json")
    assert json.loads(done.stdout)["prompts"] == ["3"]
    result = lantern_accel.generate(
        [0, 6], model=class_model, device="cpu", strategy="lantern++", k=3, seed=0
    )
    assert result.tokens.shape == (2, 16)
    for wrong in ("7", "-1", "a heart"):
        done = command("generate", "--model", class_model, "-o", tmp_path / "d.png", "--", wrong)
        assert done.returncode == 2
        assert "class ids from 0 to 6" in done.stderr


def test_several_images_get_numbers_or_one_grid(command, tiny_model, tmp_path):
    words = ("generate", "red heart", "dog face", "--model", tiny_model, "--strategy", "vanilla")
    done = command(*words, "--num-images", 2, "-o", tmp_path / "p.png", "--verbose")
    assert done.returncode == 0, done.stderr
    assert [size(tmp_path / f"p-{i}.png") for i in range(4)] == [(8, 8)] * 4
    assert "at once in" in done.stdout
    command(*words, "--num-images", 3, "-o", tmp_path / "g.png", "--grid")
    assert size(tmp_path / "g.png") == (24, 2 * (8 + LABEL))
    with Image.open(tmp_path / "g.png") as sheet:  # a prompt stands above each row
        for top in (0, 8 + LABEL):
            assert sheet.convert("L").crop((0, top, 24, top + LABEL)).getextrema()[0] < 128


def test_a_long_prompt_is_cut_with_a_warning(command, tiny_model, tmp_path):
    done = command(
        "generate", "a blue fish in the sea red heart", "--model", tiny_model, "--strategy",
        "vanilla", "-o", tmp_path / "long.png",
    )  # fmt: skip
    assert done.returncode == 0
    assert "prefix holds 5" in done.stderr
    with (
        pytest.warns(lantern_accel.LanternWarning, match="cut after"),
        lantern_accel.load(tiny_model, device="cpu") as pipe,
    ):
        pipe.generate("a blue fish in the sea red heart", strategy="vanilla")


#: What only the model's own sizes can refuse; tests/unit/test_refusals.py has the others.
REFUSED = [
    (["--strategy", "lantern++:k=48"], "k = 48"),
    (["--strategy", "eagle:drafts=chain:16"], "16 drafts deep"),
    (["--top-k", "49"], "top_k = 49"),
]


@pytest.mark.parametrize(("words", "reason"), REFUSED, ids=[" ".join(w) for w, _ in REFUSED])
def test_bad_values_are_refused_in_one_sentence(command, tiny_model, tmp_path, words, reason):
    done = command("generate", "red heart", "--model", tiny_model, "-o", tmp_path / "x.png", *words)
    assert done.returncode == 2
    assert reason in done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "x.png").exists()


def test_a_model_without_a_drafter_says_how_to_get_one(command, undrafted_model, tmp_path):
    words = ("generate", "dog", "--model", undrafted_model, "--overwrite", "-o", tmp_path / "x.png")
    assert command(*words).returncode == 0, "auto needs no drafter"
    done = command(*words, "--strategy", "lantern++")
    assert done.returncode == 2
    assert "lantern-accel train drafter" in done.stderr


def truncated(folder: Path) -> None:
    data = (folder / "target.safetensors").read_bytes()
    (folder / "target.safetensors").write_bytes(data[: len(data) // 2])


def says(part: str, **sizes: int) -> Callable[[Path], object]:
    """Let the manifest of a folder say other sizes of a part."""

    def change(folder: Path) -> None:
        manifest = json.loads((folder / "model.json").read_text())
        manifest[part] |= sizes
        (folder / "model.json").write_text(json.dumps(manifest))

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (truncated, ["target.safetensors", "truncated"]),
        (says("target", ffn_dim=64), ["w13.weight has shape [96, 32]", "[128, 32]"]),
        (says("drafter", grid=8), ["is not of this target"]),
        (lambda folder: (folder / "model.json").write_text("{"), ["model.json"]),
    ],
)
def test_a_damaged_model_is_told(command, tiny_model, tmp_path, change, told):
    change(folder := shutil.copytree(tiny_model, tmp_path / "model"))
    done = command("generate", "dog", "--model", folder, "-o", tmp_path / "x.png")
    assert done.returncode == 2
    assert all(part in done.stderr for part in told), done.stderr
