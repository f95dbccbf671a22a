"""Tokenizers of several families: their files read, and held to the model's vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lantern_accel.errors import CheckpointError
from lantern_accel.files import read_text_file


def read_tokenizer(path: Path) -> Any:
    """Read a ``tokenizers`` JSON file; raises :class:`CheckpointError`, for a device or a pipe too."""
    from tokenizers import Tokenizer

    try:  # its own reader would wait for a pipe, and Ctrl-C with it
        return Tokenizer.from_str(read_text_file(path))
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read as a tokenizer: {error}") from None


def check_vocabulary(tokenizer: Any, size: int, path: Path) -> None:
    """Raise :class:`CheckpointError` where a tokenizer has ids that the model has no embedding of."""
    last = max(tokenizer.get_vocab().values(), default=-1)
    if last >= size:
        raise CheckpointError(
            f"{path} has ids up to {last}, but the model's vocabulary has {size}; the tokenizer is "
            "another model's"
        )
