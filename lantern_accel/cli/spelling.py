"""Answers the old name of an option with the new one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lantern_accel.errors import RequestError

#: Old names and new ones; a command without the new one does not know the old one either.
RENAMED = {
    "--batch-size": "--batch",
    "--batches": "--batch",
    "--strategies": "--strategy",
    "--cfg": "--cfg-scale",
    "--guidance": "--cfg-scale",
    "--guidance-scale": "--cfg-scale",
    "--budget": "--max-seconds",
}
#: Where ``--json`` wrote a file once: the option that writes it now.
FILES = ("--stats", "--output")


@contextmanager
def answering(command: Any, args: Sequence[str]) -> Iterator[None]:
    """Raise RequestError with the new name where the block's parser meets an old one.

    ``command``: the command that is parsed, with its parameters; ``args``: its words.
    """
    known = {name for one in command.params for name in one.opts}
    _check_json(known, args)
    try:
        yield
    except Exception as error:
        old = str(getattr(error, "option_name", ""))
        new = RENAMED.get(old)
        if type(error).__name__ != "NoSuchOption" or new not in known:
            raise
        raise RequestError(f"{old} is now {new}; write {new} in its place") from None


def _check_json(known: set[str], args: Sequence[str]) -> None:
    """Refuse ``--json FILE``: ``--json`` is a flag, and the word after it would be another thing."""
    at = next((at for at, word in enumerate(args) if word.partition("=")[0] == "--json"), None)
    file = next((name for name in FILES if name in known), None)
    if at is None or "--json" not in known or file is None:
        return
    _, sign, value = args[at].partition("=")
    after = value if sign else next(iter(args[at + 1 : at + 2]), "")
    if sign or after == "-" or after.lower().endswith(".json"):
        wanted = "--json alone" if after in ("-", "") else f"{file} {after}"
        raise RequestError(f"--json is now a flag that prints JSON; write {wanted} in its place")
