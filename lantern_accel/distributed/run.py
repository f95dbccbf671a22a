"""Draws a file of prompts into a folder of images, here or on Ray's workers."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from lantern_accel.distributed.folder import SUFFIX, RunFolder
from lantern_accel.distributed.painter import Batch, Painter
from lantern_accel.distributed.prompts import Item, read_items
from lantern_accel.errors import RequestError
from lantern_accel.files import digest_of

#: What tells workers apart but decides no image.
NO_MATTER = ("device", "options", "text_device", "tell", "on_loading")


class Workers(Protocol):
    """What draws: a fleet, or one worker in this process."""

    workers: list[dict[str, Any]]
    lost: list[str]

    def draw(self, items: Sequence[Item]) -> Iterator[Batch]:
        """Draw items; batches come as they are finished."""
        ...


class Here:
    """One worker in this process."""

    def __init__(self, painter: Painter, chunk: int = 8) -> None:
        self.painter, self.chunk = painter, max(chunk, 2 * painter.size)
        self.workers, self.lost = [painter.facts()], list[str]()

    def draw(self, items: Sequence[Item]) -> Iterator[Batch]:
        """Draw items a chunk at a time."""
        for at in range(0, len(items), self.chunk):
            yield self.painter.draw(items[at : at + self.chunk])

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *exc: object) -> None:
        self.painter.close()


def draw_file(
    prompts: Path,
    output: Path,
    make: Callable[[], AbstractContextManager[Workers]],
    load: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    resume: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Draw every prompt of a file into a folder, and return the summary that is written there too.

    ``make`` opens the workers. ``load, settings``: what they were made with; a run is resumed only with
    the same. Each image depends on its prompt, its random stream and these alone. Raises RequestError
    before anything is drawn for what cannot be.
    """
    if settings.get("num_images") not in (None, 1):
        raise RequestError("a file of prompts has one image per row; repeat a row for several")
    matters = {name: str(v) for name, v in load.items() if name not in NO_MATTER and v is not None}
    read_items(prompts, 0)  # all that is wrong with them is told before the folder is made
    asked = {
        "prompts": digest_of([prompts]),
        "settings": {k: str(v) for k, v in settings.items() if v is not None},
        "load": matters,
        "suffix": SUFFIX,
    }
    folder = RunFolder(output, asked, resume)
    given = settings.get("seed")
    seed = folder.seed
    if seed is None:
        seed = secrets.randbits(31) if given is None else int(given)
    items = read_items(prompts, seed)
    left = folder.left(items)
    by_number = {item.number: item for item in left}
    done = len(items) - len(left)
    if not left:
        folder.begin(seed, {"prompts": str(prompts), "settings": asked["settings"]})
        return folder.summarise([], [])
    with make() as workers:
        _agree(workers.workers)
        facts = {"workers": workers.workers, "prompts": str(prompts), "settings": asked["settings"]}
        folder.begin(seed, facts)
        for batch in workers.draw(left):
            folder.keep(batch, by_number)
            done += len(batch.images)
            if on_progress is not None:
                on_progress(min(done, len(items)), len(items))
        return folder.summarise(workers.lost, workers.workers)


def _agree(workers: Sequence[Mapping[str, Any]]) -> None:
    """Raise where workers would draw different images for one seed."""
    for name in ("weights_hash", "dtype", "strategy"):
        found = {str(one[name]) for one in workers}
        if len(found) > 1:
            hint = "; give --dtype float32" if name == "dtype" else "; give all the same model"
            raise RequestError(
                f"the workers differ in their {name.replace('_', ' ')} ({', '.join(sorted(found))}), so "
                f"an image would depend on who draws it{hint}"
            )
