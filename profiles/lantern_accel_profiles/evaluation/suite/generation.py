"""What a suite is asked for, and its images in a folder: generated chunk by chunk, and never twice.

Each strategy has a folder, whose name depends on all that its images depend on. It holds
``strategy.json``, which says so, the images ``000000.png``, ... and a record per finished chunk. A chunk
is one request with its own seed, which depends on the suite's seed and the chunk's place alone: every
strategy generates the same prompts from the same random numbers, and a stopped run goes on with the
same images.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lantern_accel.bounds import SEEDS
from lantern_accel.errors import DataError, RequestError
from lantern_accel.files import json_text, read_json_file, write_whole
from lantern_accel.generation.pipeline import Pipeline, Prompt
from lantern_accel.generation.result import png_bytes
from lantern_accel.records import digest
from lantern_accel.strategy.choose import read_strategy
from lantern_accel.strategy.values import AUTO, Sampling, Strategy
from lantern_accel_profiles.evaluation.suite.captions import Captioned
from lantern_accel_profiles.evaluation.suite.protocol import Protocol
from lantern_accel_profiles.quality.set_metrics import FID_RESAMPLES

#: Images of a chunk, unless a request names another number.
CHUNK = 16


@dataclass
class SuiteRequest:
    """What a suite generates, and what measures it."""

    name: Literal["coco", "imagenet", "prompts"]
    protocol: Protocol
    captioned: Captioned
    prompts_source: str
    strategies: Sequence[tuple[str, Strategy]]
    sampling: Sampling
    work: Path
    seed: int = 0
    chunk: int = CHUNK
    batch: int = 1
    reference: Path | None = None
    pictures: Mapping[str, Path] = field(default_factory=dict)
    weights: Mapping[str, Path] = field(default_factory=dict)
    host: bool = False
    resamples: int = FID_RESAMPLES

    @property
    def prompts(self) -> list[str | int]:
        """The prompt of each image."""
        return self.captioned.prompts


def choose_strategies(
    pipeline: Pipeline, words: Sequence[str], sampling: Sampling, batch: int, example: Prompt
) -> list[tuple[str, Strategy]]:
    """Return labels and strategies of names, presets' names, and names with settings.

    Each is resolved as a request for ``example`` would be, with this sampling and batch.
    ``lantern:k=10,delta=0.4`` is a name with settings; a ``.json`` file holds a strategy as tables
    write it. Raises :class:`StrategyError` or :class:`RequestError` for what the model cannot do.
    """
    found: dict[str, Strategy] = {}
    settings = {"batch_size": batch, "sampling": sampling}
    for label in words:
        own = read_strategy(label)
        found[label] = pipeline.request(example, **own, **settings).strategy
        pipeline.engines.check(found[label], sampling)
    known = {(one.name == AUTO, one.model_copy(update={"name": ""})) for one in found.values()}
    if len(known) < len(found):
        raise RequestError(f"two of the strategies {', '.join(found)} are the same; leave one out")
    return list(found.items())


#: Of a request's figures, those that say how it ran; the rest is in the suite or in the chunk.
_LEFT_OUT = ("prompts", "strategy", "sampling", "tokens_sha256", "accepted_histogram", "auto")


@dataclass(frozen=True)
class Chunk:
    """One finished request: its images' count, steps and seconds.

    ``warm``: not the first one of its process, so that no compilation is in its seconds.
    """

    images: int
    tokens: int
    steps: int
    seconds: float
    total_variation_per_token: float
    warm: bool
    simulated: bool
    details: dict[str, object]


class SuiteImages:
    """The images of one suite on one model, a folder per strategy: PNGs, and a record per chunk."""

    def __init__(self, pipeline: Pipeline, request: SuiteRequest) -> None:
        self.pipeline, self.request, self.prompts = pipeline, request, request.prompts

    def of(self, strategy: Strategy, label: str) -> Path:
        """Return the folder of a strategy's images, named by all that they depend on."""
        p, r = self.pipeline, self.request
        facts = {
            "strategy": strategy.model_dump(mode="json"),
            "model": p.model.manifest.name,
            "weights_hash": p.model.weights_hash,
            "backend": p.backend.name,
            "device": p.backend.facts().name,
            "dtype": str(p.dtype).removeprefix("torch."),
            "seed": r.seed,
            "sampling": r.sampling.model_dump(mode="json"),
            "chunk": r.chunk,
            "batch": r.batch,
            "prompts": digest(self.prompts),
        }
        slug = re.sub(r"[^a-z0-9.=+]+", "-", label.lower()).strip("-")[:60]
        place = r.work / f"{slug}-{digest(facts)[:8]}"
        _write(place / "strategy.json", json_text(facts))
        return place

    def paths(self, folder: Path) -> list[Path]:
        """Return the files of a strategy's images, in the order of the prompts."""
        return [folder / f"{i:06d}.png" for i in range(len(self.prompts))]

    def records(self, folder: Path) -> list[tuple[int, Path, Chunk | None]]:
        """Return each chunk's start and its record; None where it is absent, damaged or shorter."""
        found = []
        for start in range(0, len(self.prompts), self.request.chunk):
            path = folder / f"chunk-{start:06d}.json"
            try:
                chunk: Chunk | None = Chunk(**read_json_file(path))
            except (OSError, ValueError, TypeError):
                chunk = None
            if chunk and chunk.images != min(self.request.chunk, len(self.prompts) - start):
                chunk = None
            found.append((start, path, chunk))
        return found

    def generate_missing(
        self, strategy: Strategy, folder: Path, advance: Callable[[int], None] = lambda count: None
    ) -> list[Chunk]:
        """Generate what is not in the folder yet; return the records of all chunks.

        A chunk counts as generated when its record is there, which is written after its images; an image
        deleted since then is generated again with its chunk.
        """
        r, paths, found, first = self.request, self.paths(folder), [], True
        for start, record, done in self.records(folder):
            here = paths[start : start + r.chunk]
            if done is None or not all(path.is_file() for path in here):
                made = self.pipeline.generate(
                    list(self.prompts[start : start + r.chunk]),
                    strategy=strategy,
                    sampling=r.sampling,
                    seed=seed_of(r.seed, start),
                    batch_size=r.batch,
                )
                for path, image in zip(here, made.images, strict=True):
                    _write(path, png_bytes(image))
                stats = made.stats
                done = Chunk(
                    images=stats.images,
                    tokens=stats.tokens,
                    steps=stats.steps,
                    seconds=stats.seconds.prefill + stats.seconds.decode,
                    total_variation_per_token=stats.total_variation_per_token,
                    warm=not first,
                    simulated=stats.simulated,
                    details=stats.model_dump(mode="json", exclude=set(_LEFT_OUT)),
                )
                _write(record, json_text(done.__dict__))
                first = False
            found.append(done)
            advance(len(here))
        return found


def seed_of(seed: int, start: int) -> int:
    """Return the seed of the request that generates the chunk from ``start`` on."""
    return (seed * 1_000_003 + start) % SEEDS


def find_images(label: str, folder: Path, count: int) -> list[Path]:
    """Return images that were generated elsewhere, by the numbers in their names.

    Raises :class:`DataError` for a folder that does not have one per prompt.
    """
    if not folder.is_dir():
        raise DataError(f"--pictures {label}={folder}: there is no such folder; name another")
    files = [one for one in folder.iterdir() if one.suffix.lower() in (".png", ".jpg", ".webp")]
    if len(files) != count:
        raise DataError(
            f"--pictures {label}={folder} has {len(files)} images, and the suite {count} prompts; "
            "generate those that --write-prompts lists"
        )
    return sorted(files, key=lambda path: [int(one) for one in re.findall("[0-9]+", path.name)])


def _write(path: Path, content: bytes | str) -> None:
    try:
        write_whole(path, content)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written ({error.strerror}); free some space or change --work"
        ) from None
