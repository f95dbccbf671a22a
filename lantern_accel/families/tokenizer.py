"""Tokenizers and prompts of token ids: read, held to the model's vocabulary, and put side by side."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Generic

import torch
from torch import Tensor

from lantern_accel.errors import CheckpointError, RequestError, show
from lantern_accel.families.base import TextSource
from lantern_accel.families.controls import Controls
from lantern_accel.families.manifest import TokenManifestT
from lantern_accel.files import read_json_file, read_text_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Prompts are padded to multiples of this, so that few lengths need buffers and a capture of their own.
BUCKET = 64
#: Prompts that every model of text can generate, for measuring.
CAPTIONS = (
    "a red fox in the snow",
    "a bowl of ripe apricots on a wooden table",
    "an old lighthouse at dusk",
    "a steam train crossing a viaduct",
    "a portrait of a woman in a green coat",
    "a street market in the rain",
    "a glass of water with a slice of lemon",
    "a hot-air balloon above vineyards",
)


def bucket(length: int) -> int:
    """Return the prompt length that buffers are made for: the next multiple of :data:`BUCKET`."""
    return -(-length // BUCKET) * BUCKET


def left_pad(rows: Sequence[Sequence[int]], length: int, pad: int) -> tuple[Tensor, Tensor]:
    """Right-align prompts in ``length`` positions: ids int64 ``[R, length]``, mask bool of tokens."""
    longest = max(len(row) for row in rows)
    if longest > length:
        raise RequestError(
            f"a prompt has {longest} tokens, the buffers hold {length}; shorten the prompt"
        )
    ids = torch.tensor([[pad] * (length - len(row)) + list(row) for row in rows])
    start = torch.tensor([length - len(row) for row in rows])
    return ids, torch.arange(length) >= start.unsqueeze(1)


def check_texts(prompts: Sequence[str | int], name: str) -> list[str]:
    """Return prompts that are all text; raises :class:`RequestError` for a class id."""
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise RequestError(
                f"the model {name!r} takes text, and the prompt {show(prompt)} is a number; describe "
                "an image in words, such as 'red heart'"
            )
    return [str(prompt) for prompt in prompts]


def read_tokenizer(path: Path) -> Tokenizer:
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
        known |= {t["content"]: t["id"] for t in content.get("added_tokens", [])}
        wrong = next((i for i in known.values() if not isinstance(i, int) or i < 0), None)
        if wrong is not None:
            raise ValueError(f"{show(wrong)} is not an id")
        return known
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a tokenizer ({type(error).__name__}: {error}); use {use}"
        ) from None


def check_vocabulary(tokenizer: Tokenizer, size: int, path: Path) -> None:
    """Raise :class:`CheckpointError` where a tokenizer has ids that the model has no embedding of."""
    last = max(tokenizer.get_vocab().values(), default=-1)
    if last >= size:
        raise CheckpointError(
            f"{path} has ids up to {last}, but the model's vocabulary has {size}; the tokenizer is "
            "another model's"
        )


class PromptText(TextSource, ABC, Generic[TokenManifestT]):
    """The tokenizer of one model: prompts to token ids; on the host, some megabytes."""

    #: What makes a tokenizer of a file.
    read = staticmethod(read_tokenizer)

    def __init__(self, path: Path, manifest: TokenManifestT) -> None:
        self.tokenizer = self.read(path)
        check_vocabulary(self.tokenizer, manifest.target.token_count, path)
        self.manifest, self.path = manifest, path
        for name, wanted in self.get_token_ids().items():
            if (found := self.tokenizer.token_to_id(name)) != wanted:
                raise CheckpointError(
                    f"{path} has {name} at {found}, and the model at {wanted}; use the tokenizer that "
                    "comes with the model"
                )
        self.controls = Controls(self.tokenizer, self.marks())

    def get_token_ids(self) -> Mapping[str, int]:
        """Return the ids that the model has for tokens of these names."""
        return {}

    def marks(self) -> Sequence[str]:
        """Return strings that prompts are built of, whether or not they are tokens of their own."""
        return ()

    def words(self, text: str) -> list[int]:
        """Return the ids of a text alone, without what begins or ends it."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    @abstractmethod
    def prompts(self, texts: Sequence[str], rows: int, columns: int) -> list[list[int]]:
        """Return the ids of each prompt for an image of ``rows x columns`` tokens."""

    def ids(self, texts: Sequence[str], rows: int, columns: int) -> list[list[int]]:
        """Return :meth:`prompts`; raises :class:`RequestError` for a text with a control string."""
        self.controls.check(texts)
        return self.prompts(texts, rows, columns)

    def encode(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return ids ``[n, longest]``, left-padded, and their mask, for the default image size."""
        ids = self.ids(prompts, *self.manifest.grid(None))
        return left_pad(ids, max(len(row) for row in ids), self.manifest.ids.pad)
