"""GLM-Image's prompts: the text as it is, the sizes of both grids, and where the picture starts.

Source: transformers 5.23, ``processing_glm_image.py`` (``prepare_inputs_layout``), and the released
``chat_template.jinja``, which adds nothing to a text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from lantern_accel.errors import RequestError, shown
from lantern_accel.families.glm_image.grids import grids
from lantern_accel.families.glm_image.model import GlmImageManifest, Marks
from lantern_accel.families.tokenizer import PromptText


def prompt_text(text: str, marks: Marks, rows: int, columns: int) -> str:
    """Return the prompt of a picture whose large grid has ``rows x columns`` tokens."""
    small, large = grids(rows, columns)
    sizes = "".join(
        f"{marks.size_begin}{high} {wide}{marks.size_end}" for high, wide in (large, small)
    )
    return f"{text}{sizes}{marks.image_start}"


def check_special(texts: Iterable[str], specials: Collection[str]) -> None:
    """Raise :class:`RequestError` for a prompt with a string that the tokenizer reads as a token."""
    for text in texts:
        special = next((one for one in specials if one in text), None)
        if special is not None:
            raise RequestError(
                f"the prompt {shown(text)} has {special!r} in it, which this model reads as a token "
                "of its own and not as text; leave it out"
            )


class GlmImageText(PromptText):
    """The tokenizer of one model, and diffusers' pipeline of the other half."""

    def __init__(self, path: Path, manifest: GlmImageManifest) -> None:
        super().__init__(path, manifest)
        #: diffusers' pipeline of the diffusion half, once it was needed.
        self.painter: Any = None
        added = self.tokenizer.get_added_tokens_decoder().values()
        self.special = [str(one.content) for one in added]

    def prompts(self, texts: Sequence[str], rows: int, columns: int) -> list[list[int]]:
        """Return the ids of each prompt for a picture of ``rows x columns`` tokens.

        Raises :class:`RequestError` for a text with a string that is a token of its own: the tokenizer
        would take it for one.
        """
        marks = self.manifest.marks
        check_special(texts, self.special)
        whole = [prompt_text(text, marks, rows, columns) for text in texts]
        return [list(self.tokenizer.encode(one).ids) for one in whole]
