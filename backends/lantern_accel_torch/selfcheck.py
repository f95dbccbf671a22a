"""The self-check: seconds of the conformance kit, once per machine, torch and driver."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from lantern_accel.files import cache_dir, write_json

if TYPE_CHECKING:
    from lantern_accel.device.backend import Backend
    from lantern_accel_torch.accelerator import Accelerator

#: What is checked: every operation once, and whole images against the CPU's rules.
CHECKS = (
    "kv.round_trip",
    "kv.sentinels",
    "attention.float64",
    "accept.ties",
    "accept.decisions",
    "draw.scan",
    "decode.weights_from_outside",
    "decode.greedy",
)
#: Seconds after which a check has failed.
LIMIT = 60.0


class Verdict(BaseModel):
    """What the self-check found, and on what."""

    model_config = ConfigDict(extra="forbid")

    key: dict[str, str]
    passed: bool
    failed: str = ""
    """The first check that failed, and why: it names the operation."""
    seconds: float = 0.0


def key_of(accelerator: Accelerator, index: int) -> dict[str, str]:
    """Return what a verdict holds for."""
    from lantern_accel import __version__

    return {
        "lantern_accel": __version__,
        "torch": torch.__version__,
        "device": accelerator.type,
        "name": accelerator.name(index),
        "driver": accelerator.driver(index),
    }


def path_of(key: dict[str, str]) -> Path:
    """Return the file that keeps a verdict."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return cache_dir() / "selfcheck" / f"{digest}.json"


def kept(key: dict[str, str]) -> Verdict | None:
    """Return the verdict that was kept, None where there is none or it is damaged or another's."""
    try:
        found = Verdict.model_validate_json(path_of(key).read_text(encoding="utf-8"))
    except (OSError, ValueError, ValidationError):
        return None
    return found if found.key == key else None


def examine(backend: Backend, key: dict[str, str]) -> Verdict:
    """Run the self-check on an opened device up to the first failure; keep and return its verdict."""
    from lantern_accel.testing import CHECKS as known
    from lantern_accel.testing import run_check

    began, failed = time.perf_counter(), ""
    for name in CHECKS:
        outcome = run_check(backend, name, known[name], limit=LIMIT)
        if outcome.state == "failed":
            failed = f"{name}: {' '.join(outcome.detail.split())[:300]}"
            break
    seconds = time.perf_counter() - began
    verdict = Verdict(key=key, passed=not failed, failed=failed, seconds=seconds)
    with contextlib.suppress(OSError):  # then it is checked again next time
        write_json(path_of(key), verdict.model_dump(mode="json"))
    return verdict
