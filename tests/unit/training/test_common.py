"""The schedule, checkpoints and progress that all trainers share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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


def test_another_configuration_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, TrainConfig(lr=1e-3), step=1, elapsed=0.0, state={})
    with pytest.raises(DataError, match=r"lr was 0\.001, is 0\.002"):
        load_checkpoint(path, TrainConfig(lr=2e-3))
    assert load_checkpoint(path, TrainConfig(lr=1e-3, checkpoint_every=5)) is not None


@pytest.mark.parametrize("kind", ["broken", "pipe", "loop", "folder", "device"])
def test_what_is_no_checkpoint_is_told_with_a_way_out(kind: str, tmp_path: Path) -> None:
    """A pipe or a device is not waited for."""
    path = tmp_path / "checkpoint.pt"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "broken":
        path.write_bytes(b"PK not a checkpoint")
    else:
        path.symlink_to(path if kind == "loop" else "/dev/zero")
    with pytest.raises(DataError, match="delete it to start again"):
        load_checkpoint(path, TrainConfig(steps=3))
