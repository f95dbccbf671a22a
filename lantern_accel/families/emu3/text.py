"""Emu3's vocabulary and prompts, and the reader of its ``emu3.tiktoken``.

Source: baaivision/Emu3 f6ea9aa (``tokenization_emu3.py``, ``processing_emu3.py``) and baaivision/Emu3.5
8fcf1da. Words are Qwen's byte pairs. 208 special tokens follow them, then the names of a file,
``emu3_vision_tokens.txt``: what frames an image, and its codes. So every id that means something stands
at a fixed distance from that of code 0. The official tokenizer reads special strings within a user's text
too; here such a text is refused.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from lantern_accel.errors import CheckpointError
from lantern_accel.families.manifest import TokenIds
from lantern_accel.families.tokenizer import read_tokenizer
from lantern_accel.files import read_text_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Variant = Literal["emu3", "emu3.5"]
#: The byte pairs of a release, and the names of its image's tokens, which lie next to them.
WORDS, VISION = "emu3.tiktoken", "emu3_vision_tokens.txt"
#: Special tokens behind the byte pairs, in order.
SPECIALS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)),
)  # fmt: skip
FRAME = ("<|image token|>", "<|image start|>", "<|image end|>")
#: How the names of codes begin; the number has six digits.
CODE = "<|visual token "
#: How far before code 0 each token lies.
BEFORE = {
    "pad": 211, "begin": 108, "row_end": 8, "frame_end": 7, "bos": 5, "eos": 4, "image": 3,
    "image_start": 2, "image_end": 1,
}  # fmt: skip
#: Qwen's: every digit is a word of its own.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
BOS, BEGIN = "<|extra_203|>", "<|extra_100|>"
#: What stands around a user's text, and around none. Emu3.5's two are different prompts.
PROMPTS: dict[Variant, tuple[str, str]] = {
    "emu3": (BOS, ""),
    "emu3.5": (f"{BOS}You are a helpful assistant for t2i task. USER: ", f" ASSISTANT: {BEGIN}"),
}
UNCONDITIONAL: dict[Variant, str] = {
    "emu3": BOS,
    "emu3.5": f"{BOS}You are a helpful assistant. USER:  ASSISTANT: {BEGIN}",
}


class Emu3Ids(TokenIds):
    """Ids of the tokens that mean something; the defaults are the released vocabulary's.

    ``begin``: where Emu3.5 begins a step of its answer. ``image``: behind the size, before code 0.
    """

    pad: int = Field(151643, ge=0)
    begin: int = Field(151746, ge=0)
    row_end: int = Field(151846, ge=0)
    frame_end: int = Field(151847, ge=0)
    bos: int = Field(151849, ge=0)
    eos: int = Field(151850, ge=0)
    image: int = Field(151851, ge=0)
    image_start: int = Field(151852, ge=0)
    image_end: int = Field(151853, ge=0)
    first: int = Field(151854, ge=211, description="code 0")

    @classmethod
    def before(cls, first: int) -> Emu3Ids:
        """Return the ids of a vocabulary whose code 0 is the id ``first``."""
        return cls(first=first, **{name: first - back for name, back in BEFORE.items()})


def image_prefix(rows: int, columns: int) -> str:
    """Return what stands between a prompt and the first code: the size in tokens, the height first."""
    return f"{FRAME[1]}{rows}*{columns}{FRAME[0]}"


def _byte_letters() -> list[str]:
    """Return the letter that stands for each byte in a vocabulary of byte pairs."""
    plain = [*range(ord("!"), 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in set(plain))
    letters = {byte: chr(byte) for byte in plain}
    letters |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read a tiktoken file: words with their ids, 0 and up; raises :class:`CheckpointError`."""
    try:
        lines = (line.split() for line in read_text_file(path).splitlines() if line.strip())
        ranks = {base64.b64decode(word, validate=True): int(rank) for word, rank in lines}
    except (OSError, ValueError, binascii.Error) as error:
        raise CheckpointError(
            f"{path} cannot be read as words in base64 with their ids ({error}); fetch it again"
        ) from None
    alone = (bytes([byte]) not in ranks for byte in range(256))
    if sorted(ranks.values()) != list(range(len(ranks))) or any(alone):
        raise CheckpointError(
            f"{path} lacks words: ids are not 0 to {len(ranks) - 1}, or a byte has none; fetch it again"
        )
    return ranks


def vision_tokens(folder: Path) -> list[str]:
    """Return the names that follow the special tokens; raises :class:`CheckpointError` for others."""
    path = folder / VISION
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has {WORDS} and lacks {VISION}, the names of the image's tokens; fetch it from "
            "the model's repository"
        )
    names = [line.strip() for line in read_text_file(path).splitlines() if line.strip()]
    codes = [f"{CODE}{i:06d}|>" for i in range(len(names) - len(FRAME))]
    if names != [*FRAME, *codes] or not codes:
        raise CheckpointError(
            f"{path} does not name {', '.join(FRAME)} and then the codes in order; fetch it again"
        )
    return names


def tiktoken_tokenizer(path: Path) -> Tokenizer:
    """Return a tokenizer of ``emu3.tiktoken``, without codes; raises :class:`CheckpointError`.

    Two neighbours of which the whole is a word become it, the lowest id first: the rule of tiktoken.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

    ranks = read_ranks(path)
    vision_tokens(path.parent)
    letters = _byte_letters()
    names = {word: "".join(letters[byte] for byte in word) for word in ranks}
    merges: list[tuple[str, str]] = []
    for word in sorted(ranks, key=ranks.__getitem__):
        halves = ((word[:at], word[at:]) for at in range(1, len(word)))
        known = sorted((ranks[a], ranks[b], a, b) for a, b in halves if a in ranks and b in ranks)
        merges += [(names[a], names[b]) for _, _, a, b in known]
    vocabulary = {names[word]: rank for word, rank in ranks.items()}
    made = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.add_special_tokens([AddedToken(one, normalized=False) for one in (*SPECIALS, *FRAME)])
    return made


def read_either(path: Path) -> Tokenizer:
    """Read the tokenizer of either layout: byte pairs of tiktoken, or ``tokenizers``' own JSON."""
    return tiktoken_tokenizer(path) if path.name == WORDS else read_tokenizer(path)
