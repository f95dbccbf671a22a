"""Notes finished images of a command in two files next to them, from which ``--resume`` goes on.

Nothing here imports torch: what cannot be resumed is refused before the device is opened.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from lantern_accel.errors import RequestError, show
from lantern_accel.files import read_json_file, write_json
from lantern_accel.generation.settings import option_name
from lantern_accel.store import difference

SCHEMA = 3
#: What decides no image, or is compared otherwise.
NO_MATTER = ("device", "options", "text_device", "seed", "batch_size")
#: What of a load is an option of its own.
OWN = ("model", "dtype", "weights")


def asked_of(
    load: Mapping[str, object], settings: Mapping[str, object], share: str | None = None
) -> dict[str, str]:
    """Return what decides a command's images besides prompts and seed, by the options that say it.

    ``load, settings``: keywords of :func:`lantern_accel.load` and of ``generate``.
    """

    def option(name: str) -> str:
        own = "--" if name in OWN else "--use "
        return own + name.replace("_", "-") if name in load else option_name(name)

    given = {**load, **settings}
    found = {option(name): given[name] for name in given if name not in NO_MATTER}
    found["--share"] = share
    return {name: str(value) for name, value in found.items() if value is not None}


class Journal:
    """One run: what it was asked (``run``, JSON), and a line per finished image (``lines``, JSONL).

    ``place``: what its user calls it. ``finished``: lines by the image's number, each with its ``file``
    next to the journal. An image is written whole, then its line, so one with a line is finished.
    """

    def __init__(self, place: Path, run: Path, lines: Path, asked: Mapping[str, str]) -> None:
        """``asked``: see :func:`asked_of`."""
        self.place, self.run, self.lines = place, run, lines
        self.asked = self._theirs = dict(asked)
        self.seed: int | None = None
        self.finished: dict[int, dict[str, object]] = {}

    def read(self) -> bool:
        """Take over a run; returns False where there is none, and raises RequestError for a damaged one.

        The last line may be torn, and an image may have been deleted.
        """
        try:
            found = read_json_file(self.run)
            if found["schema_version"] != SCHEMA:
                raise ValueError
            self._theirs, self.seed = dict(found["asked"]), int(found["seed"])
        except FileNotFoundError:
            return False
        except (OSError, ValueError, KeyError, TypeError):
            raise RequestError(
                f"{self.run} is damaged or of another version; name another with -o"
            ) from None
        with contextlib.suppress(FileNotFoundError):
            for text in self.lines.read_bytes().splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    line = json.loads(text)
                    if (self.run.parent / str(line["file"])).is_file():
                        self.finished[int(line["number"])] = line
        return True

    def check(self, seed: object, rows: Mapping[int, Mapping[str, object]], what: str) -> None:
        """Raise RequestError where the run was asked something else, or a finished image was.

        ``seed``: the one that is asked for now, if any. ``rows``: of each image what its line must say;
        ``what``: the word for one.
        """
        if found := next(self._differences(seed, rows, what), None):
            raise RequestError(f"{self.place} cannot be resumed: {found}; name another with -o")

    def _differences(
        self, seed: object, rows: Mapping[int, Mapping[str, object]], what: str
    ) -> Iterator[str]:
        seeds = {"--seed": self.seed}, {"--seed": self.seed if seed is None else seed}
        if found := difference(self._theirs, self.asked) or difference(*seeds):
            option, was, now = found
            how = f"with {option} {was}, not" if was is not None else f"without {option}, not with"
            yield f"it was made {how} {'without' if now is None else now}"
        for number, line in sorted(self.finished.items()):
            wanted, one = rows.get(number), f"{what} {number + 1}"
            if wanted is None:
                yield f"{one} was {show(line.get('prompt'))}, and is gone"
            elif found := difference({name: line.get(name) for name in wanted}, wanted):
                key, was, now = found
                one = one if key == "prompt" else f"the {key} of {one}"
                yield f"{one} was {show(was)}, is {show(now)} now"

    def begin(self, **facts: object) -> None:
        """Write what is asked, the run's seed, and more that should be known of it."""
        if not self.finished:
            self.lines.unlink(missing_ok=True)
        written = {"schema_version": SCHEMA, "asked": self.asked, "seed": self.seed, **facts}
        write_json(self.run, written)

    def add(self, lines: Mapping[int, Mapping[str, object]]) -> None:
        """Write the lines of images whose files are there, by their numbers."""
        text = b""
        for number, line in lines.items():
            self.finished[number] = made = {"number": number, **line}
            text += json.dumps(made, sort_keys=True).encode() + b"\n"
        if not text:
            return
        with self.lines.open("a+b") as stream:
            if stream.tell():  # a torn line of a process that was killed ends here
                stream.seek(-1, os.SEEK_END)
                text = text if stream.read(1) == b"\n" else b"\n" + text
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
