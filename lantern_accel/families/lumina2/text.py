"""Lumina-mGPT 2.0's vocabulary and prompts: Qwen2.5's text tokens, Chameleon's marks, MoVQGAN's codes.

Source: Alpha-VLLM/Lumina-mGPT-2.0 f44a4d7, ``inference_solver.py``, ``item_processor.py`` and
``generate.py``; ``xllmx/model/tokenizer.py`` for what begins a prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pydantic import Field

from lantern_accel.errors import CheckpointError, RequestError
from lantern_accel.families.chameleon.text import ChameleonIds

#: How the names of the codes' tokens begin.
CODE = "<MOVQGAN"
#: Codes along a unit of the grid, which size tokens count, and the pixels that prompts say one has.
UNIT, UNIT_PIXELS = 4, 32
#: No side of an image has more units.
MOST_UNITS = 64
#: What begins the instruction for two panels, which users write out (``docs/models.md``).
TWO_PANELS = "Generate a dual-panel image of "
#: The tokens of :class:`Lumina2Ids` by their names in the vocabulary.
NAMES = {
    "image_start": "<racm3:break>",
    "image_end": "<eoss>",
    "newline": "<reserved08799>",
    "end_of_turn": "<reserved08706>",
}
_WHERE = "use the tokenizer.json that comes with the model"


class Lumina2Ids(ChameleonIds):
    """Ids of the tokens that mean something; the defaults are the published vocabulary's.

    ``grids``: the size tokens, from 0 units on. ``end_of_turn`` is in ``tokenizer.json`` alone.
    """

    bos: int = Field(151645, ge=0)
    pad: int = Field(151645, ge=0)
    eos: int = Field(151666, ge=0)
    image_first: int = Field(155000, ge=0)
    image_codes: int = Field(16384, ge=2)
    image_end: int = Field(151666, ge=0)
    image_start: int = Field(151665, ge=0)
    end_of_turn: int = Field(0, ge=0)
    newline: int = Field(151670, ge=0)
    grid: int = Field(151671, ge=0)
    grids: tuple[int, ...] = tuple(range(151671, 151671 + MOST_UNITS + 1))


def first_token(settings: Mapping[str, object]) -> str:
    """Return the name of the token that begins a prompt, by ``tokenizer_config.json``: bos, else eos."""
    for name in ("bos_token", "eos_token"):
        said = settings.get(name)
        text = said.get("content") if isinstance(said, dict) else said
        if isinstance(text, str):
            return text
    raise CheckpointError(
        "the tokenizer_config.json names neither a bos_token nor an eos_token, so nothing begins a "
        "prompt; use the one that comes with the model"
    )


def ids_from_vocabulary(vocabulary: Mapping[str, int], first: str) -> Lumina2Ids:
    """Read the ids off a vocabulary (token name to id) by their names; ``first`` begins a prompt.

    Raises :class:`CheckpointError` for a vocabulary that lacks one, or has codes in another order.
    """
    missing = [name for name in (first, *NAMES.values()) if name not in vocabulary]
    codes = {name: i for name, i in vocabulary.items() if name.startswith(CODE)}
    if missing or not codes:
        lacking = repr(missing[0]) if missing else f"tokens called {CODE}...>"
        raise CheckpointError(
            f"the tokenizer lacks {lacking}, so it is not Lumina-mGPT 2.0's; {_WHERE}"
        )
    least = min(codes.values())
    for name, i in codes.items():
        number = re.search(r"\d+", name)
        if i >= least + len(codes) or (number and int(number[0]) != i - least):
            raise CheckpointError(
                f"the tokenizer has {name} at {i}, but codes are one after the other from {least} on; "
                "the file is damaged or of another model"
            )
    names = [f"<reserved{8800 + n:05d}>" for n in range(MOST_UNITS + 1)]
    known = [name in vocabulary for name in names]
    grids = tuple(vocabulary[name] for name in names[: (*known, False).index(False)])
    if len(grids) < 2:
        raise CheckpointError(f"the tokenizer lacks {names[len(grids)]!r}, a size token; {_WHERE}")
    found = {field: vocabulary[name] for field, name in NAMES.items()}
    return Lumina2Ids(
        **found,
        bos=vocabulary[first],
        pad=vocabulary[first],
        eos=found["image_end"],
        image_first=least,
        image_codes=len(codes),
        grid=grids[0],
        grids=grids,
    )


def instructions(texts: Sequence[str], rows: int, columns: int) -> list[str]:
    """Return the text of each prompt for an image of ``rows x columns`` codes, which it names in pixels.

    An instruction for two panels stays as it is. Raises :class:`RequestError` where it names another size
    than the image's.
    """
    width, height = (side * UNIT_PIXELS // UNIT for side in (columns, rows))
    for text in texts:
        said = text.removeprefix(TWO_PANELS).partition(" ")[0]
        if text.startswith(TWO_PANELS) and said != f"{width}x{height}":
            raise RequestError(
                f"the prompt asks for two panels of {said} pixels together, and the image has "
                f"{width}x{height}; ask for that size too"
            )
    plain = f"Generate an image of {width}x{height} according to the following prompt:\n"
    return [text if text.startswith(TWO_PANELS) else plain + text for text in texts]
