"""The loop of all trainers: killed, stopped, out of space."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lantern_accel.device.plugins import open_backend
from lantern_accel.errors import DataError
from lantern_accel.training import loop
from lantern_accel.training.device import TrainDevice
from lantern_accel.training.loop import TrainConfig, load_checkpoint, seed_everything

STEPS = 60


class Line(loop.Task):
    """Fits a line; slow enough to be hit by a kill."""

    evaluate_every = 20

    def __init__(self, nap: float = 0.0) -> None:
        seed_everything(0)
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.nap = nap

    def step(self, index: int, rate: float, done: float, rng: random.Random) -> dict[str, float]:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        x = torch.tensor([[rng.random() for _ in range(3)] for _ in range(4)])
        x = x + 0.1 * torch.rand(4, 3)  # as dropout draws
        loss = (self.model(x) - x.sum(-1, keepdim=True)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        time.sleep(self.nap)
        return {"loss": float(loss.detach())}

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def evaluate(self, index: int) -> dict[str, float]:
        return {"weight": float(self.model.weight.detach().sum())}


def config(**changes: Any) -> TrainConfig:
    values = {"steps": STEPS, "lr": 0.05, "warmup": 2, "checkpoint_every": 3, **changes}
    return TrainConfig.model_validate(values)


def train(out: Path, task: Line | None = None, **changes: Any) -> tuple[Line, loop.TrainingRun]:
    task = task or Line()
    done = loop.run(task, config(**changes), out, TrainDevice(open_backend("cpu")))
    return task, done


def same(one: Line, other: Line) -> bool:
    return all(
        torch.equal(a, b)
        for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True)
    )


SCRIPT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
import test_loop
test_loop.train(Path(sys.argv[1]), test_loop.Line(nap=0.03))
"""


@pytest.mark.long
def test_a_run_killed_at_random_ends_as_an_unbroken_one(tmp_path: Path) -> None:
    """The moments are drawn again in every run of the tests; all must end alike."""
    out = tmp_path / "killed"
    moments = random.Random()
    seen = 0
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(out)])
        until = seen + moments.randint(3, 12)
        try:
            while _step(out) < until and process.poll() is None:
                time.sleep(0.005)
            time.sleep(moments.random() * 0.1)
        finally:
            process.kill()
        assert process.wait() == -signal.SIGKILL
        # What was there stays: never less than before, always readable.
        assert _step(out) >= seen
        seen = _step(out)
    assert 0 < seen < STEPS
    killed, done = train(out)
    unbroken, _ = train(tmp_path / "unbroken")
    assert done.step == STEPS
    assert same(killed, unbroken)
    left = {path.name for path in out.iterdir() if not path.name.endswith(".part")}
    assert left == {"checkpoint.pt"}
    assert [point["step"] for point in done.curve] == [20, 40, 60]


def _step(out: Path) -> int:
    stored = load_checkpoint(out / "checkpoint.pt", config())
    return 0 if stored is None else int(stored["step"])


@pytest.mark.long
def test_a_termination_signal_keeps_the_step_under_way(tmp_path: Path) -> None:
    class Asked(Line):
        def step(
            self, index: int, rate: float, done: float, rng: random.Random
        ) -> dict[str, float]:
            if index == 7:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().step(index, rate, done, rng)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(loop.TrainingEnded, match=r"stopped at step 8 .* same command") as ended:
        train(tmp_path, Asked())
    assert (ended.value.exit_code, loop.TrainingStopped.exit_code) == (143, 130)
    assert signal.getsignal(signal.SIGTERM) is before
    assert _step(tmp_path) == 8
    continued, done = train(tmp_path)
    assert done.step == STEPS
    assert same(continued, train(tmp_path / "unbroken")[0])


def test_a_full_disk_leaves_the_checkpoint_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = loop.save_checkpoint

    def full(path: Path, config: TrainConfig, **values: Any) -> None:
        if values["step"] > 5:
            raise OSError(28, "No space left on device")
        keep(path, config, **values)

    monkeypatch.setattr(loop, "save_checkpoint", full)
    with pytest.raises(OSError, match="No space left"):  # which commands explain, with a way out
        train(tmp_path)
    assert _step(tmp_path) == 3


def test_a_loss_that_is_not_a_number_stops_the_run(tmp_path: Path) -> None:
    class Broken(Line):
        def step(
            self, index: int, rate: float, done: float, rng: random.Random
        ) -> dict[str, float]:
            return {"loss": float("nan") if index == 4 else 1.0}

    with pytest.raises(DataError, match="loss of step 5 is not a number; lower lr"):
        train(tmp_path, Broken())
    assert _step(tmp_path) == 3
