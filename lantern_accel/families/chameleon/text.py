"""Chameleon's vocabulary and prompts: one tokenizer for text and image tokens.

Source: facebookresearch/chameleon ``vocab.py``, GAIR-NLP/anole ``chameleon.py``, Lumina-mGPT
``item_processor.py``. Image tokens are called ``IMGIMG``, the code's digits as letters (A = 0 .. J = 9),
``Z``; with the published vocabulary code ``c`` is token ``c + 4``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import Field

from lantern_accel.errors import CheckpointError
from lantern_accel.families.manifest import TokenIds

#: The tokens of :class:`ChameleonIds` by their names in the vocabulary.
NAMES = {
    "bos": "<s>",
    "pad": "<pad>",
    "eos": "</s>",
    "image_end": "<eoss>",
    "image_start": "<racm3:break>",
    "end_of_turn": "<reserved08706>",
}


class ChameleonIds(TokenIds):
    """Ids of the tokens that mean something; the defaults are the published vocabulary's.

    ``newline`` and ``grid`` are Lumina's: the token that ends a row of the image, and the one that
    would say a side of 0 (``grid + n``: 2 n codes, 32 n pixels).
    """

    bos: int = Field(0, ge=0)
    pad: int = Field(1, ge=0)
    eos: int = Field(2, ge=0)
    image_first: int = Field(4, ge=0)
    image_codes: int = Field(8192, ge=2)
    image_end: int = Field(8196, ge=0)
    image_start: int = Field(8197, ge=0)
    end_of_turn: int = Field(8710, ge=0)
    newline: int = Field(8803, ge=0)
    grid: int = Field(8804, ge=0)


def image_token_name(code: int) -> str:
    """Return the vocabulary's name of a code: 53 is ``IMGIMGFDZ``."""
    return "IMGIMG" + "".join(chr(ord("A") + int(digit)) for digit in str(code)) + "Z"


def ids_from_vocabulary(vocabulary: Mapping[str, int]) -> ChameleonIds:
    """Read the ids off a vocabulary (token name to id); ``code = id - first`` is checked for every code.

    Raises :class:`CheckpointError` for a vocabulary without image tokens or in another order.
    """
    images = {name: i for name, i in vocabulary.items() if name.startswith("IMGIMG")}
    missing = [name for name in NAMES.values() if name not in vocabulary]
    if not images or missing:
        lacking = repr(missing[0]) if images else "image tokens"
        raise CheckpointError(
            f"the tokenizer lacks {lacking}, so it is not Chameleon's; use the text_tokenizer.json "
            "that comes with the model"
        )
    first = min(images.values())
    for code in range(len(images)):
        name = image_token_name(code)
        if images.get(name) != first + code:
            raise CheckpointError(
                f"the tokenizer has {name} at {images.get(name)}, but code {code} must be token "
                f"{first + code}; the file is damaged or of another model"
            )
    found = {field: vocabulary[name] for field, name in NAMES.items()}
    for field, name in (("newline", "<reserved08799>"), ("grid", "<reserved08800>")):
        if name in vocabulary:
            found[field] = vocabulary[name]
    return ChameleonIds(image_first=first, image_codes=len(images), **found)


def anole_image_only(ids: ChameleonIds, prompt: Sequence[int]) -> list[int]:
    """Return the context of Anole's middle branch: what of the prompt is an image or its frame.

    For a prompt of text alone it is that of the last branch, and the three-way rule is the two-way.
    """
    frame = {ids.bos, ids.image_start, ids.image_end}
    codes = range(ids.image_first, ids.image_first + ids.image_codes)
    return [i for i in prompt if i in frame or i in codes]
