"""A draft head for any model: recorded, trained, stopped, continued, written, taken and refused."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.emu3 import write_emu3
from support.glm_image import write_glm_image
from support.janus import write_janus
from support.lumina2 import write_lumina2
from support.models import write_tiny_model

import lantern_accel
from lantern_accel.cli import main
from lantern_accel.errors import CheckpointError, DataError, DiskFullError
from lantern_accel.models.check import check
from lantern_accel.models.locate import named_parts
from lantern_accel.progress import Progress
from lantern_accel.training import head as trainer
from lantern_accel.training import loop, recording
from lantern_accel.training.device import TrainDevice
from lantern_accel.training.folder import check_copy
from lantern_accel.training.head import HeadTrainConfig, acceptance, train_head

#: What blocks add, in published layouts; GLM-Image norms it.
LITTLE = (
    "o_proj.weight", "down_proj.weight", "post_self_attn_layernorm.weight", "post_mlp_layernorm.weight",
)  # fmt: skip
PROMPTS = ["red heart", "dog face", "blue fish", "sea"]
CONFIG: dict[str, Any] = {
    "steps": 4, "batch_size": 64, "warmup": 1, "evaluate_every": 2, "checkpoint_every": 2, "hidden": 8,
    "rank": 6, "images_at_once": 3, "span": 3, "precision": "float32",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "model", drafter=False)


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head by the command."""
    work: Path = tmp_path_factory.mktemp("work")
    (work / "prompts.txt").write_text("\n".join(PROMPTS))
    (work / "config.json").write_text(json.dumps(CONFIG))
    words = ["train", "head", "--model", folder, "--prompts", work / "prompts.txt", "--samples", 7]
    words += ["--work", work, "--config", work / "config.json", "--device", "cpu"]
    assert main([str(word) for word in [*words, "--into", work / "joined"]]) == 0
    return work


def run(folder: Path, out: Path, said: Progress | None = None, **more: Any) -> dict[str, Any]:
    given = {"prompts": PROMPTS, "samples": 7, **more}
    settings = HeadTrainConfig.model_validate({**CONFIG, **given.pop("config", {})})
    with lantern_accel.load(folder, device="cpu", head="none") as pipeline:
        device = TrainDevice(pipeline.backend, "float32")
        return train_head(pipeline, settings, out, device, said, **given)


def test_a_head_is_trained_written_and_taken(folder: Path, trained: Path) -> None:
    file = trained / "head" / "draft_head.safetensors"
    report = json.loads((trained / "head" / "report.json").read_text())
    assert all(0 < report[f"accepted_{ahead}"] <= 1 for ahead in (1, 2, 3))
    assert (report["steps"], report["untouched"], report["prompts"]) == (4, 1, 4)
    want: dict[str, Any] = {"prompt": "red heart", "seed": 1}
    for model, head in ((folder, file), (folder, file.parent), (trained / "joined", None)):
        with lantern_accel.load(model, device="cpu", dtype="float32", head=head) as pipeline:
            plain = pipeline.generate(strategy="vanilla", **want)
            made = pipeline.generate(strategy="scd", drafts="window:4,head", **want)
            assert torch.equal(plain.tokens, made.tokens)
    (part,) = (
        one for one in check(folder, named_parts(head=file)).parts if one.part == "draft_head"
    )
    assert part.state == "found" and "hidden 8" in part.detail
    with lantern_accel.load(trained / "joined", device="cpu", head="none") as pipeline:
        assert pipeline.model.target.draft_head is None


@pytest.mark.long
@pytest.mark.parametrize("kind", ["lumina2", "emu3"])
def test_a_head_for_rows_with_ends_draws_vanillas_tokens(kind: str, tmp_path: Path) -> None:
    """A picture that is wider than high, for which it is trained, and one of another size."""
    model = {"emu3": write_emu3, "lumina2": write_lumina2}[kind](tmp_path / "model")
    size, other = ((8, 4), (6, 6)) if kind == "emu3" else ((16, 8), (8, 8))
    run(model, tmp_path / "out", prompts=["a fox", "a cat"], samples=4, size=size)
    said = sizes_said(tmp_path / "out")
    with lantern_accel.load(
        model, device="cpu", dtype="float32", head=tmp_path / "out"
    ) as pipeline:
        rows, columns = pipeline.manifest.grid(size)
        assert (said["grid"], said["tokens"]) == (columns + 1, rows * (columns + 1))
        for asked in (size, other):
            for temperature in (0.0, 1.0):
                given = {"seed": 3, "size": asked, "temperature": temperature}
                want = pipeline.generate("a fox", strategy="vanilla", **given)
                made = pipeline.generate("a fox", strategy="scd", drafts="window:4,head", **given)
                assert torch.equal(made.tokens, want.tokens)


