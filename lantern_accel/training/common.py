"""Machinery shared by the trainers: configuration, schedule, checkpoints."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, Field

from lantern_accel.errors import DataError
from lantern_accel.files import read_json_file, write_whole
from lantern_accel.records import Frozen

HELD_OUT_SHARE = 0.05
Made = TypeVar("Made", bound=BaseModel)


class TrainConfig(Frozen):
    """The settings of every trainer; a checkpoint is continued only under equal settings.

    With the ``"wsd"`` schedule (warm-up, stable, decay: arXiv 2404.06395) a run may be made longer
    afterwards: the rate of the stable phase does not depend on the end.
    """

    steps: int = Field(default=1000, ge=1, description="optimizer steps")
    batch_size: int = Field(default=32, ge=1, description="examples per step, on each device")
    lr: float = Field(default=1e-3, gt=0, description="peak learning rate")
    final_lr_ratio: float = Field(
        default=0.02, ge=0, le=1, description="last rate divided by the peak rate"
    )
    schedule: Literal["cosine", "wsd"] = Field(
        "cosine", description="wsd: constant, then linear to the last rate over decay_share"
    )
    decay_share: float = Field(0.2, gt=0, le=1, description="share of a wsd run that decays")
    warmup: int = Field(default=100, ge=0, description="steps of linear warm-up")
    weight_decay: float = Field(default=0.01, ge=0)
    clip_norm: float = Field(default=1.0, gt=0)
    seed: int = 0
    checkpoint_every: int = Field(default=200, ge=1, description="steps between checkpoints")
    max_minutes: float | None = Field(
        default=None, gt=0, description="wall-clock budget of all runs"
    )
    precision: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="auto: bfloat16 where the device prefers it to float32"
    )


def read_made(kind: type[Made], path: Path, stage: str, field: str = "") -> Made:
    """Return what a stage of training wrote as JSON, or one field of it.

    Raises :class:`DataError` where the file is not there, or is not what the stage writes.
    """
    try:
        found = read_json_file(path)
        return kind.model_validate(found[field] if field else found)
    except FileNotFoundError:
        raise DataError(
            f"{path.parent} holds no trained {stage}; train the {stage} first"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:120]
        raise DataError(
            f"{path} is not what training a {stage} writes ({reason}); train the {stage} again"
        ) from None


def held_out(count: int, seed: int) -> tuple[list[int], list[int]]:
    """Return which of ``count`` images are held out, one at least, and which are trained on."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    held = max(1, round(HELD_OUT_SHARE * count))
    return order[:held], order[held:]


# Fields that may change between a checkpoint and its continuation.
_FREE_FIELDS = frozenset({"checkpoint_every", "evaluate_every", "samples_every"})
_LENGTH_FIELDS = frozenset({"steps", "max_minutes", "decay_share"})


def fraction_done(config: TrainConfig, step: int, elapsed: float) -> float:
    """Return how much of the schedule is over, in [0, 1]; ``elapsed`` in seconds over all runs."""
    done = step / config.steps
    if config.max_minutes is not None:
        done = max(done, elapsed / (60.0 * config.max_minutes))
    return min(done, 1.0)


def decaying(config: TrainConfig, step: int, elapsed: float) -> bool:
    """Return whether a wsd run has left its stable phase."""
    return (
        config.schedule == "wsd" and fraction_done(config, step, elapsed) > 1.0 - config.decay_share
    )


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
    under another configuration, and where the file cannot be read. The length of a wsd run may
    differ.
    """
    if not path.is_file():
        if (
            path.is_symlink() or path.exists()
        ):  # a loop, a pipe: nothing could be written there either
            raise DataError(f"{path} is no file; delete it to start again")
        return None
    try:
        payload: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        stored, rng = dict(payload["config"]), dict(payload["rng"])
        int(payload["step"]), float(payload["elapsed"]), dict(payload["state"])
    except Exception as error:
        raise DataError(
            f"{path} cannot be continued ({type(error).__name__}: {error}); "
            "delete it to start again"
        ) from error
    wanted = config.model_dump(mode="json")
    # A setting that did not exist when the checkpoint was written had its default.
    for name, field in type(config).model_fields.items():
        if name not in stored and not field.is_required():
            stored[name] = field.get_default(call_default_factory=True)
    free = _FREE_FIELDS | (_LENGTH_FIELDS if config.schedule == "wsd" else frozenset())
    names = sorted((stored.keys() | wanted.keys()) - free)
    other = [name for name in names if stored.get(name) != wanted.get(name)]
    if other:
        changes = ", ".join(f"{n} was {stored.get(n)!r}, is {wanted.get(n)!r}" for n in other)
        raise DataError(
            f"{path} was written under another configuration ({changes}); use the same values to "
            f"continue it, another output folder, or resume=False to start again"
        )
    try:
        version, internal, gauss = rng["python"]
        random.setstate((version, tuple(internal), gauss))
        kind, keys, *rest = rng["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
        torch.set_rng_state(rng["torch"])
    except Exception as error:
        raise DataError(
            f"{path} cannot be continued: its random states are damaged; delete it to start again"
        ) from error
    return payload
