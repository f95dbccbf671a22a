"""Checks what a run is asked to measure before any work: strategies, names, the command."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lantern_accel.device.backend import Backend
from lantern_accel.device.conformance import Report as ConformanceReport
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.measure.record import Plan, PromptSet
from lantern_accel.strategy.values import AUTO, Strategy, Window

QUICK = Plan(quick=True, samples=5, seconds=0.0, quality_images=16)
FULL = Plan(quick=False, samples=30, seconds=10.0, quality_images=64)
#: What is measured where nobody names strategies; those with a drafter only where the model has one.
USUAL = (AUTO, "eagle", "eagle2", "lantern", "lantern++", "scd")


@dataclass
class Request:
    """What a run is asked to measure; ``conform`` checks the backend, None leaves that out.

    ``window``: somebody chose the length of windows, so that batches do not shorten them.
    """

    strategies: Sequence[Strategy]
    prompts: PromptSet
    plan: Plan
    batches: Sequence[int] = (1,)
    temperatures: Sequence[float] = (1.0,)
    seed: int = 0
    name: str = "run"
    command: str = "lantern-accel profile"
    options: dict[str, Any] = field(default_factory=dict)
    load_seconds: float = 0.0
    trace: Path | None = None
    conform: Callable[[Backend], ConformanceReport] | None = None
    window: bool = False


def usual_names(pipeline: Pipeline) -> list[str]:
    """Return the names of :data:`USUAL` that the model can decode with: auto is always among them."""
    drafter = pipeline.model.drafter is not None
    return [name for name in USUAL if drafter or not pipeline.strategy(name).needs_drafter]


def choose_strategies(
    pipeline: Pipeline,
    names: Sequence[str],
    temperatures: Sequence[float],
    tree: str | None = None,
    window: int | None = None,
) -> list[Strategy]:
    """Return strategies by name, vanilla first and always there.

    ``tree`` is for those with a drafter, ``window`` (its length) for those that draft in one.

    Raises StrategyError for one that the model cannot decode with at one of the temperatures.
    """
    wanted = list(dict.fromkeys(["vanilla", *names]))
    found = []
    for one in map(pipeline.strategy, wanted):
        changes: dict[str, Any] = {"tree": tree if one.needs_drafter else None}
        if isinstance(one.tree, Window):
            changes["window"] = window
        found.append(pipeline.strategy(one.name, **changes))
    for temperature in temperatures:
        sampling = pipeline.sampling(temperature=temperature)
        for one in found:
            pipeline.engines.check(pipeline.auto.tuned(one, temperature), sampling)
    return found


def fresh_name(device: str) -> str:
    """Return a name that no other run has."""
    moment = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M")
    return f"{device.replace(':', '-')}-{moment}-{secrets.token_hex(4)}"


def command_of(arguments: Sequence[str]) -> str:
    """Return what to type to measure again: no ``--resume``, and no machine's folders before names."""
    words = []
    for word in arguments:
        if word == "--resume":
            continue
        option, sign, value = word.partition("=")
        value = value if sign and option.startswith("-") else word
        if "/" in value or "\\" in value:
            value = value.replace("\\", "/").rstrip("/").rpartition("/")[2]
        words.append(f"{option}={value}" if sign and option.startswith("-") else value)
    return shlex.join(["lantern-accel", *words])