def sizes_said(folder: Path) -> dict[str, Any]:
    """Return the sizes that the file of a trained head says."""
    with safe_open(folder / "draft_head.safetensors", "pt") as file:
        found: dict[str, Any] = json.loads(file.metadata()["draft_head"])["config"]
    return found


def test_plans_know_a_head(folder: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(trained / "head" / "draft_head.safetensors")
    assert main(["models", "plan", str(folder), "--use", f"head={file}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["weights"]
    tensors = load_file(file).values()
    assert found["draft_head"] == 4 * sum(one.numel() for one in tensors)


def test_a_head_of_another_model_is_refused(folder: Path, trained: Path, tmp_path: Path) -> None:
    file = trained / "head" / "draft_head.safetensors"
    other = write_tiny_model(tmp_path / "other", drafter=False, seed=6)
    with pytest.raises(CheckpointError, match=r"another model's weights.*--use head=none"):
        lantern_accel.load(other, device="cpu", head=file)
    with pytest.raises(CheckpointError, match=r"of another model: it is for states of"):
        lantern_accel.load("lantern-emoji", device="cpu", head=file)
    with pytest.raises(
        CheckpointError, match="a draft head, and no drafter; use it with --use head="
    ):
        lantern_accel.load("lantern-emoji", device="cpu", drafter=file.parent)
    (tmp_path / "checkpoint.pt").touch()
    with pytest.raises(CheckpointError, match=r"training of the draft head in .* has not ended"):
        lantern_accel.load("lantern-emoji", device="cpu", head=tmp_path)
    with pytest.raises(CheckpointError, match="not a draft head"):
        lantern_accel.load(folder, device="cpu", head=folder / "target.safetensors")


@pytest.mark.parametrize(
    "fatal",
    ["training", *(pytest.param(one, marks=pytest.mark.long) for one in ("recording", "after"))],
)
def test_a_killed_run_ends_in_the_same_file(
    folder: Path, trained: Path, tmp_path: Path, fatal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(Exception):
        pass

    calls = []

    def dying(function: Any, nth: int) -> Any:
        def call(*given: Any, **words: Any) -> Any:
            calls.append(given)
            if len(calls) == nth:
                raise Killed
            return function(*given, **words)

        return call

    where, name, nth = {
        "recording": (recording, "write_tensors", 2),
        "training": (loop, "save_checkpoint", 2),
        "after": (trainer, "write_weights", 1),
    }[fatal]
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(where, name, dying(getattr(where, name), nth))
        run(folder, tmp_path)
    run(folder, tmp_path)
    name = "draft_head.safetensors"
    assert (tmp_path / name).read_bytes() == (trained / "head" / name).read_bytes()


def test_training_stops_by_itself(folder: Path, tmp_path: Path) -> None:
    slow = {
        "lr": 1e-30,
        "patience": 2,
        "steps": 1000,
        "evaluate_every": 1,
        "checkpoint_every": 1000,
    }
    report = run(folder, tmp_path, config=slow)
    assert report["steps"] < 10


def test_what_cannot_be_trained_on_is_said_in_a_sentence(
    folder: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with pytest.raises(DataError, match="1 prompt is too few"):
        run(folder, tmp_path, prompts=PROMPTS[:1])
    with monkeypatch.context() as patch:  # before any image is generated
        patch.setattr(recording, "generate_batch", Mock(side_effect=AssertionError))
        with pytest.raises(DataError, match="another model or other prompts"):
            run(folder, trained / "head", prompts=PROMPTS[:3])
        with pytest.raises(DataError, match=r"steps was 4, is 5.*start over with --restart"):
            run(folder, trained / "head", config={"steps": 5})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".DS_Store").touch()
    shutil.copy(folder / "vq.safetensors", tmp_path / "other")
    check_copy(folder, tmp_path / "other")  # a copy that was interrupted
    (tmp_path / "other" / "target.safetensors").write_text("precious")
    with pytest.raises(DataError, match="has other files than the model"):
        check_copy(folder, tmp_path / "other")
    check_copy(folder, trained / "joined")
    (trained / "joined" / "pictures").mkdir()
    check_copy(trained / "joined", trained / "joined")
    (tmp_path / "none.txt").write_text("\n\n")
    assert (
        main(["train", "head", "--model", str(folder), "--prompts", str(tmp_path / "none.txt")])
        == 2
    )
    assert "holds no prompt" in capsys.readouterr().err
    for kind, more, says in (
        ("head", ["--model", "nosuch", "--into", str(tmp_path / "new")], "unknown model 'nosuch'"),
        (
            "drafter",
            ["--model", "x", "--images", "i", "--prompts", "p"],
            "--images replaces --prompts",
        ),
    ):
        assert main(["train", kind, *more]) == 2
        assert says in capsys.readouterr().err
    full = OSError(errno.ENOSPC, "No space left on device", "head.safetensors")
    monkeypatch.setattr(recording, "write_tensors", Mock(side_effect=full))
    words = ["train", "head", "--model", folder, "--device", "cpu", "--work", tmp_path / "w"]
    words += ["--prompts", trained / "prompts.txt", "--samples", 4]
    assert main([str(word) for word in words]) != 0
    assert "free some space" in capsys.readouterr().err
    usage = type("usage", (), {"free": 10})
    monkeypatch.setattr("lantern_accel.training.head.shutil.disk_usage", lambda path: usage)
    with pytest.raises(DiskFullError, match="free space"):
        run(folder, tmp_path / "full")


def test_acceptance_is_the_share_of_races_that_end_alike() -> None:
    torch.manual_seed(0)
    p, q = torch.rand(2, 4, 6).pow(3).softmax(-1)
    p[0, 2:] = 0
    p, q = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
    times = -torch.rand(40_000, 1, 6).log()
    alike = (times / p).argmin(-1) == (times / q).argmin(-1)
    got, want = acceptance(p, q), alike.float().mean(0)
    assert torch.allclose(got, want, atol=4 * 0.5 / 200), (got, want)
    listed = acceptance(p[1:, :4], q[1:, :4])
    assert torch.all(listed <= got[1:]), "codes that are not listed count for nothing"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["llamagen", "glm_image"])
@pytest.mark.filterwarnings("ignore:.*there are no images")
def test_a_heads_windows_bring_more_tokens_than_the_row_above(kind: str, tmp_path: Path) -> None:
    """Random weights, cold, and with blocks that add little: a token follows from what is around it."""
    size = (32, 32) if kind == "glm_image" else None
    prompts, temperature = ["a red cube", "two cats", "blue"], 0.1
    if kind == "llamagen":
        model = write_tiny_model(tmp_path / "model", drafter=False, grid=6)
        prompts, temperature = ["red heart", "dog face", "a fish", "blue", "sea"], 0.25
    else:
        model = {"janus": write_janus, "glm_image": write_glm_image}[kind](tmp_path / "model")
        (file,) = model.rglob("*.safetensors")
        named = load_file(file)
        for key, value in named.items():
            if key.endswith(LITTLE):
                named[key] = 0.05 * value
        save_file(named, file)
    settings = {"steps": 300, "batch_size": 256, "evaluate_every": 100, "hidden": 32, "rank": 32}
    config = HeadTrainConfig.model_validate({**CONFIG, **settings, "images_at_once": 8})
    asked: dict[str, Any] = {"temperature": temperature, "top_k": 0, "size": size}
    with lantern_accel.load(model, device="cpu", dtype="float32", drafter="none") as pipeline:
        known = pipeline.manifest.defaults
        sharp = known.sampling.model_copy(update={"temperature": temperature, "top_k": 0})
        defaults = known.model_copy(update={"sampling": sharp})
        pipeline.model.manifest = pipeline.manifest.model_copy(update={"defaults": defaults})
        report = train_head(
            pipeline, config, tmp_path / "out", TrainDevice(pipeline.backend, "float32"),
            prompts=prompts, samples=8 if size else 64, size=size,
        )  # fmt: skip
    assert report["accepted_1"] > 0.2
    with lantern_accel.load(
        model, device="cpu", dtype="float32", head=tmp_path / "out"
    ) as pipeline:
        steps, seeds = {}, (104,) if size else (101, 102, 103, 104)
        for fresh in ("above", "head"):
            given = {**asked, "strategy": "scd", "drafts": f"window:4,{fresh},passes=0"}
            made = [pipeline.generate(prompts[0], seed=seed, **given) for seed in seeds]
            steps[fresh] = sum(one.stats.steps for one in made)
        assert steps["head"] < steps["above"], steps
        plain = pipeline.generate(prompts[0], strategy="vanilla", seed=104, **asked)
        assert torch.equal(plain.tokens, made[-1].tokens)
