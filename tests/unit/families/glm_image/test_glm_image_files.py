"""GLM-Image's folders: what is read off them, what requests may ask, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from support.glm_image import write_glm_image

import lantern_accel
from lantern_accel.errors import CheckpointError, RequestError
from lantern_accel.memory.plan import planner_for
from lantern_accel.models.locate import find_model
from lantern_accel.strategy.values import Sampling

NO_PICTURES = "there are no images, the result is the prior's tokens"


def test_the_prior_s_own_folder_is_the_model_with_the_released_sampling(tmp_path: Path) -> None:
    found = find_model(write_glm_image(tmp_path / "GLM-Image") / "vision_language_encoder")
    assert found.manifest.name == "glm-image"
    assert found.manifest.defaults.sampling == Sampling(temperature=0.9, top_p=0.75)


def test_the_diffusion_half_without_the_prior(tmp_path: Path) -> None:
    folder = write_glm_image(tmp_path / "GLM-Image")
    shutil.rmtree(folder / "vision_language_encoder")
    with pytest.raises(CheckpointError, match="diffusion half without its prior"):
        find_model(folder)
    half = folder / "transformer"
    half.mkdir()
    (half / "config.json").write_text('{"_class_name": "GlmImageTransformer2DModel"}')
    with pytest.raises(CheckpointError, match="diffusion half without its prior"):
        find_model(half)


@pytest.mark.long
@pytest.mark.parametrize("size", [(32, 512), (288, 160)])
def test_any_shape_is_drawn_alike_by_all_strategies(size: tuple[int, int], tmp_path: Path) -> None:
    folder = write_glm_image(tmp_path / "GLM-Image")
    prompts = ["a red cube", "two cats, asleep on a very blue sphere"]
    with lantern_accel.load(folder, device="cpu", dtype="float32") as pipe:
        with pytest.warns(UserWarning, match=NO_PICTURES):
            drawn = [
                pipe.generate(prompts, size=size, strategy=name, temperature=0, seed=3)
                for name in ("vanilla", "scd")
            ]
        tokens = drawn[0].tokens
        assert torch.equal(tokens, drawn[1].tokens)
        assert tokens.max() < 128
        with pytest.warns(UserWarning, match=NO_PICTURES):
            sampled = pipe.generate(prompts[0], size=size, strategy="scd", seed=3)
        assert sampled.tokens.shape == tokens[:1].shape
        with pytest.raises(RequestError, match="there are no images to write"):
            sampled.save(tmp_path / "a.png")
        assert sampled._repr_png_() is None and "<table>" in sampled._repr_html_()


def test_a_release_that_was_not_tested_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lantern_accel.families import releases

    folder = write_glm_image(tmp_path / "GLM-Image")
    for part in ("transformer", "vae", "scheduler", "text_encoder", "tokenizer"):
        (folder / part).mkdir()
    with lantern_accel.load(folder, device="cpu", dtype="float32") as pipe:
        for release, says in (
            ("0.36.0", r"diffusers 0.36.0 is installed, but only releases from 0.37 to before"),
            ("1.0.0", r"diffusers 1.0.0 is installed"),
            ("0.41.2", r"pip install .diffusers>=0.37,!=0.40.\*,!=0.41.\*,<0.43"),
            (None, r"diffusers is not installed; run .pip install .lantern-accel\[diffusers\]"),
        ):
            monkeypatch.setattr(releases, "find_release", lambda _, found=release: found)
            with pytest.warns(UserWarning, match=says):
                pipe.generate("a cube", size=(32, 32), strategy="vanilla", seed=1)


def test_the_published_model_is_planned_before_anything_is_fetched() -> None:
    planner = planner_for("glm-image", memory=24 * 10**9)
    plan = planner.plan()
    numbers = 8_847_155_200 + 16384 * 4096
    assert plan.weights["target"] == pytest.approx(2 * numbers, rel=1e-3)
    assert plan.weights["vq"] == 4 * 16384 * 2048
    assert plan.fits
    # Keys and values once a group: 40,960 bytes a position, 64 of the prompt and 1,280 of the picture.
    assert 1344 * 40960 < plan.buffers < 2 * 1344 * 40960
    assert json.loads(json.dumps(plan.report()))["fits"] is True


def test_the_command_writes_tokens_where_nothing_paints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file

    from lantern_accel.cli import main

    folder = write_glm_image(tmp_path / "GLM-Image")
    given = ["generate", "a cube", "--model", str(folder), "--size", "32x32", "--device", "cpu"]
    assert main([*given, "--seed", "1", "-s", "vanilla", "-o", str(tmp_path / "a.png")]) == 0
    assert "a.safetensors" in capsys.readouterr().out.replace("\n", "")
    assert load_file(tmp_path / "a.safetensors")["tokens"].shape == (1, 257)
