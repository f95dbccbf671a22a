"""A seed for each image, and prompts that guidance leads away from."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from support.chameleon import write_anole, write_lumina
from support.janus import write_janus

import lantern_accel
from lantern_accel.errors import RequestError


@pytest.mark.parametrize("strategy", ["vanilla", "lantern++"])
def test_an_image_with_a_seed_of_its_own_is_the_one_that_this_seed_draws(pipeline, strategy):
    asked = {"strategy": strategy, "batch_size": 2}
    alone = {seed: pipeline.generate("red heart", seed=seed, **asked).tokens for seed in (3, 8, 11)}
    result = pipeline.generate("red heart", num_images=3, seed=[8, 3, 11], **asked)
    assert torch.equal(result.tokens, torch.cat([alone[8], alone[3], alone[11]]))
    assert result.stats.seeds == [8, 3, 11]
    assert [one.info["seed"] for one in result.images] == ["8", "3", "11"]
    assert {one.info["image"] for one in result.images} == {"0"}
    stream = pipeline.stream("red heart", num_images=3, seed=[8, 3, 11], **asked)
    list(stream)
    assert torch.equal(stream.result.tokens, result.tokens)
    part = pipeline.generate("red heart", num_images=3, seed=[8, 3, 11], only=[1], **asked)
    assert torch.equal(part.tokens, alone[3])


def test_guidance_leads_away_from_a_negative_prompt(pipeline, command, tiny_model, tmp_path):
    asked = {"seed": 3, "strategy": "vanilla", "cfg_scale": 7.5}
    plain = pipeline.generate("red heart", **asked).tokens
    against = pipeline.generate("red heart", negative_prompt="dog face", **asked)
    assert not torch.equal(against.tokens, plain)
    assert against.images[0].info["negative_prompt"] == "dog face"
    # Away from the prompt itself, guidance does nothing.
    itself = pipeline.generate("red heart", negative_prompt="red heart", **asked).tokens
    unguided = pipeline.generate("red heart", **asked | {"cfg_scale": 1.0}).tokens
    assert torch.equal(itself, unguided)
    stream = pipeline.stream("red heart", negative_prompt="dog face", **asked)
    list(stream)
    assert torch.equal(stream.result.tokens, against.tokens)
    words = ["-m", tiny_model, "-d", "cpu", "-s", "vanilla", "--seed", 3, "--cfg-scale", 7.5]
    words += ["--dtype", "float32", "-q", "--negative-prompt", "dog face"]
    assert command("generate", "red heart", *words, "-o", tmp_path / "a.png").returncode == 0
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.tobytes() == against.images[0].tobytes()


def test_a_negative_prompt_that_cannot_be_taken_is_refused(pipeline, class_model):
    with pytest.raises(RequestError, match="above 1"):
        pipeline.generate("red heart", negative_prompt="dog face", cfg_scale=1.0)
    with (
        lantern_accel.load(class_model, device="cpu") as classes,
        pytest.raises(RequestError, match="is class-conditional"),
    ):
        classes.generate(3, negative_prompt="dog face", cfg_scale=2.0)


def anole(folder):
    return write_anole(folder, layout="hf")


def lumina(folder):
    return write_lumina(folder / "Lumina-mGPT-7B-512")


@pytest.mark.parametrize(
    "write", [anole, write_janus, pytest.param(lumina, marks=pytest.mark.long)]
)
def test_families_with_text_take_a_negative_prompt(write, tmp_path):
    with lantern_accel.load(write(tmp_path / "model"), device="cpu", dtype="float32") as opened:
        words = opened.model.family.examples(opened.model.manifest)[:2]
        asked = {"seed": 3, "strategy": "vanilla", "cfg_scale": 6.0}
        sampling = opened.sampling(cfg_scale=6.0)
        conditions = opened.conditions([words[0]])
        usual = opened.runtime.rows(conditions, sampling)
        itself = opened.runtime.rows(conditions, sampling, words[0])
        assert torch.equal(itself.condition[0], itself.condition[1])
        assert not torch.equal(usual.condition[1], itself.condition[1])
        unguided = opened.generate(words[0], **asked | {"cfg_scale": 1.0}).tokens
        away = opened.generate(words[0], negative_prompt=words[0], **asked).tokens
        assert torch.equal(away, unguided)
