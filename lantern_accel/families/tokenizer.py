"""Tokenizers of several families: their files read, held to the model's vocabulary, and their prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lantern_accel.errors import CheckpointError
from lantern_accel.families.prompts import left_pad
from lantern_accel.files import read_json_file, read_text_file


def read_tokenizer(path: Path) -> Any:
    """Read a ``tokenizers`` JSON file; raises :class:`CheckpointError`, for a device or a pipe too.

    A word that no vocabulary has is tried, since some files fail at such a word only.
    """
    from tokenizers import Tokenizer

    try:  # its own reader would wait for a pipe, and Ctrl-C with it
        tokenizer = Tokenizer.from_str(read_text_file(path))
        tokenizer.encode("zqxjkv \u2603")
        return tokenizer
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read as a tokenizer: {error}") from None


def read_vocabulary(path: Path, use: str) -> Mapping[str, int]:
    """Return the ids of a tokenizer's JSON file by name, without ``tokenizers``.

    ``use``: the file to take in place of one that cannot be read, for :class:`CheckpointError`.
    """
    try:
        content = read_json_file(path)
        vocabulary = content["model"]["vocab"]
        known = dict(vocabulary) if isinstance(vocabulary, dict) else {}
        return known | {t["content"]: t["id"] for t in content.get("added_tokens", [])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a tokenizer ({type(error).__name__}: {error}); use {use}"
        ) from None


def check_vocabulary(tokenizer: Any, size: int, path: Path) -> None:
    """Raise :class:`CheckpointError` where a tokenizer has ids that the model has no embedding of."""
    last = max(tokenizer.get_vocab().values(), default=-1)
    if last >= size:
        raise CheckpointError(
            f"{path} has ids up to {last}, but the model's vocabulary has {size}; the tokenizer is "
            "another model's"
        )


class PromptText(ABC):
    """The tokenizer of one model: prompts to token ids; on the host, some megabytes.

    ``manifest`` has ``pad``, the id that pads prompts, and ``grid``.
    """

    def __init__(self, path: Path, manifest: Any) -> None:
        self.tokenizer = read_tokenizer(path)
        check_vocabulary(self.tokenizer, manifest.target.token_count, path)
        self.manifest, self.path = manifest, path

    @abstractmethod
    def prompts(self, texts: Sequence[str], rows: int, columns: int) -> list[list[int]]:
        """Return the ids of each prompt for a picture of ``rows x columns`` tokens."""

    def encode(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return ids ``[n, longest]``, left-padded, and their mask, for the default picture size."""
        ids = self.prompts(prompts, *self.manifest.grid(None))
        return left_pad(ids, max(len(row) for row in ids), self.manifest.pad)

    def release(self) -> None:  # noqa: B027, for encoders on a device
        """Do nothing: there is nothing on the device."""
