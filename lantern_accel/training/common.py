"""Machinery shared by the trainers: configuration, schedule, progress, checkpoints."""

from __future__ import annotations

import math
import random
import sys
import time
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from lantern_accel.errors import DataError
from lantern_accel.files import write_whole


class Progress(Protocol):
    """Where a trainer reports to; ``lantern_accel.training.common`` has three of them."""

    def start(self, label: str, total: int | None = None) -> None:
        """Begin a stage of ``total`` steps (unknown if None)."""

    def advance(self, steps: int = 1, **metrics: float) -> None:
        """Report ``steps`` more, with the latest metrics, such as ``loss=0.12``."""

    def log(self, message: str) -> None:
        """Say one line."""

    def finish(self) -> None:
        """End the stage."""


class NullProgress:
    """Says nothing."""

    def start(self, label: str, total: int | None = None) -> None:
        """Do nothing."""

    def advance(self, steps: int = 1, **metrics: float) -> None:
        """Do nothing."""

    def log(self, message: str) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""


def _words(metrics: dict[str, float]) -> str:
    return " ".join(f"{name} {value:.4g}" for name, value in metrics.items())


class LineProgress:
    """Plain lines, one every ``every`` seconds: for log files and pipes."""

    def __init__(self, every: float = 15.0, stream: IO[str] | None = None) -> None:
        self._every = every
        self._stream = stream or sys.stderr
        self._label, self._total = "", None  # type: str, int | None
        self._done, self._began, self._said, self._said_done = 0, 0.0, 0.0, 0
        self._metrics: dict[str, float] = {}

    def start(self, label: str, total: int | None = None) -> None:
        """Begin a stage and say so."""
        self._label, self._total, self._done, self._said_done = label, total, 0, 0
        self._began = self._said = time.monotonic()
        self._metrics = {}
        self.log(f"{label}: {total} steps" if total is not None else label)

    def advance(self, steps: int = 1, **metrics: float) -> None:
        """Count ``steps``; print a line where the last is long enough ago."""
        self._done += steps
        self._metrics.update(metrics)
        now = time.monotonic()
        if now - self._said >= self._every:
            rate = (self._done - self._said_done) / (now - self._said)
            of = f"/{self._total}" if self._total is not None else ""
            left = ""
            if self._total is not None and rate > 0:
                left = f", {(self._total - self._done) / rate:.0f} s left"
            self._said, self._said_done = now, self._done
            self.log(f"{self._label} {self._done}{of} {_words(self._metrics)} ({rate:.2f}/s{left})")

    def log(self, message: str) -> None:
        """Print one line."""
        print(message, file=self._stream, flush=True)

    def finish(self) -> None:
        """Print the stage's total."""
        took = time.monotonic() - self._began
        self.log(f"{self._label}: {self._done} in {took:.1f} s {_words(self._metrics)}".rstrip())


class BarProgress:
    """A rich bar: step, metrics, rate, time left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[metrics]}"),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task: Any = None
        self._metrics: dict[str, float] = {}

    def start(self, label: str, total: int | None = None) -> None:
        """Show a new bar."""
        self._metrics = {}
        self._task = self._bar.add_task(label, total=total, metrics="", rate="")
        self._bar.start()

    def advance(self, steps: int = 1, **metrics: float) -> None:
        """Move the bar."""
        self._metrics.update(metrics)
        self._bar.advance(self._task, steps)
        speed = self._bar.tasks[-1].speed
        rate = f"{speed:.1f}/s" if speed else ""
        self._bar.update(self._task, metrics=_words(self._metrics), rate=rate)

    def log(self, message: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(message, highlight=False, markup=False)

    def finish(self) -> None:
        """Stop the bar and leave it on screen."""
        self._bar.stop()


def console_progress() -> Progress:
    """Return a bar where standard error is a terminal, else plain lines."""
    return BarProgress() if sys.stderr.isatty() else LineProgress()


class TrainConfig(BaseModel):
    """What every trainer is told; a checkpoint is continued only under an equal configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int = Field(default=1000, ge=1, description="optimizer steps")
    batch_size: int = Field(default=32, ge=1)
    lr: float = Field(default=1e-3, gt=0, description="peak learning rate")
    final_lr_ratio: float = Field(
        default=0.02, ge=0, le=1, description="last rate over the peak rate"
    )
    warmup: int = Field(default=100, ge=0, description="steps of linear warm-up")
    weight_decay: float = Field(default=0.01, ge=0)
    clip_norm: float = Field(default=1.0, gt=0)
    seed: int = 0
    checkpoint_every: int = Field(default=200, ge=1, description="steps between checkpoints")
    max_minutes: float | None = Field(
        default=None, gt=0, description="wall-clock budget of all runs"
    )


# Fields that may change between a checkpoint and its continuation.
_FREE_FIELDS = frozenset({"checkpoint_every"})


def fraction_done(config: TrainConfig, step: int, elapsed: float) -> float:
    """Return how much of the schedule is over, in [0, 1]; ``elapsed`` in seconds over all runs."""
    done = step / config.steps
    if config.max_minutes is not None:
        done = max(done, elapsed / (60.0 * config.max_minutes))
    return min(done, 1.0)


def learning_rate(config: TrainConfig, step: int, elapsed: float) -> float:
    """Return the rate of optimizer step ``step`` (from 0): linear warm-up, then a cosine."""
    warm = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    cosine = 0.5 * (1.0 + math.cos(math.pi * fraction_done(config, step, elapsed)))
    floor = config.final_lr_ratio
    return config.lr * warm * (floor + (1.0 - floor) * cosine)


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch alike."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def save_checkpoint(
    path: Path,
    config: TrainConfig,
    *,
    step: int,
    elapsed: float,
    state: dict[str, Any],
    best: float | None = None,
) -> None:
    """Write one file with ``state`` (tensors, numbers, dicts), the progress and all RNG states."""
    numpy_state = np.random.get_state(legacy=True)
    payload = {
        "config": config.model_dump(mode="json"),
        "step": step,
        "elapsed": elapsed,
        "best": best,
        "state": state,
        "rng": {
            "python": random.getstate(),
            # numpy types the state as a dict or a tuple; legacy=True gives the tuple.
            "numpy": (numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]),  # type: ignore[index]
            "torch": torch.get_rng_state(),
        },
    }
    write_whole(path, lambda stream: torch.save(payload, stream))


def load_checkpoint(path: Path, config: TrainConfig) -> dict[str, Any] | None:
    """Return a checkpoint's ``step``, ``elapsed``, ``best`` and ``state``, or None without one.

    Restores the RNG states. Raises ``DataError`` naming the fields where the checkpoint was written
    under another configuration, and where the file cannot be read.
    """
    if not path.is_file():
        return None
    try:
        payload: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        stored, rng = payload["config"], payload["rng"]
    except Exception as error:
        raise DataError(
            f"{path} cannot be continued ({type(error).__name__}: {error}); "
            "delete it to start again"
        ) from error
    wanted = config.model_dump(mode="json")
    names = sorted((stored.keys() | wanted.keys()) - _FREE_FIELDS)
    other = [name for name in names if stored.get(name) != wanted.get(name)]
    if other:
        said = ", ".join(f"{n} was {stored.get(n)!r}, is {wanted.get(n)!r}" for n in other)
        raise DataError(
            f"{path} was written under another configuration ({said}); use the same values to "
            f"continue it, another output folder, or resume=False to start again"
        )
    version, internal, gauss = rng["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = rng["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(rng["torch"])
    return payload
