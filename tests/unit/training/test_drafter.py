"""The drafter's objectives, and a drafter for any model that the pipeline loads."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from support.models import write_tiny_model

import lantern_accel
from lantern_accel.device.plugins import open_backend
from lantern_accel.errors import DataError, ModelError, RequestError
from lantern_accel.families.base import Parts
from lantern_accel.families.llamagen.model import DrafterConfig, LlamaGenConfig, LlamaGenGPT
from lantern_accel.families.registry import family
from lantern_accel.progress import Progress
from lantern_accel.training.anymodel import ModelFeatures, run_model_drafter
from lantern_accel.training.device import TrainDevice
from lantern_accel.training.drafter import (
    DrafterLoss,
    DrafterTask,
    DrafterTrainConfig,
    Features,
    head_matrix,
    train_drafter,
)
from lantern_accel.training.folder import with_parts


def config(**changes: object) -> DrafterTrainConfig:
    values = {"steps": 3, "batch_size": 2, "compile": False, "warmup": 1, "evaluate_every": 2,
              "evaluate_batches": 1, "checkpoint_every": 2, "lr": 3e-3}  # fmt: skip
    return DrafterTrainConfig.model_validate({**values, **changes})


class Codes:
    """A frozen target on random images."""

    family = family("llamagen")
    key = "codes"

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.gpt = LlamaGenGPT(
            LlamaGenConfig(
                dim=32, n_layer=1, n_head=2, ffn_dim=32, vocab_size=24, grid=4,
                conditioning="class", prefix_length=1, num_classes=3,
            )
        ).requires_grad_(False)  # fmt: skip
        with torch.no_grad():
            self.gpt.output.weight.mul_(3)

    def sample_batch(
        self, size: int, rng: random.Random, *, heldout: bool, coupled: bool = False
    ) -> Features:
        generator = torch.Generator().manual_seed(rng.getrandbits(40))
        codes = torch.randint(24, (size, 16), generator=generator)
        ids = torch.randint(3, (size,), generator=generator)
        if coupled:  # class 3 is the unconditional one
            codes, ids = torch.cat((codes, codes)), torch.cat((ids, torch.full_like(ids, 3)))
        return Features(codes, self.gpt.forward_dense(ids, codes[:, :-1]), None)


FURTHER = {"coupled": True, "predicted_share": 0.3}


@pytest.mark.parametrize("further", [{}, pytest.param(FURTHER, marks=pytest.mark.long)])
def test_training_lowers_the_loss(further: dict[str, object], tmp_path: Path) -> None:
    source, device = Codes(), TrainDevice(open_backend("cpu"), "float32")
    steps = {"steps": 40, "evaluate_every": 20, "checkpoint_every": 20}
    chosen = config(**steps, batch_size=4, lr=5e-3, **further)
    report = train_drafter(chosen, source, tmp_path, device)
    losses = [point["loss"] for point in report["curve"]]
    assert losses[-1] < losses[0]
    kept = DrafterConfig.model_validate_json((tmp_path / "drafter.json").read_text())
    assert (kept.dim, kept.prefix_length) == (32, 0)
    assert load_file(tmp_path / "drafter.safetensors")["fc.weight"].dtype == torch.bfloat16


def test_coupled_rows_are_joined_as_decoding_joins_them() -> None:
    """The loss of a drafter that says what the target says is the guided target's own entropy."""
    source = Codes()
    batch = source.sample_batch(3, random.Random(0), heldout=False, coupled=True)

    class Knows(torch.nn.Module):
        def fuse_states(self, features: torch.Tensor) -> torch.Tensor:
            return features

        def forward_image(
            self, condition: object, codes: object, fed: object, mask: object
        ) -> object:
            return batch.states[:, 1:]

    chosen = config(coupled=True, cfg_scale=2.5, token_weight=1.0)
    loss = DrafterLoss(Knows(), source.gpt, chosen)
    found, figures = loss(batch.codes, batch.states, torch.zeros_like(batch.states), None)
    logits = source.gpt.head(batch.states[:, 1:])
    guided = logits[3:] + 2.5 * (logits[:3] - logits[3:])
    entropy = torch.distributions.Categorical(logits=guided).entropy().mean()
    assert found.item() == pytest.approx(entropy.item(), rel=1e-4)
    assert figures[0] == 1.0


