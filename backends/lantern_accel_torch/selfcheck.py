"""The self-check: seconds of the conformance kit, once per machine, torch and driver."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from lantern_accel.device.timeouts import TooLong, in_time
from lantern_accel.files import cache_dir, write_json

if TYPE_CHECKING:
    from lantern_accel_torch.accelerator import Accelerator
    from lantern_accel_torch.backend import DeviceBackend

#: What is checked: operations next to float64, and whole images against the CPU's rules.
CHECKS = (
    "kv.round_trip",
    "kv.sentinels",
    "operation.linear",
    "operation.rms_norm",
    "operation.swiglu",
    "operation.rotate",
    "attention.float64",
    "accept.ties",
    "accept.decisions",
    "draw.scan",
    "draw.noise",
    "decode.weights_from_outside",
    "decode.greedy",
)
#: Seconds that a check may take: it runs while somebody waits for an image.
LIMIT = 60.0
#: What recorded steps are checked by, where torch has graphs for the device.
RECORDED = ("replay.kind", "replay.eager", "replay.buckets")
#: What a verdict says while these run: a driver that ends the process leaves it behind.
INTERRUPTED = "the check of recorded steps ended the process"


class Verdict(BaseModel):
    """What the self-check found, and on what."""

    model_config = ConfigDict(extra="forbid")

    key: dict[str, str]
    passed: bool
    failed: str = ""
    """The first check that failed, and why: it names the operation."""
    not_recorded: str = ""
    """Why steps are not recorded on a device that passed, though torch has graphs for it."""
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


def load_verdict(key: dict[str, str]) -> Verdict | None:
    """Return the verdict that was kept, None where there is none or it is damaged or another's."""
    try:
        found = Verdict.model_validate_json(path_of(key).read_text(encoding="utf-8"))
    except (OSError, ValueError, ValidationError):
        return None
    return found if found.key == key else None


def examine(backend: DeviceBackend, key: dict[str, str]) -> Verdict:
    """Run the self-check on an opened device up to the first failure; keep and return its verdict.

    A device that fails with recorded steps alone passes, and its steps are not recorded.
    """
    began = time.perf_counter()
    recorded = bool(backend.support("capture"))
    if recorded:
        backend.record_steps(unless=INTERRUPTED)
    failed = _first_failure(backend, CHECKS)
    verdict = Verdict(key=key, passed=not failed, failed=failed)
    if recorded and verdict.passed:
        verdict.not_recorded = INTERRUPTED
        _keep(verdict)
        backend.record_steps()
        verdict.not_recorded = _first_failure(backend, RECORDED)
    verdict.seconds = time.perf_counter() - began
    _keep(verdict)
    return verdict


def _first_failure(backend: DeviceBackend, names: tuple[str, ...]) -> str:
    """Run checks in order; return the first failure in one line, "" without one."""
    from lantern_accel.testing import CHECKS as known
    from lantern_accel.testing import run_check

    for name in names:
        try:
            outcome = in_time(partial(run_check, backend, name, known[name]), LIMIT)
        except TooLong as late:
            return f"{name}: {late}"
        if outcome.state == "failed":
            return f"{name}: {' '.join(outcome.detail.split())[:300]}"
    return ""


def _keep(verdict: Verdict) -> None:
    with contextlib.suppress(OSError):  # then it is checked again next time
        write_json(path_of(verdict.key), verdict.model_dump(mode="json"))
