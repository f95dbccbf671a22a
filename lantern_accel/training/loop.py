"""The loop that all trainers share: settings, schedule, checkpoints, resuming, stopping.

A run may be killed at any moment: checkpoints are written whole, a step's randomness depends on the
seed and the step alone, and whatever the last checkpoint lacks is done again.
"""

from __future__ import annotations

import math
import random
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from lantern_accel.errors import DataError, LanternError
from lantern_accel.files import write_json, write_whole
from lantern_accel.progress import Progress
from lantern_accel.records import Frozen
from lantern_accel.training.device import TrainDevice

CHECKPOINT = "checkpoint.pt"
HELD_OUT_SHARE = 0.05


class TrainConfig(Frozen):
    """The settings of every trainer; a checkpoint is continued only under equal settings."""

    steps: int = Field(1000, ge=1, description="optimizer steps")
    batch_size: int = Field(32, ge=1, description="examples per step")
    lr: float = Field(1e-3, gt=0, description="peak learning rate")
    final_lr_ratio: float = Field(0.02, ge=0, le=1, description="last rate divided by the peak")
    schedule: Literal["cosine", "wsd"] = Field(
        "cosine",
        description="wsd (warm-up, stable, decay: arXiv 2404.06395): constant, then linear to the "
        "last rate over decay_share",
    )
    decay_share: float = Field(0.2, gt=0, le=1, description="share of a wsd run that decays")
    warmup: int = Field(100, ge=0, description="steps of linear warm-up")
    weight_decay: float = Field(0.01, ge=0)
    clip_norm: float = Field(1.0, gt=0)
    seed: int = 0
    checkpoint_every: int = Field(200, ge=1, description="steps between checkpoints")
    max_minutes: float | None = Field(None, gt=0, description="wall-clock budget of all runs")
    precision: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="auto: bfloat16 where the device prefers it to float32"
    )


