"""Drafters for Anole and Lumina: prompts of many lengths, rows that end in newlines, own images."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from support.chameleon import write_anole, write_lumina
from torch.nn import functional as F

import lantern_accel
from lantern_accel.checkpoints.layouts import OWN_CONFIG, OWN_WEIGHTS
from lantern_accel.errors import ModelError, RequestError
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.training.anymodel import ModelFeatures, run_model_drafter
from lantern_accel.training.device import TrainDevice
from lantern_accel.training.drafter import DrafterTask, DrafterTrainConfig, free_choices
from lantern_accel.training.folder import write_weights
from lantern_accel.training.imageset import read_images
from lantern_accel.training.recording import Encoded

SIZE = (16, 8)
#: Of two buckets' lengths.
PROMPTS = ["a red fox", "fox", "the moon " * 40]


def config(**changes: object) -> DrafterTrainConfig:
    values = {"steps": 4, "batch_size": 4, "compile": False, "warmup": 1, "evaluate_every": 2,
              "evaluate_batches": 1, "checkpoint_every": 2, "lr": 5e-3}  # fmt: skip
    return DrafterTrainConfig.model_validate({**values, **changes})


@pytest.fixture(scope="module")
def anole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_anole(tmp_path_factory.mktemp("models") / "Anole-7b-hf", layout="hf")


@pytest.fixture(scope="module")
def lumina(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lumina(tmp_path_factory.mktemp("models") / "Lumina-mGPT-7B-512")


def opened(model: Path, drafter: Path | str = "none") -> Pipeline:
    return lantern_accel.load(model, device="cpu", dtype="float32", drafter=drafter)


def greedy(model: Path, drafter: Path, size: tuple[int, int] | None = None) -> float:
    """Check that drafting leaves greedy tokens as they are; return the mean accepted length."""
    with opened(model, drafter) as pipe:
        words = {"temperature": 0, "size": size}
        exact = pipe.generate("a red fox", strategy="vanilla", **words)
        drafted = pipe.generate("a red fox", strategy="eagle", **words)
        assert torch.equal(exact.tokens, drafted.tokens)
        return drafted.stats.step_compression


def untrained(model: Path, folder: Path) -> Path:
    torch.manual_seed(0)
    with opened(model) as pipe:
        kind = pipe.model.family
        made = kind.fresh_drafter(pipe.model.target)
    folder.mkdir()
    write_weights(made.state_dict(), folder / OWN_WEIGHTS)
    (folder / OWN_CONFIG).write_text(made.config.model_dump_json())
    return folder


@pytest.mark.long
def test_lumina_gets_a_drafter_from_its_own_pictures(lumina: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with opened(lumina) as pipe:
        device = TrainDevice(pipe.backend, "float32")
        settings = config(steps=80, evaluate_every=40, checkpoint_every=40)
        words: dict[str, Any] = {"prompts": PROMPTS[:2], "samples": 8, "size": SIZE}
        report = run_model_drafter(pipe, settings, out, device, **words)
        with pytest.raises(RequestError, match="cannot make 17x8"):
            run_model_drafter(pipe, settings, out, device, **{**words, "size": (17, 8)})
        long = {"prompts": ["fox", "fox " * 5000], "samples": 2, "size": SIZE}
        with pytest.raises(RequestError, match="shorten the prompt"):
            run_model_drafter(pipe, settings, tmp_path / "long", device, **long)  # type: ignore[arg-type]
        assert not (tmp_path / "long").exists()
        with pytest.raises(ModelError, match="cannot have these blocks or taps: n_layer"):
            run_model_drafter(pipe, config(n_layer=2), out, device, **words, resume=False)
    (kept,) = out.glob("images-*/000000.safetensors")
    codes = load_file(kept)["codes"].view(8, 4, 9)
    assert (codes[:, :, -1] == 16).all()  # the newline's code
    assert report["curve"][-1]["loss"] < report["curve"][0]["loss"]
    assert greedy(lumina, out, SIZE) > greedy(lumina, untrained(lumina, tmp_path / "new"), SIZE)


def test_captioned_images_take_the_shape_of_the_pictures(lumina: Path, tmp_path: Path) -> None:
    tall = np.zeros((12, 8, 3), np.uint8)
    tall[4:8] = np.random.default_rng(0).integers(0, 255, (4, 8, 3))
    lines = []
    for i in range(2):
        Image.fromarray(tall).save(tmp_path / f"{i}.png")
        lines.append(json.dumps({"file": f"{i}.png", "prompt": "fox"}))
    (tmp_path / "captions.jsonl").write_text("\n".join(lines))
    found = read_images(tmp_path, 8, 4)
    assert (found.pixels == tall[4:8]).all()
    with opened(lumina) as pipe:
        device = TrainDevice(pipe.backend, "float32")
        words = {"images": tmp_path, "size": (8, 4)}
        report = run_model_drafter(pipe, config(steps=1), tmp_path / "out", device, **words)  # type: ignore[arg-type]
    assert report["images_seen"] == 4


def test_prompts_of_any_length_and_none_share_a_batch(anole: Path) -> None:
    """A row's states are those of its prompt alone, without padding."""
    with opened(anole) as pipe:
        target = pipe.model.target
        codes = torch.randint(16, (3, 16), generator=torch.Generator().manual_seed(0))
        lengths: dict[float, set[int]] = {}
        for dropout in (0.0, 0.999):
            source = ModelFeatures(pipe, PROMPTS, codes, text_dropout=dropout)
            batch = source.sample_batch(12, random.Random(1), heldout=False)
            assert batch.mask is not None
            assert batch.condition is not None
            for row, mask in enumerate(batch.mask):
                ids = batch.condition[row, mask][None]
                assert 1 not in ids  # the pad
                lengths.setdefault(dropout, set()).add(ids.shape[1])
                alone = target.forward_dense(ids, batch.codes[row : row + 1, :-1])[0]
                torch.testing.assert_close(
                    batch.states[row, -len(alone) :], alone, rtol=1e-4, atol=1e-4
                )
        assert lengths[0.0] <= {4, 6, 83}
        assert len(lengths[0.0]) == 2  # one of the three is held out
        assert lengths[0.999] == {2}


