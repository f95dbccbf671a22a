"""Drafters for Janus, GLM-Image and Emu3: trained by the command, named, found, refused."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.emu3 import write_emu3
from support.glm_image import write_glm_image
from support.janus import weights_of, write_janus

import lantern_accel
from lantern_accel.checkpoints.layouts import OWN_WEIGHTS
from lantern_accel.cli import main
from lantern_accel.errors import CheckpointError, DataError, ModelError
from lantern_accel.families.base import Parts
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.models.locate import find_model, named_parts, trained_parts
from lantern_accel.progress import Progress
from lantern_accel.training.anymodel import ModelFeatures, run_model_drafter
from lantern_accel.training.device import TrainDevice
from lantern_accel.training.drafter import DrafterTrainConfig, FrozenHead
from lantern_accel.training.folder import check_named, with_named
from lantern_accel.training.recording import Encoded, own_images

PROMPTS = ["a red cube", "two cats", "a cube on a sphere", "blue"]
#: What writes a model; the size to train on, which is a token under GLM-Image's small grid, or 4 x 3 with
#: the ends of rows; another of several rows.
KINDS: dict[str, tuple[Callable[..., Path], tuple[int, int] | None, tuple[int, int] | None]] = {
    "janus": (write_janus, None, None),
    "glm_image": (write_glm_image, (32, 32), (96, 64)),
    "emu3": (write_emu3, (8, 6), (12, 8)),
}
CONFIG: dict[str, Any] = {
    "batch_size": 2, "compile": False, "warmup": 1, "evaluate_every": 4, "evaluate_batches": 1,
    "checkpoint_every": 4, "lr": 5e-3, "precision": "float32",
}  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore:.*there are no images")


@pytest.fixture(
    scope="module",
    params=["janus", *(pytest.param(one, marks=pytest.mark.long) for one in ("glm_image", "emu3"))],
)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return KINDS[kind][0](tmp_path_factory.mktemp("models") / kind)


@pytest.fixture(scope="module")
def trained(kind: str, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter of two blocks that reads a lower one of the target's, by the command."""
    work = tmp_path_factory.mktemp("work")
    (work / "prompts.txt").write_text("\n".join(PROMPTS))
    (work / "config.json").write_text(json.dumps({**CONFIG, "n_layer": 2, "taps": [1]}))
    words = ["train", "drafter", "--model", folder, "--prompts", work / "prompts.txt"]
    words += ["--samples", 6, "--steps", 8, "--work", work, "--config", work / "config.json"]
    size = KINDS[kind][1]
    words += ["--device", "cpu", *(["--size", "{}x{}".format(*size)] if size else [])]
    assert main([str(word) for word in words]) == 0
    return work / "drafter"


def opened(model: Path, drafter: Path | str) -> Pipeline:
    return lantern_accel.load(model, device="cpu", dtype="float32", drafter=drafter)


def test_what_is_written_is_what_was_trained(kind: str, folder: Path, trained: Path) -> None:
    said = json.loads((trained / "drafter.json").read_text())
    assert (said["n_layer"], said["taps"], len(said["mark"])) == (2, [1], 8)
    weights = load_file(trained / OWN_WEIGHTS)
    assert {name.split(".")[0] for name in weights} == {"fc", "fuse", "tap_norms", "layers"}
    report = json.loads((trained / "report.json").read_text())
    assert report["steps"] == 8
    assert report["parameters"] == sum(value.numel() for value in weights.values())


