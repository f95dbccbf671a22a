"""The images of one command: checked before work, written as they are made, resumed after a stop."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_accel.errors import RequestError
from lantern_accel.files import check_target, write_whole
from lantern_accel.generation.journal import Journal
from lantern_accel.generation.result import (
    GenerationResult,
    image_format,
    image_grid,
    number_path,
    save_image,
)

if TYPE_CHECKING:
    from PIL.Image import Image


def free_name(count: int, stem: str = "lantern", suffix: str = ".png") -> Path:
    """Return the first of ``lantern.png``, ``lantern-a.png``, ... under which no image lies yet."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    names = (f"{stem}{suffix}", *(f"{stem}-{a}{suffix}" for a in letters))
    for name in (*names, *(f"{stem}-{a}{b}{suffix}" for a in letters for b in letters)):
        if not any(number_path(Path(name), i, count).exists() for i in range(count)):
            return Path(name)
    raise RequestError(f"every name from {stem}{suffix} on is taken; name an image with -o")


def check_files(
    output: Path, figures: Path | None, count: int, *, overwrite: bool, resume: bool
) -> None:
    """Raise before any work where a file could not be written, or two would be the same.

    Without ``overwrite`` images that are there already are kept, and refused by name; ``resume`` goes
    on with those of an interrupted command.
    """
    if not output.suffix:
        raise RequestError(f"{output} has no image format; name it .png, .jpg or .webp")
    image_format(output)
    files = [number_path(output, index, count) for index in range(count)]
    for path in (files[0], files[-1], *([figures] if figures else [])):
        check_target(path)
    if figures is not None and figures.resolve() in {path.resolve() for path in files}:
        raise RequestError(f"--stats and --output both name {figures}; choose two files")
    kept = next((path for path in files if path.is_file()), None)
    if kept is not None and not (overwrite or resume):
        raise RequestError(
            f"{kept} is there already; name another image with -o, add --overwrite to replace it, or "
            "--resume to complete what this command left out"
        )


class OutputImages:
    """Where a command's images go: ``each`` into a file of its own, or one file at the end.

    Where a command generates several files, a journal next to them (``.NAME.lantern.json``, ``.jsonl``)
    says which are finished, and with which seed, until all are.
    """

    def __init__(
        self,
        output: Path,
        prompts: Sequence[str | int],
        columns: int,
        each: bool,
        asked: Mapping[str, Any],
        metadata: bool = True,
    ) -> None:
        """``columns``: images per prompt. ``asked``: see :class:`~.journal.Journal`."""
        self.output, self.prompts, self.columns = output, prompts, columns
        self.count, self.each, self.metadata = len(prompts) * columns, each, metadata
        self.images: dict[int, Image] = {}
        self.written: list[Path] = []
        notes = output.with_name(f".{output.name[:200]}.lantern.json")
        #: Where the tokens of an image under way are kept.
        self.unfinished = notes.with_suffix(".tokens")
        self.journal = Journal(output, notes, notes.with_suffix(".jsonl"), asked)

    def resume(self, seed: object, overwrite: bool) -> None:
        """Go on with what an interrupted command left; raises :class:`RequestError` for another one's."""
        if not self.each:
            raise RequestError("--resume continues single images; leave --grid out")
        if self.journal.read():
            rows = {n: self._row(n) for n in range(self.count)}
            return self.journal.check(seed, rows, "image")
        from lantern_accel.generation.unfinished import seed_in  # which imports torch

        self.journal.seed = seed_in(self.unfinished)
        kept = next((p for p in map(self._file, range(self.count)) if p.is_file()), None)
        if kept is not None and not (overwrite or self.unfinished.is_file()):
            raise RequestError(
                f"{kept} is there already, and nothing says that this command left it; name another "
                "image with -o, or add --overwrite to replace it"
            )

    def _row(self, index: int) -> dict[str, object]:
        return {"prompt": self.prompts[index // self.columns], "file": self._file(index).name}

    def _file(self, index: int) -> Path:
        return number_path(self.output, index, self.count)

    def add(self, index: int, image: Image) -> None:
        """Write an image that is done, or keep it for the one file."""
        if not self.each:
            self.images[index] = image
            return
        if self.count > 1 and not self.journal.finished:
            self.journal.begin()  # before the first image, which would be another command's without
        self._write(index, image)
        if self.count > 1:
            self.journal.add({index: self._row(index)})

    def _write(self, index: int, image: Image) -> None:
        save_image(image, self._file(index), self.metadata)
        self.written.append(self._file(index))

    def write_grid(self, columns: int) -> None:
        """Write all images into one file, ``columns`` in a row under their prompt and seed."""
        images = [self.images[i] for i in sorted(self.images)]
        of = [one.info for one in images[::columns]]
        labels = [f"{about['prompt']}, seed {about['seed']}" for about in of if "prompt" in about]
        whole = image_grid(images, columns, labels)
        save_image(whole, self.output, self.metadata)
        self.written.append(self.output)

    def write_tokens(self, result: GenerationResult) -> None:
        """Write the tokens of a result without images, ``tokens [n, N]``, into a safetensors file."""
        from safetensors.torch import save

        path = self.output.with_suffix(".safetensors")
        write_whole(path, save({"tokens": result.tokens}))
        self.written.append(path)

    def keep(self) -> list[Path]:
        """Write what is finished and waits for the one file as files of its own; return all files."""
        for index, image in self.images.items():
            self._write(index, image)
        self.images.clear()
        return [*self.written, *([self.unfinished] if self.unfinished.is_file() else [])]

    def discard_notes(self) -> None:
        """Forget the notes: nothing is left to generate."""
        with contextlib.suppress(OSError):
            self.journal.run.unlink(missing_ok=True)
            self.journal.lines.unlink(missing_ok=True)
