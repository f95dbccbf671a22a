"""The parts of an evaluation against what they must give on data with a known answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.chameleon import write_anole, write_lumina
from support.models import write_tiny_model

import lantern_accel
from lantern_accel.training.imageset import to_pixels
from lantern_accel_profiles.evaluation.parts import interchange, psnr
from lantern_accel_profiles.quality.features import is_there, load_network
from lantern_accel_profiles.quality.scoring import _logits, likelihood


@pytest.mark.parametrize("kind", ["text", "class", "anole"])
def test_scoring_predicts_what_greedy_decoding_drew(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if kind == "anole":
        write_anole(folder, layout="hf")
    else:
        write_tiny_model(folder, conditioning=kind)
    prompts: list[str | int] = (
        [1, 2] if kind == "class" else ["red heart", "dog face" * (1 if kind == "text" else 8)]
    )
    with lantern_accel.load(folder, device="cpu", dtype="float32") as pipe:
        plain: dict[str, Any] = {"strategy": "vanilla", "temperature": 0.0, "cfg_scale": 1.0}
        guided = {**plain, "cfg_scale": 3.0}
        for scale, words in ((1.0, plain), (3.0, guided)):
            codes = pipe.generate(prompts, **words).tokens
            with torch.inference_mode():
                ((cond, uncond, tokens),) = _logits(pipe, prompts, codes)
            assert torch.equal(tokens, codes)
            assert torch.equal((uncond + scale * (cond - uncond)).argmax(-1), codes)


def test_forced_ends_of_rows_are_not_scored(tmp_path: Path) -> None:
    with lantern_accel.load(
        write_lumina(tmp_path / "Lumina-mGPT-7B-512"), device="cpu", dtype="float32"
    ) as pipe:
        width, height = pipe.model.family.image_size(pipe.model.manifest)
        down = pipe.model.vq.config.downsample
        codes = torch.zeros(1, width * height // down**2, dtype=torch.int64)
        with torch.inference_mode():
            ((cond, uncond, tokens),) = _logits(pipe, ["a red fox"], codes)
        assert tokens.shape == codes.shape
        assert cond.isfinite().all() and uncond.isfinite().all()
        found = likelihood(pipe, ["a red fox"], codes, "zeros")
        wanted = torch.nn.functional.cross_entropy(cond[0], codes[0]).item()
        assert found.nll == pytest.approx(wanted, rel=1e-5)
        row = interchange(pipe, torch.zeros(1, height, width, 3).byte(), codes, [3], 0, None)[-1]
        assert row.replaced_by == "any code"


def test_psnr_in_decibels() -> None:
    black = torch.zeros(2, 4, 4, 3, dtype=torch.uint8)
    assert psnr(black, black + 255).tolist() == pytest.approx([0.0, 0.0], abs=1e-9)
    assert psnr(black, black + 1).tolist() == pytest.approx([48.13, 48.13], abs=0.01)


def test_feature_distances_tell_like_from_unlike() -> None:
    if not is_there():
        pytest.skip("the extra eval is not installed")
    net = load_network()
    disc = torch.full((1, 64, 64, 3), 255, dtype=torch.uint8)
    disc[:, 16:48, 16:48] = torch.tensor([200, 20, 20], dtype=torch.uint8)
    near, far = disc.clone(), disc.clone()
    near[:, 16:48, 16:48, 0] = 190
    far[:, 16:48] = torch.tensor([20, 20, 200], dtype=torch.uint8)
    a, b, c = (to_pixels(x) for x in (disc, near, far))
    assert float(net.distance(a, a)) == pytest.approx(0.0, abs=1e-5)
    assert float(net.distance(a, b)) < float(net.distance(a, c)) / 3
    assert net.vectors(disc).shape == (1, 1280)
