"""Runs the loop that all trainers share: resuming, schedule, checkpoints, curves, stopping.

A run may be killed at any moment: checkpoints are written whole, a step's randomness depends on the
seed and the step alone, and whatever the last checkpoint lacks is done again.
"""

from __future__ import annotations

import math
import random
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from lantern_accel.errors import DataError, LanternError
from lantern_accel.quality import style
from lantern_accel.quality.progress import Progress
from lantern_accel.training.common import (
    TrainConfig,
    decaying,
    fraction_done,
    learning_rate,
    load_checkpoint,
    save_checkpoint,
    seed_everything,
)
from lantern_accel.training.device import TrainDevice

CHECKPOINT = "checkpoint.pt"
STABLE = "checkpoint-stable.pt"


class TrainingStopped(LanternError):
    """The run was asked to stop; its checkpoint is written."""


class Task(ABC):
    """Something to train: one step, its state, and how it is judged."""

    label: str = "training"
    evaluate_every: int | None = None
    samples_every: int | None = None

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

    def evaluate(self, index: int) -> dict[str, float]:
        """Return figures on held-out data after ``index`` steps; may note the best state."""
        return {}

    def draw_samples(self, path: Path) -> None:
        """Write a picture of what the model does by now; asked for every ``samples_every`` steps."""
        raise NotImplementedError(f"{self.label} draws no samples")


@dataclass
class Run:
    """How far a run has come; ``curve`` has one dict per evaluation."""

    step: int = 0
    elapsed: float = 0.0
    running: dict[str, float] = field(default_factory=dict)
    curve: list[dict[str, float]] = field(default_factory=list)

    def report(
        self, config: TrainConfig, device: TrainDevice, model: nn.Module, **figures: Any
    ) -> dict[str, Any]:
        """Return what ``report.json`` says of a run that has ended."""
        return {
            "steps": self.step,
            "seconds": self.elapsed,
            "parameters": sum(p.numel() for p in model.parameters()),
            "images_seen": self.step * config.batch_size * device.world,
            **figures,
            "curve": self.curve,
            "device": str(device.device),
            "dtype": str(device.dtype).removeprefix("torch."),
            "config": config.model_dump(mode="json"),
        }


class _Stop:
    """Notes SIGINT and SIGTERM, so that the step under way is finished and kept."""

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def listening(self) -> Iterator[_Stop]:
        def ask(number: int, frame: object) -> None:
            self.asked = True

        before = {}
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                before[number] = signal.signal(number, ask)
        except ValueError:  # not the main thread: the owner of that one decides
            pass
        try:
            yield self
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
) -> Run:
    """Train until ``config``'s steps or minutes are over, continuing ``out/checkpoint.pt``.

    Writes ``curves.png`` and ``samples/step-N.png`` next to it. Raises :class:`TrainingStopped` after
    an interrupt or a termination signal, once the checkpoint is written, and :class:`DataError`
    where the checkpoint is of another configuration, the disk is full or the loss is not a number.
    """
    say: Progress = progress if progress is not None and device.main else Progress()
    seed_everything(config.seed)
    at = Run()
    stored = _stored(out, config) if resume else None
    if stored is not None:
        try:
            task.load_state(stored["state"]["task"])
            running, curve = dict(stored["state"]["running"]), list(stored["state"]["curve"])
        except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise DataError(
                f"{out / CHECKPOINT} cannot be continued: what it holds does not fit this training "
                f"({' '.join(str(error).split())[:120]}); delete it to start again"
            ) from error
        at = Run(stored["step"], stored["elapsed"], running, curve)
        say.log(f"continuing {out / CHECKPOINT} at step {at.step}")
    began = time.monotonic() - at.elapsed

    def save(name: str = CHECKPOINT) -> None:
        if not device.main:
            return
        state = {"task": task.state(), "curve": at.curve, "running": at.running}
        try:
            save_checkpoint(out / name, config, step=at.step, elapsed=at.elapsed, state=state)
        except OSError as error:
            raise DataError(
                f"the checkpoint of step {at.step} cannot be written to {out} ({error.strerror}); the "
                "one before it is whole: free some space and run the same command to continue"
            ) from error

    saved = at.step
    say.start(task.label, config.steps)
    say.advance(at.step)
    with _Stop().listening() as stop:
        while True:
            at.elapsed = device.agree(time.monotonic() - began)
            done = fraction_done(config, at.step, at.elapsed)
            if done >= 1.0 or device.agree(float(stop.asked)):
                break
            if decaying(config, at.step, at.elapsed) and not (out / STABLE).is_file():
                save(STABLE)
            # One stream per step and process, so that a continued run draws what an unbroken one
            # would.
            rng = random.Random((config.seed * 1_000_003 + at.step) * 1_009 + device.rank)
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
            if _due(task.evaluate_every, at.step) and device.main:
                at.curve.append({"step": at.step, **at.running, **task.evaluate(at.step)})
                figures = " ".join(f"{k} {v:.4g}" for k, v in at.curve[-1].items() if k != "step")
                say.log(f"step {at.step}: {figures}")
                save_curves(at.curve, out / "curves.png")
            if _due(task.samples_every, at.step) and device.main:
                task.draw_samples(out / "samples" / f"step-{at.step}.png")
            if at.step % config.checkpoint_every == 0:
                save()
                saved = at.step
    if at.step != saved or stored is None:
        save()
    device.wait()
    say.finish()
    if stop.asked:
        raise TrainingStopped(
            f"stopped at step {at.step} with the checkpoint {out / CHECKPOINT} written; run the same "
            "command to continue"
        )
    return at


def _stored(out: Path, config: TrainConfig) -> dict[str, Any] | None:
    """Return the checkpoint to continue; the one before the decay where the run was made longer."""
    stored = load_checkpoint(out / CHECKPOINT, config)
    stable = out / STABLE
    if stored is None or not stable.is_file():
        return stored
    kept = load_checkpoint(stable, config)
    assert kept is not None
    if decaying(config, kept["step"], kept["elapsed"]):
        return load_checkpoint(out / CHECKPOINT, config)  # again, for its random states
    stable.unlink()
    return kept


def _due(every: int | None, step: int) -> bool:
    return bool(every) and step % (every or 1) == 0


def _smooth(running: dict[str, float], metrics: dict[str, float]) -> None:
    for name, value in metrics.items():
        running[name] = 0.98 * running.get(name, value) + 0.02 * value


def save_curves(curve: Sequence[Mapping[str, float]], path: Path) -> bool:
    """Plot each figure of ``curve`` over ``step`` in its own panel; return False without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    names = sorted({name for point in curve for name in point} - {"step"})
    if not names:
        return False
    with style.styled():
        figure, axes = style.panels(len(names), width=3.6, height=3.0)
        for axis, name in zip(axes, names, strict=True):
            points = [(point["step"], point[name]) for point in curve if name in point]
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3)
            axis.set_xlabel("step")
            axis.set_title(name)
            axis.grid(True)
        style.save(figure, path)
    return True
