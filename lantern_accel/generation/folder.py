"""Generates a file of prompts into a folder of images, one per row.

The folder holds the images, a journal of finished images, and a summary at the end. An image
without a line in the journal is generated again, to the same result.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lantern_accel.device.context import inference
from lantern_accel.errors import (
    LanternWarning,
    NotFiniteError,
    RequestError,
    collect_warnings,
    show,
)
from lantern_accel.families.base import Conditions
from lantern_accel.files import check_name, write_json, write_whole
from lantern_accel.generation.batch import Done, Failure, MakeImages, image_maker, joined_batch
from lantern_accel.generation.journal import SCHEMA, Journal, asked_of
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.generation.request import ImageJob
from lantern_accel.generation.result import loss_of, png_bytes, tokens_sha256
from lantern_accel.generation.settings import read_settings
from lantern_accel.prompts import Item, read_items

RUN, JOURNAL, SUMMARY = "run.json", "journal.jsonl", "summary.json"
LOCK = ".lantern.lock"
#: A row with its PNG, and what its line of the journal says of it; or, without a PNG, its ``error``.
MadeItem = tuple[Item, bytes, dict[str, Any]]
#: Images that are written together, at least: what is generated again where the process is killed.
CHUNK = 8


def row_of(item: Item) -> dict[str, object]:
    """Return what a journal says of an item's row, and a run that goes on must find again."""
    return {
        "prompt": item.prompt,
        "file": f"{item.name}.png",
        "seed": item.seed,
        "image": item.index,
    }


@dataclass(eq=False, kw_only=True)
class FolderImage(ImageJob):
    """An item of a folder, what its prompt became, and what was said of the prompt."""

    item: Item
    conditions: Conditions
    note: str


class FolderImages:
    """Generates items with one strategy; every image depends on its prompt and random stream alone.

    ``settings``: of ``generate``; its batch size is the images decoded together, None for as many
    as is usual.
    """

    def __init__(self, pipeline: Pipeline, settings: Mapping[str, object]) -> None:
        self.pipeline = pipeline
        self.size = read_settings(settings).batch_size or pipeline.backend.preferences.default_batch
        # Settings are checked here once; prompts are checked one by one.
        example = pipeline.model.family.examples(pipeline.model.manifest)[0]
        batch = {"batch_size": self.size, "num_images": self.size}
        self.request = pipeline.request(example, **{**settings, **batch, "seed": 0})

    def facts(self) -> dict[str, object]:
        """Return the device, dtype and model, and what else decides the images besides prompts."""
        pipeline, strategy = self.pipeline, self.request.strategy
        return {
            "device": f"{pipeline.backend.device} ({pipeline.backend.facts().name})",
            "simulated": pipeline.backend.simulated,
            "dtype": str(pipeline.dtype).removeprefix("torch."),
            "model": pipeline.model.manifest.name,
            "weights_hash": pipeline.model.weights_hash,
            "strategy": strategy.name,
            "relaxed": strategy.acceptance.relaxed,
            "slots": self.size,
        }

    def generate(self, items: Sequence[Item]) -> list[MadeItem]:
        """Generate items; a prompt that the model cannot take comes back with its error."""
        found: list[MadeItem] = []
        request, shapes = self.request, dict[Hashable, list[FolderImage]]()
        with inference(self.pipeline.backend):
            for item in items:
                try:
                    with collect_warnings() as notes:
                        made = self.pipeline.runtime.conditions(
                            [item.prompt], request.size, request.negative_prompt
                        )
                except RequestError as error:
                    found.append((item, b"", {"error": str(error)}))
                    continue
                note = "; ".join(notes)
                image = FolderImage(
                    item.number, item.prompt, item.seed, item.index,
                    item=item, conditions=made, note=note,
                )  # fmt: skip
                shapes.setdefault(made.shape, []).append(image)
                if notes:
                    warnings.warn(note, LanternWarning, stacklevel=2)
            for group in shapes.values():
                found += self._group(group)
        return found

    def _group(self, left: list[FolderImage]) -> list[MadeItem]:
        """Generate images of one shape."""
        found: list[MadeItem] = []
        runtime, request = self.pipeline.runtime, self.request
        captured = self.pipeline.backend.support("capture")  # at the usual size
        size = self.size if captured else min(self.size, len(left))
        first, rounding = left[0].conditions, loss_of(self.pipeline.model.rounding)
        make_images: MakeImages[FolderImage] = image_maker(runtime, first.shape)
        _, batch = joined_batch(
            runtime, request.strategy, request.sampling, first, size, size, make_images=make_images
        )
        while left or batch.images:
            while left and batch.joinable:
                one = left.pop(0)
                batch.join(one, runtime.rows_of(request, one.conditions, [0]))
            for event in batch.advance():
                if isinstance(event, Failure):
                    if not isinstance(event.error, NotFiniteError):
                        raise event.error
                    found.append((event.images[0].item, b"", {"error": str(event.error)}))
                elif isinstance(event, Done):
                    found.append(_encode(event, rounding))
        return found


