"""Strategies without a drafter, on tiny random checkpoints in the official layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models import write_tiny_model
from support.official import class_folder

import lantern_accel
from lantern_accel.errors import StrategyError
from lantern_accel.generation.row_costs import RowCosts


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class-conditional LlamaGen, without a drafter, 12 x 12 tokens."""
    folder = tmp_path_factory.mktemp("c2i") / "pretrained_models"
    return class_folder(folder, block_size=144)


def test_classes_without_a_drafter(classes, tmp_path, command):
    with lantern_accel.load(classes, device="cpu", dtype="float32") as pipe:
        plain = pipe.generate(3, strategy="vanilla", temperature=0)
        done = pipe.generate(3, strategy="scd", temperature=0)
        assert torch.equal(done.tokens, plain.tokens)
        assert done.stats.steps < plain.stats.steps
        with pytest.raises(StrategyError, match=r"no drafter.*need none: 'vanilla', 'sjd', 'scd'"):
            pipe.generate(3, strategy="lantern++")
    done = command(
        "generate", "3", "--model", classes, "--strategy", "scd:drafts=window:600",
        "-o", tmp_path / "c.png",
    )  # fmt: skip
    assert done.returncode == 2
    assert "length must be 256 or less, not 600" in done.stderr


@pytest.mark.parametrize("name", ["sjd", "scd"])
def test_windows_that_nobody_chose_fit_a_small_image(tmp_path, name):
    model = write_tiny_model(tmp_path / "tiny", drafter=False, grid=3)
    with lantern_accel.load(model, device="cpu", dtype="float32") as pipe:
        pipe.measurements.costs = RowCosts.free(64)  # rows cost nothing: the longest window is best
        done = pipe.generate("red heart", strategy=name, seed=1)
        assert done.stats.strategy.drafts.length == 9
        assert torch.equal(
            done.tokens, pipe.generate("red heart", strategy="vanilla", seed=1).tokens
        )
        with pytest.raises(StrategyError, match="9 tokens"):
            pipe.generate("red heart", strategy=name, window=16)


def test_windows_that_nobody_chose_are_shorter_in_batches(classes):
    def length(**settings):
        return pipe.request(3, **settings).strategy.drafts.length

    with lantern_accel.load(classes, device="cpu", dtype="float32") as pipe:
        four = {"num_images": 4, "batch_size": 4}
        assert length(strategy="scd") == 8 == length(strategy="scd", num_images=4, batch_size=1)
        assert length(strategy="scd", **four) == 4
        assert length(strategy="scd", num_images=2, batch_size=2) == 4
        for chosen in ({"window": 16}, {"drafts": "window:16"}):
            assert length(strategy="scd", **four, **chosen) == 16
        assert length(strategy=pipe.strategy("scd"), **four) == 16
        batch = 4, pipe.sampling()
        assert pipe.strategy("scd", tuned_for=batch).drafts.length == 4
        assert pipe.strategy("scd", tuned_for=batch, window=16).drafts.length == 16
        assert pipe.strategy(pipe.strategy("scd"), tuned_for=batch).drafts.length == 16
        four = pipe.generate([1, 2, 3, 4], strategy="scd", temperature=0, batch_size=4)
        assert torch.equal(
            four.tokens, pipe.generate([1, 2, 3, 4], strategy="vanilla", temperature=0).tokens
        )
