"""GLM-Image's prompts: the text as it is, the sizes of both grids, and where the image starts.

Source: transformers 5.23, ``processing_glm_image.py`` (``prepare_inputs_layout``), and the released
``chat_template.jinja``, which adds nothing to a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lantern_accel.families.glm_image.grids import grids
from lantern_accel.families.glm_image.model import GlmImageManifest, Marks
from lantern_accel.families.tokenizer import PromptText


def prompt_text(text: str, marks: Marks, rows: int, columns: int) -> str:
    """Return the prompt of an image whose large grid has ``rows x columns`` tokens."""
    small, large = grids(rows, columns)
    sizes = "".join(
        f"{marks.size_begin}{high} {wide}{marks.size_end}" for high, wide in (large, small)
    )
    return f"{text}{sizes}{marks.image_start}"


class GlmImageText(PromptText[GlmImageManifest]):
    """The tokenizer of one model, and diffusers' pipeline of the other half."""

    def __init__(self, path: Path, manifest: GlmImageManifest) -> None:
        super().__init__(path, manifest)
        #: diffusers' pipeline of the diffusion half, once it was needed.
        self.renderer: object = None

    def marks(self) -> Sequence[str]:
        marks = self.manifest.ids
        return marks.size_begin, marks.size_end, marks.image_start

    def prompts(self, texts: Sequence[str], rows: int, columns: int) -> list[list[int]]:
        marks = self.manifest.ids
        whole = [prompt_text(text, marks, rows, columns) for text in texts]
        return [list(self.tokenizer.encode(one).ids) for one in whole]
