"""The built-in prompts: a fixed random sample from what the bundled model was taught.

Friendly prompts flatter speculative decoding: a drafter knows the common things best. The built-in
ones are therefore a random sample, hard ones included: 64 of the distinct lines of
``tools/lantern-emoji/prompts.txt`` that name no drawing style (a test chooses them again). Trees
are tuned on one half and reported on the other, so that a tuned tree is not measured on what it was
chosen by.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from lantern_accel.errors import LanternError, RequestError
from lantern_accel.generation.pipeline import Pipeline, Prompt

#: Trees are tuned on the first half; ``bench`` and ``profile`` report on the other.
_SAMPLE = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
TUNING, REPORTING = tuple(_SAMPLE[:32]), tuple(_SAMPLE[32:])


def built_in_prompts(
    pipeline: Pipeline, half: Literal["tuning", "reporting"] = "reporting"
) -> list[Prompt]:
    """Return the built-in prompts of one half that the model takes; class ids for a class model.

    Raises RequestError where the model takes none of them.
    """
    manifest = pipeline.model.manifest
    if manifest.conditioning == "class":
        first = 0 if half == "reporting" else 1
        return sorted({(2 * i + first) * manifest.target.num_classes // 64 for i in range(32)})
    sample = TUNING if half == "tuning" else REPORTING
    known: list[Prompt] = [prompt for prompt in sample if _takes(pipeline, prompt)]
    if not known:  # a model with words of its own
        known = list(pipeline.model.family.examples(pipeline.model.manifest))
        known = known[half == "tuning" :: 2] or known
    if not known:
        raise RequestError("the model takes none of the built-in prompts; name a file of prompts")
    return list(known)


def _takes(pipeline: Pipeline, prompt: Prompt) -> bool:
    try:
        pipeline.check_prompts([prompt])
    except LanternError:
        return False
    return True
