"""The prompts of a measurement, with their digest: a file's, or the built-in ones."""

from __future__ import annotations

from pathlib import Path

from lantern_accel import prompts as files
from lantern_accel.generation.built_in_prompts import built_in_prompts
from lantern_accel.generation.pipeline import Pipeline, Prompt
from lantern_accel.records import digest
from lantern_accel_profiles.measure.record import PromptSet

#: Prompts that a run uses at most; a longer file is known by its digest.
USED = 64
#: What a run calls the built-in prompts.
BUILT_IN = "built-in, a random sample"


def prompts_of(source: str, lines: list[Prompt]) -> PromptSet:
    """Return prompts with their digest, unchecked."""
    return PromptSet(source=source, count=len(lines), sha256=digest(lines), used=lines[:USED])


def prompt_set(source: str, lines: list[Prompt], pipeline: Pipeline) -> PromptSet:
    """Return prompts with their digest; raises RequestError for one that the model cannot generate."""
    pipeline.check_prompts(lines[:USED])
    return prompts_of(source, lines)


def read_prompts(path: Path | None, pipeline: Pipeline) -> PromptSet:
    """Return a file's prompts as a set, or the built-in ones to report on.

    Raises RequestError for a file without prompts, and for a prompt that the model cannot generate.
    """
    if path is None:
        return prompt_set(BUILT_IN, built_in_prompts(pipeline), pipeline)
    return prompt_set(path.name, files.read_prompts(path), pipeline)