def test_predictions_are_fed_in_the_image_only_and_alike_in_both_branches() -> None:
    source, device = Codes(), TrainDevice(open_backend("cpu"), "float32")
    chosen = config(coupled=True, predicted_share=0.5)
    task = DrafterTask(chosen, source, device)
    batch = source.sample_batch(2, random.Random(0), heldout=False, coupled=True)
    own = task._own(batch, torch.Generator().manual_seed(0))
    assert own is not None and own.shape == (4, 15)
    assert torch.equal(own[:2], own[2:]) and not own[:, 0].any() and own.any()
    still = torch.zeros_like(batch.states)
    seen: list[torch.Tensor] = []
    plain = task.drafter.forward_image
    task.drafter.forward_image = lambda c, x, fed, m: seen.append(fed) or plain(c, x, fed, m)
    task.loss(batch.codes, batch.states, still, None, None, own)
    said = plain(None, batch.codes[:, :-1], batch.states[:, :-1], None)
    assert torch.equal(seen[1][~own], batch.states[:, :-1][~own])
    assert torch.allclose(seen[1][:, 1:][own[:, 1:]], said[:, :-1][own[:, 1:]])


@pytest.mark.parametrize("conditioning", [pytest.param("class", marks=pytest.mark.long), "text"])
def test_a_loaded_model_gets_a_drafter_of_its_own_images(conditioning: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", conditioning=conditioning, drafter=False)
    out = tmp_path / "drafter"
    with lantern_accel.load(folder, device="cpu", dtype="float32") as pipeline:
        device = TrainDevice(pipeline.backend, "float32")
        words: dict[str, object] = {"samples": 6, "prompts": ["red heart", "dog"]}
        report = run_model_drafter(pipeline, config(), out, device, **words)  # type: ignore[arg-type]
        assert report["steps"] == 3
        (kept,) = out.glob("images-*/000000.safetensors")
        assert load_file(kept)["codes"].shape == (6, 16)
        written = kept.stat().st_mtime_ns
        run_model_drafter(pipeline, config(), out, device, **words)  # type: ignore[arg-type]
        assert kept.stat().st_mtime_ns == written
    joined = with_parts(folder, Parts(drafter=out), tmp_path / "joined")
    prompt = 3 if conditioning == "class" else "red heart"
    with lantern_accel.load(joined, device="cpu", dtype="float32") as pipeline:
        exact = pipeline.generate(prompt, strategy="vanilla", seed=0, temperature=0.0)
        drafted = pipeline.generate(prompt, strategy="eagle", seed=0, temperature=0.0)
        assert torch.equal(exact.tokens, drafted.tokens)


@pytest.mark.long
def test_a_drafter_grows(tmp_path: Path) -> None:
    """What it had stays, what is new begins as next to nothing, and decoding stays exact."""
    grown: dict[str, Any] = {"n_layer": 2, "taps": [1]}
    folder = write_tiny_model(tmp_path / "model", drafter=False)
    words: dict[str, Any] = {"samples": 8, "prompts": ["red heart", "dog"]}
    with lantern_accel.load(folder, device="cpu", dtype="float32") as pipeline:
        device = TrainDevice(pipeline.backend, "float32")
        rarely = config(steps=20, evaluate_every=20, checkpoint_every=20)
        run_model_drafter(pipeline, rarely, tmp_path / "drafter", device, **words)
        (tmp_path / "drafter").rename(tmp_path / "first")
        more = config(**grown, start_from="first", lr=1e-9, weight_decay=0.0)
        report = run_model_drafter(pipeline, more, tmp_path / "drafter", device, **words)
        with pytest.raises(ModelError, match="reads block 3 of"):
            run_model_drafter(pipeline, config(taps=[3]), tmp_path / "x", device, **words)
        with pytest.raises(DataError, match="only n_layer may be less"):
            smaller = config(start_from="drafter")
            run_model_drafter(pipeline, smaller, tmp_path / "again", device, **words)
    first = json.loads((tmp_path / "first" / "report.json").read_text())
    assert report["parameters"] > first["parameters"]
    assert report["heldout_top3"] == pytest.approx(first["curve"][-1]["heldout_top3"], abs=0.1)
    joined = with_parts(folder, Parts(drafter=tmp_path / "drafter"), tmp_path / "joined")
    with lantern_accel.load(joined, device="cpu", dtype="float32") as pipeline:
        assert len(pipeline.model.drafter.layers) == grown.get("n_layer", 1)
        assert pipeline.model.drafter.taps == tuple(grown.get("taps", ()))
        exact = pipeline.generate("red heart", strategy="vanilla", seed=0, temperature=0.0)
        for strategy in ("eagle", "eagle2"):
            drafted = pipeline.generate("red heart", strategy=strategy, seed=0, temperature=0.0)
            assert torch.equal(exact.tokens, drafted.tokens)


@pytest.mark.parametrize("coupled", [False, True])
def test_states_that_are_kept_are_those_that_are_made(coupled: bool, tmp_path: Path) -> None:
    """Whatever fits in memory: nothing, a few rows, or all; then the target runs once a row."""
    folder = write_tiny_model(tmp_path / "model", drafter=False)
    codes = torch.randint(24, (6, 16), generator=torch.Generator().manual_seed(0))
    with lantern_accel.load(folder, device="cpu", dtype="float32") as pipeline:
        target = pipeline.model.target
        ran: list[int] = []
        plain = target.forward_dense
        target.forward_dense = lambda c, *rest: ran.append(len(c)) or plain(c, *rest)
        prompts, wanted = ["red heart", "dog", "red"] * 2, []
        row = 4 * target.config.dim * (target.config.prefix_length + 15)
        for kept in (0, 3 * row, 1 << 20):
            source = ModelFeatures(pipeline, prompts, codes, text_dropout=0.3, kept_bytes=kept)
            rng = random.Random(0)
            drawn = [source.sample_batch(4, rng, heldout=False, coupled=coupled) for _ in range(12)]
            wanted = wanted or [batch.states for batch in drawn]
            for batch, states in zip(drawn, wanted, strict=True):
                torch.testing.assert_close(batch.states, states, rtol=1e-5, atol=1e-5)
            assert len(source._kept) == min(kept // row, 10)
            ran.clear()
            source.sample_batch(4, rng, heldout=False, coupled=coupled)
            assert bool(ran) == (kept < 1 << 20)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_head_is_read_in_whatever_order_the_backend_keeps_it(
    dtype: str, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path / "model", drafter=False)
    written = load_file(folder / "target.safetensors")["output.weight"]
    with lantern_accel.load(folder, device="cpu", dtype=dtype) as pipeline:
        found = head_matrix(pipeline.model.target)
    given = written.to(getattr(torch, dtype)).float()
    if dtype == "float32":
        assert torch.equal(found, given)
    # Kernels may keep bfloat16 as whole numbers, small ones to 2^-14 of their row's largest.
    assert bool(((found - given).abs() <= 2**-14 * given.abs().amax(1, keepdim=True)).all())


def test_captioned_images_are_learnt_from_and_damaged_ones_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", drafter=False)
    images = tmp_path / "images"
    images.mkdir()
    rng = np.random.default_rng(0)
    lines = []
    for i in range(5):
        Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(images / f"{i}.png")
        lines.append(json.dumps({"file": f"{i}.png", "prompt": "red heart"}))
    (images / "4.png").write_bytes(b"no picture")
    (images / "captions.jsonl").write_text("\n".join(lines))

    said = io.StringIO()
    with lantern_accel.load(folder, device="cpu", dtype="float32") as pipeline:
        device = TrainDevice(pipeline.backend, "float32")
        say = Progress(0.0, said)
        run_model_drafter(pipeline, config(), tmp_path / "out", device, say, images=images)
        assert "skipped 1 images: 4.png (Unidentified" in said.getvalue()
        with pytest.raises(DataError, match="--images"):
            run_model_drafter(pipeline, config(), tmp_path / "out", device)
        (images / "captions.jsonl").write_text(
            "\n".join([*lines[:3], '{"file": "3.png", "prompt": "\u2603"}'])
        )
        with pytest.raises(RequestError, match="no word that this model knows"):
            run_model_drafter(pipeline, config(), tmp_path / "out", device, images=images)
        with pytest.raises(DataError, match="too few"):
            ModelFeatures(pipeline, ["a"], torch.zeros(1, 16), text_dropout=0.0)
