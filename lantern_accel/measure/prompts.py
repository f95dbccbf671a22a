"""Chooses prompts to measure: a file's, or a fixed random sample from what the bundled model was taught.

Friendly prompts flatter speculative decoding: a drafter knows the common things best. The built-in
ones are therefore a random sample, hard ones included: 64 of the distinct lines of
``tools/lantern-emoji/prompts.txt`` that name no drawing style (a test chooses them again). Trees
are tuned on one half and reported on the other, so that a tuned tree is not measured on what it was
chosen by.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from lantern_accel import prompts as files
from lantern_accel.errors import LanternError, RequestError
from lantern_accel.generation.pipeline import Pipeline, Prompt
from lantern_accel.measure.record import PromptSet
from lantern_accel.records import digest

#: Prompts that a run uses at most; a longer file is known by its digest.
USED = 64
#: The built-in prompts: trees are tuned on the first half; ``bench`` and ``profile`` report on the other.
_DRAWN = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
TUNING, REPORTING = tuple(_DRAWN[:32]), tuple(_DRAWN[32:])


def built_in_prompts(
    pipeline: Pipeline, half: Literal["tuning", "reporting"] = "reporting"
) -> list[Prompt]:
    """Return the built-in prompts of one half that the model takes; class ids for a class model.

    Raises RequestError where the model takes none of them.
    """
    target = pipeline.model.manifest.target
    if getattr(target, "conditioning", "text") == "class":
        first = 0 if half == "reporting" else 1
        return sorted({(2 * i + first) * target.num_classes // 64 for i in range(32)})
    drawn = TUNING if half == "tuning" else REPORTING
    known: list[Prompt] = [prompt for prompt in drawn if _takes(pipeline, prompt)]
    if not known:  # a model with words of its own
        known = list(pipeline.model.family.examples(pipeline.model.manifest))
        known = known[half == "tuning" :: 2] or known
    if not known:
        raise RequestError("the model takes none of the built-in prompts; name a file of prompts")
    return list(known)


def _takes(pipeline: Pipeline, prompt: Prompt) -> bool:
    try:
        with pipeline.backend.inference():
            pipeline.check_prompts([prompt])
    except LanternError:
        return False
    return True


def prompts_of(source: str, lines: list[Prompt]) -> PromptSet:
    """Return prompts with their digest, unchecked."""
    return PromptSet(source=source, count=len(lines), sha256=digest(lines), used=lines[:USED])


def prompt_set(source: str, lines: list[Prompt], pipeline: Pipeline) -> PromptSet:
    """Return prompts with their digest; raises RequestError for one that the model cannot generate."""
    with pipeline.backend.inference():
        pipeline.check_prompts(lines[:USED])
    return prompts_of(source, lines)


def read_prompts(path: Path | None, pipeline: Pipeline) -> PromptSet:
    """Return a file's prompts as a set, or the built-in ones to report on.

    Raises RequestError for a file without prompts, and for a prompt that the model cannot generate.
    """
    if path is None:
        return prompt_set("built-in, a random sample", built_in_prompts(pipeline), pipeline)
    return prompt_set(path.name, files.read_prompts(path), pipeline)
