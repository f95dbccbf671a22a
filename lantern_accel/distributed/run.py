"""Generates a file of prompts into a folder of images, here or on Ray's workers.

The folder holds the images, a journal of those that are finished, and a summary at the end. An image is
written whole, then its line in the journal. So whatever is killed, an image with a line is finished, and
one without is generated again, to the same result.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from lantern_accel.distributed.painter import Batch, Painter
from lantern_accel.errors import RequestError
from lantern_accel.files import digest_of, read_json_file, write_json, write_whole
from lantern_accel.prompts import Item, read_items
from lantern_accel.store import check_same

SCHEMA = 1
#: What the images are: PNG.
SUFFIX = ".png"
RUN, JOURNAL, SUMMARY = "run.json", "journal.jsonl", "summary.json"
#: What tells workers apart but decides no image.
NO_MATTER = ("device", "options", "text_device", "tell", "on_loading")


class Workers(Protocol):
    """What generates: a fleet, or one worker in this process."""

    workers: list[dict[str, Any]]
    lost: list[str]

    def draw(self, items: Sequence[Item]) -> Iterator[Batch]:
        """Generate items; batches come as they are finished."""
        ...


class Here:
    """One worker in this process."""

    def __init__(self, painter: Painter, chunk: int = 8) -> None:
        self.painter, self.chunk = painter, max(chunk, 2 * painter.size)
        self.workers, self.lost = [painter.facts()], list[str]()

    def draw(self, items: Sequence[Item]) -> Iterator[Batch]:
        """Generate items a chunk at a time."""
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
    """Generate every prompt of a file into a folder, and return the summary that is written there too.

    ``make`` opens the workers. ``load, settings``: what they were made with; a run is resumed only with
    the same. Each image depends on its prompt, its random stream and these alone. Raises RequestError
    before anything is generated for what cannot be.
    """
    if settings.get("num_images") not in (None, 1):
        raise RequestError("a file of prompts has one image per row; repeat a row for several")
    matters = {name: str(v) for name, v in load.items() if name not in NO_MATTER and v is not None}
    read_items(prompts, 0)  # all that is wrong with them is reported before the folder is made
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
    left = {item.number: item for item in items if item.number not in folder.finished}
    done = len(items) - len(left)
    facts = {"prompts": str(prompts), "settings": asked["settings"]}
    if not left:
        folder.begin(seed, facts)
        return folder.summarise([], [])
    with make() as workers:
        _agree(workers.workers)
        folder.begin(seed, {**facts, "workers": workers.workers})
        for batch in workers.draw([*left.values()]):
            folder.keep(batch, left)
            done += len(batch.images)
            if on_progress is not None:
                on_progress(min(done, len(items)), len(items))
        return folder.summarise(workers.lost, workers.workers)


def _agree(workers: Sequence[Mapping[str, Any]]) -> None:
    """Raise where workers would generate different images for one seed."""
    for name in ("weights_hash", "dtype", "strategy"):
        found = {str(one[name]) for one in workers}
        if len(found) > 1:
            hint = "; give --dtype float32" if name == "dtype" else "; give all the same model"
            raise RequestError(
                f"the workers differ in their {name.replace('_', ' ')} ({', '.join(sorted(found))}), so "
                f"an image would depend on which worker generates it{hint}"
            )


@dataclass
class Share:
    """What one worker generated in this call."""

    device: str
    images: int = 0
    failed: int = 0
    seconds: float = 0.0
    joules: float | None = 0.0
    tokens: int = 0
    steps: int = 0
    total_variation: float = 0.0

    def figures(self, simulated: bool) -> dict[str, Any]:
        """Return these and their rates; a device in software has no speed."""
        drawn, tokens = self.images, self.tokens
        return {
            **asdict(self),
            "images_per_second": drawn / self.seconds if self.seconds and not simulated else None,
            "tokens_per_step": (tokens - drawn) / self.steps if self.steps else None,
            "total_variation_per_token": self.total_variation / tokens if tokens else None,
            "joules_per_image": self.joules / drawn if self.joules and drawn else None,
            "simulated": simulated,
        }


class RunFolder:
    """Where a run's images go. Raises RequestError for a folder of another run, or of one to resume."""

    def __init__(self, path: Path, asked: Mapping[str, Any], resume: bool) -> None:
        """``asked``: what decides the images, the base seed left out; it must be the same to resume."""
        self.path, self.asked = path, dict(asked)
        self.finished: set[int] = set()
        self.failed: dict[int, str] = {}
        self.devices: dict[str, Share] = {}
        self.seed: int | None = None
        self._began = time.time()
        try:
            path.mkdir(parents=True, exist_ok=True)
            found = read_json_file(path / RUN)
            theirs, seed = dict(found["asked"]), int(found["seed"])
        except FileNotFoundError:
            if any(path.iterdir()):
                raise RequestError(
                    f"{path} holds other files; name a new folder for the images"
                ) from None
            return
        except FileExistsError:
            raise RequestError(f"{path} is a file; name a folder for the images") from None
        except OSError as error:
            raise RequestError(
                f"{path} cannot be used ({error.strerror}); choose another"
            ) from None
        except (ValueError, KeyError, TypeError):
            raise RequestError(f"{path / RUN} is damaged; choose another folder") from None
        if not resume:
            raise RequestError(
                f"{path} holds a run already; --resume continues it, or choose another folder"
            )
        check_same(path, theirs, self.asked, "folder with --output")
        self.seed = seed
        self._read_journal()

    def begin(self, seed: int, facts: Mapping[str, Any]) -> None:
        """Note the run's seed and what its images are generated with."""
        self.seed = seed
        for part in self.path.glob(".lantern-*.part"):  # of a process that was killed
            with contextlib.suppress(OSError):
                part.unlink()
        written = {"schema_version": SCHEMA, "asked": self.asked, "seed": seed, **facts}
        write_json(self.path / RUN, written)

    def _read_journal(self) -> None:
        """Take over what is finished; the last line may be torn."""
        with contextlib.suppress(FileNotFoundError):
            for line in (self.path / JOURNAL).read_bytes().splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    one = json.loads(line)
                    if (self.path / str(one["file"])).is_file():
                        self.finished.add(int(one["number"]))

    def keep(self, batch: Batch, items: Mapping[int, Item]) -> None:
        """Write a batch's images, then their lines, and count them for its device."""
        mine = self.devices.setdefault(batch.worker, Share(batch.device))
        mine.seconds += batch.seconds
        known = mine.joules is not None and batch.joules is not None
        mine.joules = (mine.joules or 0.0) + (batch.joules or 0.0) if known else None
        lines = b""
        for one in batch.images:
            if one.number in self.finished:  # generated twice, since a worker was thought lost
                continue
            if one.error is not None:
                self.failed[one.number] = one.error
                mine.failed += 1
                continue
            name = f"{items[one.number].name}{SUFFIX}"
            write_whole(self.path / name, one.picture)
            line = {
                "number": one.number,
                "file": name,
                "seed": one.seed,
                "tokens_sha256": one.tokens_sha256,
                "steps": one.steps,
                "total_variation": one.price,
                "worker": batch.worker,
                **({} if one.note is None else {"note": one.note}),
            }
            lines += json.dumps(line, sort_keys=True).encode() + b"\n"
            self.finished.add(one.number)
            self.failed.pop(one.number, None)
            mine.images += 1
            mine.tokens += one.tokens
            mine.steps += one.steps
            mine.total_variation += one.price
        if lines:
            with (self.path / JOURNAL).open("a+b") as stream:
                if stream.tell():  # a torn line of a process that was killed ends here
                    stream.seek(-1, os.SEEK_END)
                    lines = lines if stream.read(1) == b"\n" else b"\n" + lines
                stream.write(lines)
                stream.flush()
                os.fsync(stream.fileno())

    def summarise(
        self, lost: Sequence[str], workers: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Write and return the summary: images, throughput per worker, and what was lost."""
        simulated = {str(one["worker"]) for one in workers if one["simulated"]}
        summary = {
            "schema_version": SCHEMA,
            "images": len(self.finished),
            "failed": {str(n): text for n, text in sorted(self.failed.items())},
            "seed": self.seed,
            "seconds_of_this_call": time.time() - self._began,
            "workers_of_this_call": {
                name: mine.figures(name in simulated) for name, mine in sorted(self.devices.items())
            },
            "lost_workers": list(lost),
        }
        write_json(self.path / SUMMARY, summary)
        return summary
