"""The schedule, checkpoints and progress that all trainers share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from lantern_accel.errors import DataError
from lantern_accel.training.loop import (
    TrainConfig,
    fraction_done,
    learning_rate,
    load_checkpoint,
    save_checkpoint,
)


def test_the_rate_warms_up_then_falls() -> None:
    config = TrainConfig(steps=100, warmup=10, lr=1.0, final_lr_ratio=0.1)
    rates = [learning_rate(config, step, 0.0) for step in range(101)]
    assert rates[0] == pytest.approx(0.1, rel=1e-3)
    assert max(rates) == pytest.approx(1.0, abs=0.05)
    assert rates[100] == pytest.approx(0.1)
    assert rates[20:] == sorted(rates[20:], reverse=True)


def test_the_clock_ends_the_schedule_early() -> None:
    config = TrainConfig(steps=1000, max_minutes=1.0)
    assert fraction_done(config, 10, 30.0) == pytest.approx(0.5)
    assert fraction_done(config, 10, 61.0) == 1.0
    assert fraction_done(config, 900, 1.0) == pytest.approx(0.9)
    assert fraction_done(TrainConfig(steps=10), 5, 1e9) == pytest.approx(0.5)


def test_a_wsd_run_holds_its_rate_then_falls() -> None:
    config = TrainConfig(
        steps=100, warmup=10, lr=1.0, final_lr_ratio=0.0, schedule="wsd", decay_share=0.2
    )
    rates = [learning_rate(config, step, 0.0) for step in range(101)]
    assert rates[10:81] == pytest.approx([1.0] * 71)
    assert rates[90] == pytest.approx(0.5)
    assert rates[100] == pytest.approx(0.0, abs=1e-9)


def test_a_checkpoint_restores_state(tmp_path: Path) -> None:
    config = TrainConfig(steps=10)
    path = tmp_path / "checkpoint.pt"
    assert load_checkpoint(path, config) is None
    state = {"weights": torch.arange(4), "flag": True}
    save_checkpoint(path, config, step=7, elapsed=1.5, state=state)
    stored = load_checkpoint(path, config)
    assert stored is not None
    assert (stored["step"], stored["elapsed"]) == (7, 1.5)
    assert torch.equal(stored["state"]["weights"], torch.arange(4))
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_another_configuration_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, TrainConfig(lr=1e-3), step=1, elapsed=0.0, state={})
    with pytest.raises(DataError, match=r"lr was 0\.001, is 0\.002"):
        load_checkpoint(path, TrainConfig(lr=2e-3))
    assert load_checkpoint(path, TrainConfig(lr=1e-3, checkpoint_every=5)) is not None


def test_a_broken_checkpoint_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(b"PK not a checkpoint")
    with pytest.raises(DataError, match="delete it to start again"):
        load_checkpoint(path, TrainConfig())


@pytest.mark.parametrize("kind", ["pipe", "loop", "folder", "device"])
def test_a_checkpoint_that_is_no_file_is_not_waited_for(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path if kind == "loop" else "/dev/zero")
    with pytest.raises(DataError, match="is not a file; delete it to start again"):
        load_checkpoint(path, TrainConfig(steps=3))


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="extra"):
        TrainConfig.model_validate({"learning_rate": 1.0})
