"""The scripts in examples/, on models of random weights, as their first lines say to run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = pytest.mark.long


def run(*words: object, **variables: str) -> str:
    """Run a script with this environment's commands first on the path; return what it printed."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        [str(word) for word in words], env=os.environ | {"PATH": path} | variables,
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("red heart\ndog face\n", encoding="utf-8")
    return path


def test_strategies_are_compared_on_own_prompts(
    tiny_model: Path, tmp_path: Path, prompts: Path
) -> None:
    out = tmp_path / "compared.png"
    words = "--device", "cpu", prompts, "-o", out
    said = run(sys.executable, EXAMPLES / "lantern_vs_plain.py", *words)
    assert [line.split()[0] for line in said.splitlines()[1:5]] == [
        "vanilla", "eagle", "lantern", "lantern++",
    ]  # fmt: skip
    with Image.open(out) as grid:
        assert grid.size == (2 * 64, 4 * 64)


def test_an_array_of_jobs_shares_the_captions(
    tiny_model: Path, tmp_path: Path, prompts: Path
) -> None:
    for task in ("0", "1"):
        run(
            "bash", EXAMPLES / "captions.sbatch", prompts, tmp_path / "images",
            SLURM_ARRAY_TASK_ID=task, SLURM_ARRAY_TASK_COUNT="2", MODEL=str(tiny_model),
        )  # fmt: skip
    assert [len([*(tmp_path / f"images-{n}").glob("*.png")]) for n in (0, 1)] == [1, 1]


def test_a_draft_head_is_trained_and_measured(
    tiny_model: Path, tmp_path: Path, prompts: Path
) -> None:
    work, config = tmp_path / "work", tmp_path / "head.json"
    config.write_text(json.dumps({"steps": 4, "warmup": 1, "evaluate_every": 2}))
    words = tiny_model, prompts, work
    said = run("bash", EXAMPLES / "draft_head.sh", *words, SAMPLES="16", CONFIG=str(config))
    assert said.count("tokens per step") == 2
    assert (work / "head" / "draft_head.safetensors").is_file()


def test_glm_image_is_generated_in_diffusers(tmp_path: Path) -> None:
    pytest.importorskip("diffusers", minversion="0.37")
    pytest.importorskip("transformers", minversion="5.8")
    from support.hub_models import glm, glm_pipeline, glm_processor

    glm_pipeline(glm(2), glm_processor()).save_pretrained(tmp_path / "model")
    words = "a cube", "--model", tmp_path / "model", "--device", "cpu", "-o", tmp_path / "a.png"
    run(sys.executable, EXAMPLES / "diffusers_glm_image.py", *words, "--size", 64, "--steps", 1)
    with Image.open(tmp_path / "a.png") as image:
        assert image.size == (64, 64)


def test_janus_is_generated_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.8")
    from support.janus import SPECIAL, write_janus

    folder, (bos, eos, pad, start, end, image_token, *_) = (
        write_janus(tmp_path / "m", "hf"),
        SPECIAL,
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token=bos, eos_token=eos, pad_token=pad,
        extra_special_tokens={"image_token": image_token, "boi_token": start, "eoi_token": end},
    )  # fmt: skip
    images = transformers.JanusImageProcessorPil(size={"height": 32, "width": 32})
    transformers.JanusProcessor(images, tokenizer).save_pretrained(folder)
    said = {"boi_token_id": SPECIAL[start]}
    transformers.GenerationConfig(
        bos_token_id=SPECIAL[bos],
        pad_token_id=SPECIAL[pad],
        guidance_scale=4.0,
        generation_kwargs=said,
    ).save_pretrained(folder)
    words = "a cube", "--model", folder, "--device", "cpu", "-o", tmp_path / "a.png"
    run(sys.executable, EXAMPLES / "transformers_janus.py", *words)
    with Image.open(tmp_path / "a.png") as image:
        assert image.mode == "RGB" and image.width == image.height
