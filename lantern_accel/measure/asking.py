"""From options to a profiling request: prompts read, strategies tried on, all before any work."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from lantern_accel.decoding.engines import engine_for
from lantern_accel.decoding.geometry import check as check_settings
from lantern_accel.errors import RequestError
from lantern_accel.generation.pipeline import Pipeline, Prompt
from lantern_accel.measure.intervals import digest
from lantern_accel.measure.record import Plan, PromptSet
from lantern_accel.strategy.values import Strategy

#: Prompts that a run draws from at most; a longer file is known by its digest.
USED = 64
QUICK = Plan(quick=True, samples=5, seconds=0.0, quality_images=16)
FULL = Plan(quick=False, samples=30, seconds=10.0, quality_images=64)


def read_prompts(path: Path | None, pipeline: Pipeline) -> PromptSet:
    """Return the prompts of a file, a line each, or built-in ones that the model takes.

    Blank lines are left out. Raises RequestError for a file that is missing, empty or no text, and for
    a prompt that the model cannot draw.
    """
    if path is None:
        lines: list[Prompt] = list(pipeline.model.family.examples(pipeline.model.manifest))
        source = "built-in"
    else:
        lines, source = _lines(path), path.name
    used = lines[:USED]
    with pipeline.backend.inference():
        pipeline.check_prompts(used)
    return PromptSet(source=source, count=len(lines), sha256=digest(lines), used=used)


def _lines(path: Path) -> list[Prompt]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{path} cannot be read ({error.strerror}); name another file") from None
    except ValueError:
        raise RequestError(f"{path} is not UTF-8 text; save it as such") from None
    lines: list[Prompt] = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise RequestError(f"{path} has no prompt; write one a line")
    return lines


def choose_strategies(
    pipeline: Pipeline, names: Sequence[str], temperatures: Sequence[float]
) -> list[Strategy]:
    """Return strategies by name, vanilla first and always there.

    Raises StrategyError for one that the model cannot decode with at one of the temperatures.
    """
    wanted = list(dict.fromkeys(["vanilla", *names]))
    found = [pipeline.strategy(name) for name in wanted]
    model = pipeline.model
    for temperature in temperatures:
        sampling = pipeline.sampling(temperature=temperature)
        for one in (pipeline.tuned(given, temperature) for given in found):
            # Before the neighbour table: it cannot be wider than the codebook.
            check_settings(one, sampling, model.manifest.target.vocab_size)
            table = pipeline.neighbours(one.neighbours) if one.neighbours else None
            with pipeline.backend.inference():
                # Refuses what its model, drafter and tree cannot do; nothing is run or kept.
                engine_for(
                    model.target, model.drafter, pipeline.backend, one, sampling, neighbours=table
                )
    return found


def fresh_name(device: str) -> str:
    """Return a name that no other run has."""
    moment = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M")
    return f"{device.replace(':', '-')}-{moment}-{secrets.token_hex(2)}"