def _encode(done: Done[FolderImage], weights: float) -> MadeItem:
    """Return a complete image as PNG, with what the journal says of it.

    ``weights``: the total variation per token that quantized weights cost.
    """
    one, decoded = done.images[0], done.decoded
    tokens = decoded.tokens.numel()
    line: dict[str, object] = {
        "tokens_sha256": tokens_sha256(decoded.tokens),
        "tokens": tokens,
        "steps": int(decoded.steps.sum()),
        "total_variation_per_token": float(decoded.quality_loss.sum()) / tokens + weights,
    }
    return one.item, png_bytes(done.rendered[0]), line | ({"note": one.note} if one.note else {})


def read_share(text: str) -> tuple[int, int]:
    """Read ``K/N``, the K-th of N shares; raises RequestError."""
    found = re.fullmatch("([0-9]{1,6})/([0-9]{1,6})", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise RequestError(f"the share {show(text)} cannot be read; write K/N, such as 1/8 to 8/8")
    return int(found[1]), int(found[2])


def generate_file(
    prompts: Path,
    output: Path,
    opened: Callable[[], AbstractContextManager[Pipeline]],
    load: Mapping[str, object],
    settings: Mapping[str, Any],
    *,
    share: str = "1/1",
    resume: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Generate the prompts of a file into a folder, and return the summary that is written there too.

    ``opened`` gives the pipeline. ``load, settings``: keywords of ``load`` and of ``generate``;
    a run is resumed only with the same. ``share``: ``2/8`` generates every eighth row, from the second.
    Each image depends on its prompt, its random stream and these alone. Raises RequestError before
    anything is generated for what cannot be.
    """
    if settings.get("num_images") not in (None, 1):
        raise RequestError("a file of prompts has one image per row; repeat a row for several")
    first, shares = read_share(share)
    read_items(prompts, 0)  # all that is wrong with them is reported before the folder is made
    asked = asked_of(load, settings, share)
    with contextlib.closing(RunFolder(output, asked, resume)) as folder:
        given, journal = settings.get("seed"), folder.journal
        if journal.seed is None:
            journal.seed = secrets.randbits(31) if given is None else int(given)
        items = read_items(prompts, journal.seed)[first - 1 :: shares]
        journal.check(given, {item.number: row_of(item) for item in items}, "row")
        folder.failed = {item.number: item.error for item in items if item.error}
        over = {*journal.finished, *folder.failed}
        left = [item for item in items if item.number not in over]
        if not left:
            if not journal.finished:
                folder.begin({"prompts": str(prompts)})
            return folder.summarise(False)
        with opened() as pipeline:
            images, backend = FolderImages(pipeline, settings), pipeline.backend
            folder.begin({"prompts": str(prompts), **images.facts()})
            chunk = max(CHUNK, 2 * images.size)
            for at in range(0, len(left), chunk):
                began, before = time.perf_counter(), backend.energy_mj()
                made = images.generate(left[at : at + chunk])
                after = backend.energy_mj()
                joules = None if before is None or after is None else (after - before) / 1000
                folder.keep(made, time.perf_counter() - began, joules)
                if on_progress is not None:
                    done = len(items) - len(left) + min(at + chunk, len(left))
                    on_progress(done, len(items))
            return folder.summarise(backend.simulated)


class RunFolder:
    """Where a run's images go, locked until it is closed.

    Raises RequestError for a folder of another run, of one to resume, or of another process.
    """

    def __init__(self, path: Path, asked: Mapping[str, str], resume: bool) -> None:
        """``asked``: what decides the images, the base seed left out; it must be the same to resume."""
        self.path = path
        self.journal = Journal(path, path / RUN, path / JOURNAL, asked)
        self.failed: dict[int, str] = {}
        #: Of the images of this call: their lines, the seconds of each chunk, and its joules if known.
        self.made = list[dict[str, Any]]()
        self.seconds = 0.0
        self.joules = list[float | None]()
        self._began = time.time()
        self._held = FileLock(path / LOCK)
        try:
            if not path.exists():
                check_name(path.name)
            path.mkdir(parents=True, exist_ok=True)
            if not (path / RUN).exists() and any(one.name != LOCK for one in path.iterdir()):
                raise RequestError(f"{path} holds other files; name a new folder for the images")
            with contextlib.suppress(NotImplementedError):  # a file system without locks
                self._held.acquire(timeout=0)
            if self.journal.read() and not resume:
                raise RequestError(
                    f"{path} holds a run already; --resume continues it, or choose another folder"
                )
        except FileExistsError:
            raise RequestError(f"{path} is a file; name a folder for the images") from None
        except Timeout:
            raise RequestError(
                f"another process generates into {path}; wait for it, or choose another folder"
            ) from None
        except OSError as error:
            raise RequestError(
                f"{path} cannot be used ({error.strerror}); choose another"
            ) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let other processes have the folder."""
        self._held.release()

    def begin(self, facts: Mapping[str, object]) -> None:
        """Note what the run's images are generated with."""
        for part in self.path.glob(".lantern-*.part"):  # of a process that was killed
            with contextlib.suppress(OSError):
                part.unlink()
        self.journal.begin(**facts)

    def keep(self, made: Sequence[MadeItem], seconds: float, joules: float | None) -> None:
        """Write images, then their lines, and count them; ``joules``: None without a meter."""
        self.seconds += seconds
        self.joules.append(joules)
        lines: dict[int, dict[str, object]] = {}
        for item, png, line in made:
            if "error" in line:
                self.failed[item.number] = line["error"]
                continue
            row = row_of(item)
            write_whole(self.path / str(row["file"]), png)
            lines[item.number] = row | line
            self.made.append(line)
        self.journal.add(lines)

    def summarise(self, simulated: bool) -> dict[str, object]:
        """Write and return the summary: images and throughput; a device in software has no speed."""
        images, speed = len(self.made), bool(self.seconds) and not simulated
        tokens, steps = (sum(one[name] for one in self.made) for name in ("tokens", "steps"))
        moved = sum(one["total_variation_per_token"] * one["tokens"] for one in self.made)
        known = [one for one in self.joules if one is not None]
        joules = sum(known) if images and len(known) == len(self.joules) else None
        summary = {
            "schema_version": SCHEMA,
            "images": len(self.journal.finished),
            "failed": {str(n): text for n, text in sorted(self.failed.items())},
            "seed": self.journal.seed,
            "this_call": {
                "images": images,
                "tokens": tokens,
                "steps": steps,
                "seconds": time.time() - self._began,
                "seconds_of_images": self.seconds,
                "images_per_second": images / self.seconds if speed else None,
                "tokens_per_step": (tokens - images) / steps if steps else None,
                "total_variation_per_token": moved / tokens if tokens else None,
                "joules": joules,
                "joules_per_image": joules / images if joules and images else None,
                "simulated": simulated,
            },
        }
        write_json(self.path / SUMMARY, summary)
        return summary
