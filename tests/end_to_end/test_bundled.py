"""The bundled model: every strategy draws with it, and speculation earns tokens."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image

import lantern_accel
from lantern_accel.models.bundle import bundled_models, read_manifest
from lantern_accel.strategy.trees import EAGLE2_TREE
from lantern_accel_profiles.measure.run import choose_strategies

MODEL = "lantern-emoji"


@pytest.fixture(scope="module")
def pipeline():
    # float32: the same decisions on every processor.
    with lantern_accel.load(MODEL, device="cpu", dtype="float32") as pipe:
        yield pipe


def test_it_is_small_and_complete():
    folder = bundled_models()[MODEL]
    assert sum(f.stat().st_size for f in folder.iterdir()) < 60_000_000
    manifest = read_manifest(folder)
    assert manifest.target.num_tokens == 256
    assert manifest.drafter is not None
    assert (folder / "README.md").is_file()


@pytest.mark.long
def test_a_red_heart_is_red_and_in_the_middle(command, tmp_path):
    out, figures = tmp_path / "heart.png", tmp_path / "heart.json"
    done = command("generate", "red heart", "--seed", 7, "-o", out, "--stats", figures)
    assert done.returncode == 0, done.stderr
    stats = json.loads(figures.read_text())
    assert stats["model"] == MODEL
    assert stats["seconds"]["decode"] < 20
    with Image.open(out) as image:
        pixels = torch.tensor(list(image.convert("RGB").tobytes())).view(64, 64, 3)
    red = (pixels[..., 0] > 150) & (pixels[..., 1] < 110) & (pixels[..., 2] < 110)
    assert red.float().mean() > 0.2
    assert red[16:48, 16:48].float().mean() > red.float().mean()


@pytest.mark.long
def test_compression_rises_from_vanilla_to_eagle_to_relaxed_drafting(pipeline):
    compression, moved = {}, {}
    # A bound relative to a code's own probability admits next to nothing of peaked distributions.
    wide = {"lantern++": {"k": 100, "lam": 16.0}}
    prompts = ["dog face", "red heart", "pizza", "cat face"]
    for name in ("eagle", "eagle2", "lantern", "lantern++"):
        asked = {"seed": 1, "temperature": 1.0, "batch_size": 4, **wide.get(name, {})}
        stats = pipeline.generate(prompts, strategy=name, **asked).stats
        compression[name] = stats.step_compression
        moved[name] = stats.total_variation_per_token
    assert compression["eagle"] > 1.3
    # Four pictures: their mean moves by a sixth from seed to seed.
    assert compression["lantern++"] > 0.8 * compression["eagle"]
    assert moved["lantern++"] > moved["eagle"] == 0
    assert compression["lantern"] > compression["eagle2"] > 1


def test_default_trees_are_as_large_as_the_device_favours(pipeline, monkeypatch, tmp_path):
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path))  # nothing was tuned there
    own, most = pipeline.model.manifest.defaults, 5  # by the costs of vectors
    assert own.dynamic_tree.size[0] > most and own.static_tree.size[0] > most
    for name in ("eagle", "eagle2", "lantern", "lantern++"):
        for tree in (
            pipeline.strategy(name).drafts,
            pipeline.request("pizza", strategy=name).strategy.drafts,
        ):
            assert tree.size[0] == most, name
    # What was asked for stays, the model's own tree and a preset's among it.
    asked = own.dynamic_tree
    words = f"dynamic:{asked.top_k},{asked.depth},{asked.total}"
    assert pipeline.request("pizza", strategy="lantern", drafts=words).strategy.drafts == asked
    assert pipeline.strategy("lantern", drafts=asked).drafts == asked
    assert pipeline.request("pizza", preset="paper-lantern").strategy.drafts == EAGLE2_TREE
    assert choose_strategies(pipeline, ["lantern"], (1.0,), words)[1].drafts == asked
