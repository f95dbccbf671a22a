"""Errors that a user can act on: one sentence on what was wrong, one on the way out."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

#: What the commands exit with, and what each code says; docs/troubleshooting.md has this table.
EXIT_CODES = {
    0: "done",
    1: "a check failed: `conform`, `models check` or `models plan`",
    2: "invalid request: an option, a name, a value, or a file that cannot be used",
    3: "internal error of lantern_accel; the traceback is saved",
    4: "the device is not available, was lost, or failed",
    5: "not enough memory or disk space",
    6: "a missing file cannot be downloaded",
    130: "interrupted with Ctrl-C",
    143: "ended by SIGTERM",
}


class Ended(BaseException):
    """SIGTERM: ends a command like Ctrl-C. It is not a KeyboardInterrupt, which typer replaces."""


class LanternError(Exception):
    """Base of all expected errors; the command line prints it without a traceback.

    ``exit_code``: what the command then exits with, one of :data:`EXIT_CODES`. ``field``: the setting of
    :func:`~lantern_accel.generate` that is wrong, by its name there; None where it is none.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, message: str = "", *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class BackendError(LanternError):
    """A backend is not available, failed to load, or failed in one of its hooks."""

    exit_code = 4


class DeviceRequestError(BackendError):
    """A requested device, dtype, option or check is unknown."""

    exit_code = 2


class DeviceLostError(BackendError):
    """A device stopped working while it was in use; this process cannot use it again.

    ``images`` holds what was finished before (PIL images, the first of the request).
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.images: list[Any] = []


class NotCapturableError(BackendError):
    """A step cannot be captured on its device; it runs without capture."""


class DoesNotFitError(BackendError):
    """A request needs more than the device's free memory; a smaller one may fit."""

    exit_code = 5


class DeviceMemoryError(BackendError):
    """A device ran out of memory while it was in use."""

    exit_code = 5


class ModelError(LanternError):
    """A model name is unknown or a checkpoint cannot be used."""


class FetchError(ModelError):
    """A published file is missing and cannot be downloaded."""

    exit_code = 6


class CheckpointError(ModelError):
    """A checkpoint file is truncated, of another architecture, or disagrees with its config."""


class StrategyError(LanternError):
    """A strategy, tree, acceptance rule or sampling setting is out of range."""


class RequestError(LanternError):
    """A generation request is empty, malformed or cannot be served by the model."""


class NotFiniteError(LanternError):
    """A forward pass gave NaN or infinite logits, so no token was sampled.

    ``row``: of the batch, from 0. ``step``: 0 is the prefill. ``dtype``: what was computed in.
    """

    def __init__(self, row: int, step: int, dtype: str, image: int | None = None) -> None:
        named = f"row {row} of the batch" if image is None else f"image {image} (row {row})"
        when = "in the prefill" if step == 0 else f"at step {step}"
        wider = "" if dtype == "float32" else "; --dtype float32 may hold them"
        super().__init__(
            f"the logits of {named} are not finite {when}, computed in {dtype}, so no token was sampled "
            f"from them: the weights are damaged, or their values overflow{wider}"
        )
        self.row, self.step, self.dtype = row, step, dtype


class DataError(LanternError):
    """Training data cannot be had, is damaged, or does not fit the configuration."""


class DiskFullError(LanternError):
    """What was made cannot be kept: the disk is full, or a quota is used up."""

    exit_code = 5


class LanternWarning(UserWarning):
    """Something was adjusted to keep going, such as a prompt that was cut to the prefix length."""


@contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """Collect what warnings of the block say, each once, in place of showing them."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LanternWarning)
        yield found
        found += dict.fromkeys(str(one.message) for one in caught)


def show(value: object, most: int = 80) -> str:
    """Return a value for a message: short, and never an error of its own.

    Python writes no integer of thousands of digits, and some objects cannot be written at all.
    """
    try:
        text = repr(value)
    except Exception:  # whatever a stranger's __repr__ raises
        text = f"a value that cannot be shown ({type(value).__name__})"
    return text if len(text) <= most else f"{text[:most]}..."


def half_pair(text: str) -> bool:
    """Return whether half a surrogate pair is in a string, which then is not text and has no UTF-8."""
    return any("\ud800" <= sign <= "\udfff" for sign in text)


#: What other programs call something here.
_MEANT = {"plain": "vanilla", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return ``'; did you mean a, b?'`` for the choices nearest to ``word``, else all of them."""
    names = sorted(choices)
    near = difflib.get_close_matches(_MEANT.get(word, word[:80].lower()), names, n=3, cutoff=0.6)
    if near:
        return f"; did you mean {', '.join(near)}?"
    return f"; known: {', '.join(names)}" if names else ""


#: What is said of a value outside its bounds, by pydantic's names of what is wrong.
_BOUNDS = {
    "greater_than_equal": "must be {} or more",
    "greater_than": "must be above {}",
    "less_than_equal": "must be {} or less",
    "less_than": "must be below {}",
}

#: What a value should be, by the first word of pydantic's names of what cannot be read.
_TAKES = {"int": "an integer", "float": "a number", "bool": "true or false"}
#: What is said of a name, by pydantic's names of what is wrong with it.
_NAMES = {"missing": " is missing", "extra": " is not a known field"}


def what_is_wrong(first: Mapping[str, object], value: str | None = None) -> str:
    """Say what is wrong, behind a field's name, from a pydantic error; ``value``: how it is shown."""
    kind, message, context = str(first["type"]), str(first["msg"]), first.get("ctx")
    word = kind.partition("_")[0]
    if kind == "value_error":
        return f": {message.removeprefix('Value error, ')}"
    if word in _NAMES:
        return _NAMES[word]
    text = message.replace("Input should", "must", 1)
    if kind in _BOUNDS and isinstance(context, Mapping):
        text = _BOUNDS[kind].format(plain(next(iter(context.values()))))
    elif word in _TAKES:
        text = f"takes {_TAKES[word]}"
    return f" {text}, not {value or show(first['input'])}"


def plain(number: float) -> str:
    """Return a number as people write it: a whole one with all of its digits."""
    return str(int(number)) if number == number // 1 else f"{number:g}"
