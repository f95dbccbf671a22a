"""Every training stage through its command, on made-up images, and a picture from the result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from safetensors.torch import load_file
from support.training import TINY, write_images

from lantern_accel.files import write_json


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A training folder, and a cache with 16 made-up images."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(cache))
    write_images(cache)
    for name, values in TINY.items():
        write_json(tmp_path / f"{name}.json", values)
    return tmp_path


@pytest.fixture
def emoji(capsys: pytest.CaptureFixture[str]) -> Callable[..., CompletedProcess[str]]:
    """Run ``python tools/lantern-emoji`` in this process; returns code, standard output and error."""
    from lantern_emoji.app import main

    def run(*words: object) -> CompletedProcess[str]:
        capsys.readouterr()
        code = main([str(word) for word in words])
        text = capsys.readouterr()
        return CompletedProcess([str(word) for word in words], code, text.out, text.err)

    return run


@pytest.mark.long
def test_the_whole_pipeline_makes_a_model_that_draws(command, emoji, work):
    for stage in TINY:
        done = emoji(stage, "--work", work, "--config", work / f"{stage}.json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout[: done.stdout.rindex("}") + 1])["steps"] == 4
    assert (work / "target" / "samples" / "step-2.png").is_file()
    defaults = {"dynamic_tree": {"kind": "dynamic", "top_k": 4, "depth": 3, "total": 12}}
    write_json(work / "defaults.json", {"sampling": {"cfg_scale": 3.0}, **defaults})
    words = ["--name", "squares", "--config", work / "defaults.json"]
    done = emoji("bundle", work / "model", "--work", work, *words)
    assert done.returncode == 0, done.stderr
    done = command(
        "generate", "red square", "--model", work / "model", "--strategy", "lantern++:k=3",
        "--seed", 0, "-o", work / "square.png", "--json",
    )  # fmt: skip
    stats = json.loads(done.stdout)
    assert stats["model"] == "squares"
    assert stats["tokens"] == 64
    done = emoji(
        "evaluate", "--model", work / "model", "--quick", "-o", work / "eval.json",
        "--part", "likelihood",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads((work / "eval.json").read_text())
    assert [row["images"] for row in report["likelihood"]] == ["heldout images", "train images"]


@pytest.mark.long
def test_a_continued_run_ends_as_an_unbroken_one(emoji, work):
    emoji("tokenizer", "--work", work, "--config", work / "tokenizer.json")
    final = work / "target" / "target.safetensors"
    assert emoji("target", "--work", work, "--config", work / "target.json").returncode == 0
    unbroken = load_file(final)
    from lantern_accel.device.plugins import open_backend
    from lantern_accel.training import loop
    from lantern_accel.training.device import TrainDevice
    from lantern_accel.training.folder import read_config
    from lantern_emoji import workspace
    from lantern_emoji.target import TargetConfig

    keep, saves = loop.save_checkpoint, list[int]()

    def dying(*args: object, **kwargs: object) -> None:
        keep(*args, **kwargs)  # type: ignore[arg-type]
        saves.append(kwargs["step"])
        raise KeyboardInterrupt

    (work / "target" / "checkpoint.pt").unlink()
    given = read_config(TargetConfig, work / "target.json"), work, None
    more = {"resume": True, "device": TrainDevice(open_backend("cpu"))}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "save_checkpoint", dying)
        workspace.run_target(*given, **more)
    assert saves == [2] and workspace.run_target(*given, **more)["steps"] == 4
    continued = load_file(final)
    assert all(torch.equal(unbroken[k], continued[k]) for k in unbroken)


def test_a_stage_names_the_one_that_is_missing(emoji, work):
    done = emoji("target", "--work", work / "empty")
    assert done.returncode == 2
    assert "`python tools/lantern-emoji tokenizer` first" in done.stderr
    done = emoji("drafter", "--work", work / "empty")
    assert "`python tools/lantern-emoji target` first" in done.stderr
    done = emoji("bundle", work / "m", "--work", work / "empty")
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"lr": -1}', "lr"),
        ('{"layers": 3}', "layers"),
        ("{", "cannot be read"),
        ('{"dim": 100, "n_head": 6}', "dim 100 must be n_head 6 times"),
        ('{"text_dim": 50, "text_heads": 4}', "text_dim 50 must be text_heads 4 times"),
    ],
)
def test_a_wrong_configuration_names_its_field(emoji, work, text, reason):
    (work / "bad.json").write_text(text)
    done = emoji("target", "--work", work, "--config", work / "bad.json")
    assert done.returncode == 2
    assert reason in done.stderr


def test_toml_is_read_options_win_and_a_style_is_known(work):
    from lantern_accel.errors import DataError
    from lantern_accel.training.folder import read_config
    from lantern_emoji.target import TargetConfig

    (work / "c.toml").write_text("steps = 7\nlr = 0.002\n")
    config = read_config(TargetConfig, work / "c.toml", steps=9, seed=None)
    assert (config.steps, config.lr, config.seed) == (9, 0.002, 0)
    with pytest.raises(DataError, match="no style is named 'notto'; there are noto, twemoji"):
        read_config(TargetConfig, None, style_weights={"notto": 2.0})