def test_the_loss_is_of_image_tokens_alone(lumina: Path) -> None:
    """Against each row on its own, without padding: prompts and forced newlines count for nothing."""
    with opened(lumina) as pipe:
        device = TrainDevice(pipe.backend, "float32")
        prompts = ["a red fox", "fox", "a a a"]
        codes = torch.randint(16, (3, 4, 8), generator=torch.Generator().manual_seed(0))
        tokens = pipe.model.family.tokens(pipe.model, codes)
        encoded = Encoded(pipe, prompts, SIZE)
        source = ModelFeatures(pipe, prompts, tokens, text_dropout=0.4, encoded=encoded)
        positions, free = free_choices(source.gpt)
        assert positions is not None
        assert free is not None
        assert positions.tolist() == [i for i in range(35) if (i + 1) % 9 != 8]
        assert free.tolist() == list(range(16))
        task = DrafterTask(config(feature_weight=0.0, token_weight=1.0), source, device)
        drafter = task.drafter
        torch.manual_seed(1)
        for weight in drafter.layers.parameters():
            torch.nn.init.normal_(weight)  # so that every prompt token counts
        batch = source.sample_batch(6, random.Random(0), heldout=False)
        still = torch.zeros_like(batch.states)
        assert batch.mask is not None
        assert batch.condition is not None
        loss, figures = task.loss(
            batch.codes, batch.states, still, task._mask(batch), batch.condition
        )
        entropies, hits = [], []
        for row, mask in enumerate(batch.mask):
            prompt = batch.condition[row, mask]
            line = torch.cat((prompt, drafter.embed_tokens.code_ids[batch.codes[row]]))[None]
            states = batch.states[row, -(line.shape[1] - 1) :][None]
            fed = line[:, 1:-1]
            out = drafter.forward_dense(fed, states[:, :-1], torch.ones_like(fed, dtype=torch.bool))
            guess, truth = (pipe.model.target.head(x)[0, -35:, :16] for x in (out, states))
            for i in range(35):
                if (i + 1) % 9 != 8:
                    entropies.append(F.cross_entropy(guess[i], truth[i].softmax(-1)))
                    hits.append(guess[i].argmax() == truth[i].argmax())
        torch.testing.assert_close(loss, torch.stack(entropies).mean(), rtol=1e-4, atol=1e-5)
        assert float(figures[0]) == pytest.approx(sum(map(int, hits)) / len(hits))