def test_pictures_to_learn_from_are_those_of_a_request(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    """The last batch is filled up, and pixels are left out."""
    size = KINDS[kind][1]
    with opened(folder, "none") as pipe:
        codes = own_images(pipe, PROMPTS[:3], 7, Progress(), tmp_path, 2, size)
        for first in (0, 2):
            here = PROMPTS[first : min(first + 2, 3)]
            want = pipe.generate(here, strategy="vanilla", seed=7 + first, size=size).tokens
            assert torch.equal(codes[first : first + 2], want)


def test_drafts_draw_vanillas_tokens(kind: str, folder: Path, trained: Path) -> None:
    """With the model's own sampling, alone and in a batch; greedy ones are checked with tiny models."""
    given: dict[str, Any] = {"seed": 3, "size": KINDS[kind][1]}
    with opened(folder, trained) as pipe:
        want = pipe.generate(PROMPTS[:3], strategy="vanilla", **given).tokens
        for strategy, tree, count in (("eagle", "chain:2", 3), ("eagle2", "dynamic:3,1,5", 1)):
            asked = PROMPTS[:count]
            made = pipe.generate(asked, strategy=strategy, drafts=tree, **given)
            assert torch.equal(made.tokens, want[:count]), (strategy, tree)
        if kind == "janus":  # whose pictures have a tenth of the tokens
            made = pipe.generate(PROMPTS[0], strategy="eagle", drafts="small_8", **given)
            assert torch.equal(made.tokens, want[:1])
            relaxed = pipe.generate(PROMPTS[0], strategy="lantern++", k=5, **given)
            assert relaxed.tokens.shape == want[:1].shape


@pytest.mark.long
def test_training_brings_the_loss_down(kind: str, folder: Path, tmp_path: Path) -> None:
    """As EAGLE's recipe says, with both terms; the head's layers pass gradients."""
    settings = DrafterTrainConfig.model_validate(
        {**CONFIG, "steps": 40, "evaluate_every": 20, "checkpoint_every": 20,
         "predicted_share": 0.2, "coupled": kind != "glm_image"}
    )  # fmt: skip
    size = KINDS[kind][1]
    with opened(folder, "none") as pipe:
        report = run_model_drafter(
            pipe, settings, tmp_path / "out", TrainDevice(pipe.backend, "float32"),
            prompts=PROMPTS, samples=4, size=size,
        )  # fmt: skip
    losses = [point["loss"] for point in report["curve"]]
    assert losses[-1] < 0.95 * losses[0]


def test_the_heads_law_is_the_targets(kind: str, folder: Path) -> None:
    with opened(folder, "none") as pipe:
        target = pipe.model.target
        head = FrozenHead(target, None)
        x = torch.randn(3, 5, target.config.dim, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            torch.testing.assert_close(head(x), target.head(x), rtol=1e-4, atol=1e-4)
        some = torch.tensor([1, 7])
        torch.testing.assert_close(FrozenHead(target, some)(x), head(x)[..., some])
        x.requires_grad_()
        head(x).square().sum().backward()
        assert x.grad is not None and bool(x.grad.abs().sum() > 0)


def test_states_are_those_of_the_size_that_is_trained_on(kind: str, folder: Path) -> None:
    """Rows of a batch against each prompt alone, without padding, at the positions of their picture."""
    size = KINDS[kind][2]
    with opened(folder, "none") as pipe:
        model = pipe.model
        encoded = Encoded(pipe, PROMPTS, size)
        fitted = model.family.target_for_shape(model, encoded.shape)[0]
        tokens = fitted.config.num_tokens
        codes = torch.randint(16, (4, tokens), generator=torch.Generator().manual_seed(0))
        source = ModelFeatures(pipe, PROMPTS, codes, text_dropout=0.4, encoded=encoded, taps=(1,))
        batch = source.sample_batch(4, random.Random(1), heldout=False)
        assert batch.condition is not None and batch.mask is not None
        want = fitted.forward_dense(batch.condition, batch.codes[:, :-1], batch.mask, (1,))
        torch.testing.assert_close(batch.states, want, rtol=1e-4, atol=1e-4)
        drafter = model.family.fresh_drafter(source.gpt, 1, (1,))
        fed = drafter.fuse_states(batch.states[:, :-1])
        out = drafter.forward_image(batch.condition, batch.codes[:, :-1], fed, batch.mask[:, :-1])
        # What pads hold reaches nobody.
        other = torch.where(batch.mask, batch.condition, 0)
        same = drafter.forward_image(other, batch.codes[:, :-1], fed, batch.mask[:, :-1])
        first = batch.mask.shape[1] - 1
        torch.testing.assert_close(out[:, first:], same[:, first:])


def test_it_is_found_beside_its_model(
    kind: str, folder: Path, trained: Path, tmp_path: Path
) -> None:
    release = shutil.copytree(folder, tmp_path / folder.name)
    shutil.copytree(trained, release / "drafter")
    found = find_model(release)
    assert found.files["drafter"] == release / "drafter" / OWN_WEIGHTS
    assert found.manifest.drafter.n_layer == 2 and "drafter" not in found.missing
    without = find_model(release, named_parts(drafter="none"))
    assert without.manifest.drafter is None and "drafter" not in without.files
    named = find_model(folder, named_parts(drafter=trained / OWN_WEIGHTS))
    assert named.files["drafter"] == trained / OWN_WEIGHTS


def test_a_drafter_of_another_model_is_refused(
    kind: str, folder: Path, trained: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(trained, tmp_path / "other")
    said = json.loads((other / "drafter.json").read_text())

    def write(**changes: object) -> None:
        (other / "drafter.json").write_text(json.dumps({**said, **changes}))

    for changes, message in (
        ({"dim": 96}, "is of another model: its dim is 96 and the model's"),
        ({"token_count": 5000}, "its token_count is 5000"),
        ({"taps": [1, 99]}, "it reads block 99"),
        ({"taps": [2, 1]}, "each once, ascending"),
        ({"grid": 24}, "grid is not a known field"),
    ):
        write(**changes)
        with pytest.raises(CheckpointError, match=message):
            find_model(folder, named_parts(drafter=other))
    # Of the same sizes: only its target's numbers tell.
    write(mark=[x + 0.5 for x in said["mark"]])
    with pytest.raises(CheckpointError, match="was trained on another model of the same sizes"):
        opened(folder, other)
    write(mark=[x * (1 + 2**-9) for x in said["mark"]])
    opened(folder, other).close()
    write(n_layer=1)
    with pytest.raises(CheckpointError, match="unknown, the first is 'layers"):
        opened(folder, other)
    (other / "drafter.json").unlink()
    with pytest.raises(CheckpointError, match=r"it lacks drafter\.safetensors or drafter\.json"):
        find_model(folder, named_parts(drafter=other))


def test_what_cannot_be_trained_is_refused(kind: str, folder: Path, tmp_path: Path) -> None:
    with opened(folder, "none") as pipe:
        device = TrainDevice(pipe.backend, "float32")

        def run(images: Path | None = None, **changes: Any) -> None:
            settings = DrafterTrainConfig.model_validate({**CONFIG, "steps": 1, **changes})
            run_model_drafter(
                pipe, settings, tmp_path / "out", device, prompts=PROMPTS, samples=2, images=images
            )

        with pytest.raises(CheckpointError, match="no checkpoint file"):
            run(start_from="drafter")
        if kind == "glm_image":
            with pytest.raises(DataError, match="decodes without guidance; leave coupled out"):
                run(coupled=True)
            with pytest.raises(DataError, match="name a file of --prompts"):
                run(images=tmp_path)
        with pytest.raises(ModelError, match="it reads block 99 of the model's"):
            pipe.model.family.fresh_drafter(pipe.model.target, 1, (99,))
    assert not (tmp_path / "out").exists()


def training_words(work: Path) -> list[object]:
    """Return a command that trains a drafter for two steps, without its model."""
    (work / "prompts.txt").write_text("\n".join(PROMPTS))
    (work / "config.json").write_text(json.dumps(CONFIG))
    words: list[object] = ["train", "drafter", "--prompts", work / "prompts.txt", "--samples", 4]
    words += ["--steps", 2, "--config", work / "config.json", "--device", "cpu", "--work", work]
    return words


def test_a_model_folder_carries_its_drafter(tmp_path: Path) -> None:
    """A folder with a model.json, whose tensors have deepseek-ai's names; --into copies it."""
    from safetensors.torch import save_file
    from support.janus import write_tokenizer

    released = write_janus(tmp_path / "Janus-Pro-1B")
    manifest = find_model(released).manifest
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.json").write_text(manifest.model_dump_json())
    save_file(
        {k: v.contiguous() for k, v in weights_of("original").items()}, model / "target.safetensors"
    )
    shutil.copy(model / "target.safetensors", model / "vq.safetensors")
    write_tokenizer(model)
    words = [*training_words(tmp_path), "--model", model, "--into", tmp_path / "new"]
    assert main([str(word) for word in words]) == 0
    with lantern_accel.load(tmp_path / "new", device="cpu", dtype="float32") as pipe:
        assert pipe.model.manifest.drafter.n_layer == 1
        want = pipe.generate("a cube", strategy="vanilla", seed=1)
        assert torch.equal(pipe.generate("a cube", strategy="eagle2", seed=1).tokens, want.tokens)


def test_parts_of_official_files_are_named_by_a_folder(tmp_path, capsys):
    """Nothing large is copied: the folder that --into writes says where the official files are."""
    released, new = write_janus(tmp_path / "Janus-Pro-1B"), tmp_path / "new"
    words = [*training_words(tmp_path), "--into", new, "--model", released]
    assert main([str(word) for word in words]) == 0
    assert not [*new.rglob("model*.safetensors")] and not [*new.rglob("checkpoint.pt")]
    with lantern_accel.load(new, device="cpu", dtype="float32") as pipe:
        want = pipe.generate("a cube", strategy="vanilla", seed=1)
        assert torch.equal(pipe.generate("a cube", strategy="eagle2", seed=1).tokens, want.tokens)
    assert find_model(new, Parts(no_drafter=True)).manifest.drafter is None
    assert with_named(str(new), "head", new / "drafter", tmp_path / "more") == tmp_path / "more"
    found = trained_parts(tmp_path / "more")
    assert (found.model, found.drafter) == (str(released), new / "drafter")
    assert found.head == tmp_path / "more" / "head"
    check_named(new)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    assert main([*map(str, words), "--into", str(tmp_path / "full")]) != 0
    assert "has other files than parts" in capsys.readouterr().err
    for text, says in (("{", "cannot be read as JSON"), ('{"drafter": 1}', "parts.json: model")):
        (new / "parts.json").write_text(text)
        with pytest.raises(ModelError, match=says):
            find_model(new)