def held_out(count: int, seed: int) -> tuple[list[int], list[int]]:
    """Return which of ``count`` images are held out, one at least, and which are trained on."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    held = max(1, round(HELD_OUT_SHARE * count))
    return order[:held], order[held:]


# Fields that may change between a checkpoint and its continuation.
_FREE_FIELDS = frozenset({"checkpoint_every", "evaluate_every"})


def fraction_done(config: TrainConfig, step: int, elapsed: float) -> float:
    """Return how much of the schedule is over, in [0, 1]; ``elapsed`` in seconds over all runs."""
    done = step / config.steps
    if config.max_minutes is not None:
        done = max(done, elapsed / (60.0 * config.max_minutes))
    return min(done, 1.0)


def learning_rate(config: TrainConfig, step: int, elapsed: float) -> float:
    """Return the rate of optimizer step ``step`` (from 0): linear warm-up, then the schedule."""
    warm = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    done = fraction_done(config, step, elapsed)
    if config.schedule == "wsd":
        fall = min(1.0, (1.0 - done) / config.decay_share)
    else:
        fall = 0.5 * (1.0 + math.cos(math.pi * done))
    floor = config.final_lr_ratio
    return config.lr * warm * (floor + (1.0 - floor) * fall)


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch alike."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def save_checkpoint(
    path: Path, config: TrainConfig, *, step: int, elapsed: float, state: dict[str, Any]
) -> None:
    """Write one file with ``state`` (tensors, numbers, dicts) and the progress."""
    made = {"step": step, "elapsed": elapsed, "state": state}
    payload = {"config": config.model_dump(mode="json"), **made}
    write_whole(path, lambda stream: torch.save(payload, stream))


def load_checkpoint(path: Path, config: TrainConfig) -> dict[str, Any] | None:
    """Return a checkpoint's ``step``, ``elapsed`` and ``state``, or None without one.

    Raises ``DataError`` naming the fields where the checkpoint was written under another configuration,
    and where the file cannot be read.
    """
    if not path.is_file():
        if path.is_symlink() or path.exists():  # a loop, a pipe
            raise DataError(f"{path} is not a file; delete it to start again")
        return None
    try:
        payload: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        stored = dict(payload["config"])
        int(payload["step"]), float(payload["elapsed"]), dict(payload["state"])
    except Exception as error:
        raise DataError(
            f"{path} cannot be continued ({type(error).__name__}: {error}); "
            "delete it to start again"
        ) from error
    wanted = config.model_dump(mode="json")
    names = sorted((stored.keys() | wanted.keys()) - _FREE_FIELDS)
    other = [name for name in names if stored.get(name) != wanted.get(name)]
    if other:
        changes = ", ".join(f"{n} was {stored.get(n)!r}, is {wanted.get(n)!r}" for n in other)
        raise DataError(
            f"{path} was written under another configuration ({changes}); use the same values to "
            "continue it, name another folder with --work, or start over with --restart"
        )
    return payload


# --- the loop -------------------------------------------------------------------------------------


class TrainingStopped(LanternError):
    """The run was asked to stop, by SIGINT or SIGTERM; its checkpoint is written."""

    exit_code = 130


class TrainingEnded(TrainingStopped):
    """It was SIGTERM that asked."""

    exit_code = 143


class Task(ABC):
    """Something to train: one step, its state, and how it is judged."""

    label: str = "training"
    evaluate_every: int | None = None

    @abstractmethod
    def step(self, index: int, rate: float, done: float, rng: random.Random) -> dict[str, float]:
        """Take optimizer step ``index`` at learning rate ``rate``; ``done`` is the share of the run.

        All randomness comes from ``rng``. Returns what to report, ``loss`` among it.
        """

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return everything that a continuation needs: tensors, numbers, dicts."""

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state`'s."""

    @property
    def enough(self) -> bool:
        """Whether more steps would be useless."""
        return False

    def evaluate(self, index: int) -> dict[str, float]:
        """Return figures on held-out data after ``index`` steps; may note the best state."""
        return {}


def check_key(theirs: object, ours: str, label: str) -> None:
    """Raise DataError where a checkpoint learned from something else."""
    if theirs != ours:
        raise DataError(
            f"the checkpoint in the training folder belongs to a {label} for another model or other "
            "prompts; name another folder with --work, or start over with --restart"
        )


def check_checkpoint(out: Path, config: TrainConfig, key: str, label: str) -> None:
    """Raise DataError where ``out`` has a checkpoint that cannot be continued, before longer work."""
    stored = load_checkpoint(out / CHECKPOINT, config)
    task = stored["state"].get("task") if stored else None
    if isinstance(task, dict):  # else the run will say what is wrong with it
        check_key(task.get("key"), key, label)


class ResumableTask(Task):
    """A module in training, of which the weights that were best on held-out data are kept.

    ``key``: of what is learned from; a checkpoint is continued only under the same. ``patience``:
    evaluations without progress, after which training stops; None: it goes on.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    device: TrainDevice
    key: str
    patience: int | None = None

    def begin(self) -> None:
        """Keep the weights as they are, to be beaten by any."""
        self.best, self.stale, self.kept = -1.0, 0, self.weights()

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of what is trained; the rest, such as a target's embedding, is not ours."""
        frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}
        return {k: v.clone() for k, v in self.module.state_dict().items() if k not in frozen}

    def put(self, weights: dict[str, Tensor]) -> None:
        """Load weights; frozen ones that are not among them stay as they are."""
        self.module.load_state_dict({**self.module.state_dict(), **weights})

    def keep(self, figure: float) -> None:
        """Keep the weights where ``figure``, of held-out data, is the best so far."""
        self.stale += 1
        if figure > self.best:
            self.best, self.stale, self.kept = figure, 0, self.weights()

    def finish(
        self, run: TrainingRun, config: TrainConfig, out: Path, **more: object
    ) -> dict[str, object]:
        """Take the best weights of a run that has ended; write and return its report."""
        self.evaluate(run.step)  # the last weights may be the best
        self.put(self.kept)
        report = run.report(config, self.device, self.module, **more | self.evaluate(run.step))
        write_json(out / "report.json", report)
        return report

    @property
    def enough(self) -> bool:
        return self.patience is not None and self.stale >= self.patience

    def state(self) -> dict[str, Any]:
        kept = {"kept": self.kept, "best": self.best, "stale": self.stale, "key": self.key}
        return {"weights": self.weights(), "optimizer": self.optimizer.state_dict(), **kept}

    def load_state(self, state: dict[str, Any]) -> None:
        check_key(state["key"], self.key, self.label)
        self.put(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.best, self.stale = state["best"], state["stale"]
        self.kept = {k: v.to(self.device.device) for k, v in state["kept"].items()}


@dataclass
class TrainingRun:
    """How far a run has come; ``curve`` has one dict per evaluation."""

    step: int = 0
    elapsed: float = 0.0
    running: dict[str, float] = field(default_factory=dict)
    curve: list[dict[str, float]] = field(default_factory=list)

    def report(
        self, config: TrainConfig, device: TrainDevice, model: nn.Module, **figures: object
    ) -> dict[str, object]:
        """Return what ``report.json`` says of a run that has ended."""
        return {
            "steps": self.step,
            "seconds": self.elapsed,
            "parameters": sum(p.numel() for p in model.parameters()),
            "images_seen": self.step * config.batch_size,
            **figures,
            "curve": self.curve,
            "device": str(device.device),
            "dtype": str(device.dtype).removeprefix("torch."),
            "config": config.model_dump(mode="json"),
        }


@contextmanager
def _stops() -> Iterator[list[int]]:
    """Note SIGINT and SIGTERM in a list, so that the step under way is finished and kept."""
    asked: list[int] = []
    before = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, lambda number, frame: asked.append(number))
    except ValueError:  # not the main thread: the owner of that one decides
        pass
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(
    task: Task,
    config: TrainConfig,
    out: Path,
    device: TrainDevice,
    progress: Progress | None = None,
    *,
    resume: bool = True,
) -> TrainingRun:
    """Train until ``config``'s steps or minutes are over, continuing ``out/checkpoint.pt``.

    Raises :class:`TrainingStopped` after an interrupt or a termination signal, once the checkpoint is
    written, :class:`DataError` where the checkpoint is of another configuration or the loss is not a
    number, and OSError where the disk is full: the checkpoint before is whole.
    """
    say = Progress() if progress is None else progress
    seed_everything(config.seed)
    at = TrainingRun()
    stored = load_checkpoint(out / CHECKPOINT, config) if resume else None
    if stored is not None:
        try:
            task.load_state(stored["state"]["task"])
            running, curve = dict(stored["state"]["running"]), list(stored["state"]["curve"])
        except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise DataError(
                f"{out / CHECKPOINT} cannot be continued: what it holds does not fit this training "
                f"({' '.join(str(error).split())[:120]}); delete it to start again"
            ) from error
        at = TrainingRun(stored["step"], stored["elapsed"], running, curve)
        say.log(f"continuing {out / CHECKPOINT} at step {at.step}")
    began = time.monotonic() - at.elapsed

    def save() -> None:
        state = {"task": task.state(), "curve": at.curve, "running": at.running}
        save_checkpoint(out / CHECKPOINT, config, step=at.step, elapsed=at.elapsed, state=state)

    saved = at.step
    say.start(task.label, config.steps)
    say.advance(at.step)
    with _stops() as asked:
        while True:
            at.elapsed = time.monotonic() - began
            done = fraction_done(config, at.step, at.elapsed)
            if done >= 1.0 or asked or task.enough:
                break
            # One stream per step, so that a continued run samples what an unbroken one would.
            own = (config.seed * 1_000_003 + at.step) * 1_009
            rng = random.Random(own)
            torch.manual_seed(own % 2**63)  # of what torch samples by itself: dropout
            rate = learning_rate(config, at.step, at.elapsed)
            metrics = task.step(at.step, rate, done, rng)
            at.step += 1
            at.elapsed = time.monotonic() - began
            _smooth(at.running, metrics)
            if not math.isfinite(metrics["loss"]):
                raise DataError(
                    f"the loss of step {at.step} is not a number; lower lr (it is {config.lr:g}) and "
                    f"run again: the checkpoint of step {saved} is whole"
                )
            say.advance(1, **at.running)
            if task.evaluate_every and at.step % task.evaluate_every == 0:
                at.curve.append({"step": at.step, **at.running, **task.evaluate(at.step)})
                figures = " ".join(f"{k} {v:.4g}" for k, v in at.curve[-1].items() if k != "step")
                say.log(f"step {at.step}: {figures}")
            if at.step % config.checkpoint_every == 0:
                save()
                saved = at.step
    if at.step != saved or stored is None:
        save()
    say.finish()
    if asked:
        kind = TrainingEnded if asked[0] == signal.SIGTERM else TrainingStopped
        raise kind(
            f"stopped at step {at.step} with the checkpoint {out / CHECKPOINT} written; run the same "
            "command to continue"
        )
    return at


def _smooth(running: dict[str, float], metrics: dict[str, float]) -> None:
    for name, value in metrics.items():
        running[name] = 0.98 * running.get(name, value) + 0.02 * value
