"""The published networks through their libraries, with random weights; skipped where those are absent."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lantern_accel_profiles.evaluation.suite.image_files import features_of
from lantern_accel_profiles.evaluation.suite.networks import Inception, OpenClip, Unavailable
from lantern_accel_profiles.evaluation.suite.protocol import PROTOCOLS
from lantern_accel_profiles.quality.set_metrics import (
    FeatureSet,
    Reference,
    inception_score,
    precision_recall,
)

pytestmark = pytest.mark.long
CPU = torch.device("cpu")


def library(name: str):
    """Import a library, or skip: a torchvision of another torch raises RuntimeError."""
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{name}: {error}")


def pictures(folder: Path, count: int, seed: int) -> list[Path]:
    folder.mkdir()
    rng = np.random.default_rng(seed)
    paths = []
    for i in range(count):
        small = rng.integers(0, 255, (6, 6, 3), dtype=np.uint8)
        image = Image.fromarray(small).resize((96, 96), Image.Resampling.BICUBIC)
        paths.append(folder / f"{i:02d}.png")
        image.save(paths[-1])
    return paths


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Inception's weights, drawn at random."""
    net = library("torch_fidelity.feature_extractor_inceptionv3").FeatureExtractorInceptionV3
    torch.manual_seed(0)
    with monkeypatch.context() as patch:
        patch.setattr(net, "load_state_dict", lambda self, state: None)
        patch.setattr(torch, "load", lambda *a, **k: {})
        made = net("random", ["2048"], feature_extractor_weights_path="none")
    torch.save(made.state_dict(), tmp_path / "inception.pth")
    return tmp_path / "inception.pth"


def test_figures_are_torch_fidelity_s_own_on_the_same_pictures(weights, tmp_path) -> None:
    fidelity = library("torch_fidelity")
    fake, real = pictures(tmp_path / "fake", 24, 1), pictures(tmp_path / "real", 30, 2)
    theirs = fidelity.calculate_metrics(
        input1=str(tmp_path / "fake"), input2=str(tmp_path / "real"), cuda=False, fid=True,
        isc=True, prc=True, prc_neighborhood=3, isc_splits=2, samples_shuffle=False,
        feature_extractor="inception-v3-compat", feature_extractor_weights_path=str(weights),
        save_cpu_ram=True, verbose=False, cache=False,
    )  # fmt: skip
    net = Inception(weights, CPU)
    ours, truth = (
        features_of(paths, net, PROTOCOLS["sjd"].preprocessing) for paths in (fake, real)
    )
    fid = FeatureSet(ours.features, Reference.of_features(truth.features)).distance()
    assert fid == pytest.approx(theirs["frechet_inception_distance"], abs=1e-3)
    assert ours.logits is not None
    score = inception_score(ours.logits, splits=2).value
    assert score == pytest.approx(theirs["inception_score_mean"], rel=1e-4)
    precision, recall = precision_recall(ours.features, truth.features)
    found = [precision.value, recall.value]
    assert found == pytest.approx([theirs["precision"], theirs["recall"]], abs=1e-6)


def test_a_file_that_is_not_inception_s_is_refused(tmp_path) -> None:
    library("torch_fidelity")
    torch.save({"a": torch.zeros(2)}, tmp_path / "w.pth")
    with pytest.raises(Unavailable, match="are not Inception's"):
        Inception(tmp_path / "w.pth", CPU)


def test_a_clip_score_is_open_clip_s_own(tmp_path) -> None:
    open_clip = library("open_clip")
    config = {
        "embed_dim": 16, "quick_gelu": True,
        "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 1, "layers": 1},
    }  # fmt: skip
    (tmp_path / "tiny-clip.json").write_text(json.dumps(config))
    open_clip.add_model_config(tmp_path / "tiny-clip.json")
    torch.manual_seed(1)
    model, _, prepare = open_clip.create_model_and_transforms("tiny-clip", pretrained=None)
    path = tmp_path / "clip.pt"
    torch.save(model.state_dict(), path)
    scorer = OpenClip("tiny-clip", path, CPU, name="tiny", prefix="A photo depicts ", scale=100.0)
    paths = pictures(tmp_path / "fake", 3, 5)
    images = [Image.open(one).convert("RGB") for one in paths]
    prompts = ["a dog", "two cats", "a very " + "long " * 90 + "caption"]
    scores = scorer(images, prompts)
    text = open_clip.get_tokenizer("tiny-clip")([f"A photo depicts {one}" for one in prompts])
    with torch.no_grad():
        seen = model.eval().encode_image(torch.stack([prepare(one) for one in images]))
        read = model.encode_text(text)
        expected = 100 * torch.nn.functional.cosine_similarity(seen, read)
    assert scores == pytest.approx(expected.tolist(), abs=1e-4)
    whole = OpenClip("tiny-clip", path, CPU, name="tiny", whole=True)
    assert len(whole(images, prompts)) == 3
    torch.save({"a": torch.zeros(2)}, path)
    with pytest.raises(Unavailable, match="are not tiny-clip's"):
        OpenClip("tiny-clip", path, CPU, name="tiny")
