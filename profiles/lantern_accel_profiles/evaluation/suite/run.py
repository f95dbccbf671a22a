"""Runs a suite: real images first, then each strategy's images and figures, each row kept at once."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from lantern_accel.errors import RequestError
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.progress import Progress
from lantern_accel.records import digest, not_measured
from lantern_accel.store import check_same
from lantern_accel.strategy.values import Strategy
from lantern_accel_profiles.evaluation.schema import Reading, Scored, Speed, Suite
from lantern_accel_profiles.evaluation.suite.generation import (
    Chunk,
    SuiteImages,
    SuiteRequest,
    find_images,
)
from lantern_accel_profiles.evaluation.suite.image_files import Real
from lantern_accel_profiles.evaluation.suite.judges import Judges
from lantern_accel_profiles.evaluation.suite.protocol import published_rows
from lantern_accel_profiles.quality.interval import estimate_paired, share


def speed_of(chunks: Sequence[Chunk], vanilla: Sequence[Chunk] | None) -> Speed:
    """Return a strategy's speed from its chunks; ``vanilla``'s are of the same prompts."""
    counted = ([float(c.tokens - c.images) for c in chunks], [float(c.steps) for c in chunks])
    moved = [c.total_variation_per_token * c.tokens for c in chunks]
    warm = [c for c in chunks if c.warm]
    seconds: Reading = not_measured(
        "one chunk only, which started cold; generate more images or smaller chunks (--chunk)"
    )
    faster: Reading = not_measured("vanilla generated no chunk of the same prompts warm")
    both = [
        (a.seconds, b.seconds)
        for a, b in zip(vanilla or (), chunks, strict=False)
        if a.warm and b.warm
    ]
    if any(c.simulated for c in chunks):
        seconds = faster = not_measured("the device is simulated")
    else:
        if warm:
            times = [c.seconds for c in warm], [float(c.images) for c in warm]
            seconds = estimate_paired(share, *times, in_turns=True)
        if both:
            faster = estimate_paired(share, *map(list, zip(*both, strict=True)), in_turns=True)
    return Speed(
        seconds_per_image=seconds,
        speedup=faster,
        tokens_per_step=estimate_paired(share, *counted)
        if all(counted[1])
        else not_measured("no step was taken"),
        total_variation_per_token=estimate_paired(share, moved, [float(c.tokens) for c in chunks]),
    )


#: Prompts that are checked together, their captions encoded and kept.
CHECKED = 256
#: How the warning begins that a prompt was cut; thousands of them are a note of the table.
CUT = r"the (prompt|caption) has \d+ tokens"


class SuiteRun:
    """One suite on one pipeline; ``on_row`` gets the table after each strategy."""

    def __init__(
        self,
        pipeline: Pipeline,
        request: SuiteRequest,
        before: Suite | None,
        on_row: Callable[[Suite], None],
        progress: Progress,
    ) -> None:
        self.pipeline, self.request, self.on_row, self.say = pipeline, request, on_row, progress
        r = request
        self.suite = Suite(
            name=r.name,
            protocol=r.protocol,
            count=len(r.prompts),
            seed=r.seed,
            sampling=r.sampling.model_dump(mode="json"),
            chunk=r.chunk,
            batch=r.batch,
            prompts_source=r.prompts_source,
            prompts_sha256=digest(r.prompts),
            resamples=r.resamples,
        )
        self.before = before
        if before is not None:
            check_same("the output's suite", before.question, self.suite.question, "file with -o")
        if len(r.prompts) < 2:
            raise RequestError("a suite needs two images at least; give more prompts")
        self.drawn = SuiteImages(pipeline, request)

    def run(self) -> Suite:
        """Generate and measure every strategy; return the table."""
        r, prompts = self.request, self.request.prompts
        self._check_prompts()
        host = r.host or self.pipeline.backend.simulated
        device = torch.device("cpu") if host else self.pipeline.backend.device
        elsewhere = {
            label: find_images(label, folder, len(prompts)) for label, folder in r.pictures.items()
        }
        self.judges = judges = Judges(r, device, self.say)
        if isinstance(judges.real, Real):
            self.suite.reference = judges.real.about
        self.suite.columns = judges.columns()
        self.suite.published = published_rows(r.name)
        vanilla = self._full_vanilla()

        for name, strategy in r.strategies:
            label = self._label(name)
            folder = self.drawn.of(strategy, label)
            paths = self.drawn.paths(folder)
            self.say.start(f"{label}: images", len(prompts))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=CUT)  # counted when they were checked
                chunks = self.drawn.generate_missing(strategy, folder, self.say.advance)
            self.say.finish()
            self.pipeline.release_engines()  # the metrics' networks may need the memory
            if strategy.name == "vanilla" and vanilla is None:
                vanilla = chunks
            speed = speed_of(chunks, vanilla)
            self._keep(label, paths, folder, speed, strategy, chunks[-1].details)
        unknown = not_measured("the images were generated elsewhere")
        for label, paths in elsewhere.items():
            folder = r.work / f"elsewhere-{digest([label])[:8]}"
            self._keep(label, paths, folder, Speed(**dict.fromkeys(Speed.model_fields, unknown)))
        return self.suite

    def _label(self, name: str) -> str:
        """Return what a row is called: the strategy, and quantized weights."""
        rounding = self.pipeline.model.rounding
        return name if rounding is None else f"{name}, {rounding.weights} weights"

    def _full_vanilla(self) -> list[Chunk] | None:
        """Return what plain decoding took with the model's own weights, where these are quantized."""
        if self.pipeline.model.rounding is None:
            return None
        for name, strategy in self.request.strategies:
            if strategy.name == "vanilla":
                chunks = [one for _, _, one in self.drawn.records(self.drawn.of(strategy, name))]
                whole = [one for one in chunks if one is not None]
                return whole if len(whole) == len(chunks) else None
        return None

    def _keep(
        self,
        label: str,
        paths: Sequence[Path],
        folder: Path,
        speed: Speed,
        strategy: Strategy | None = None,
        details: dict[str, object] | None = None,
    ) -> None:
        """Judge images and put their row into the table, with those that the file had before."""
        self.say.start(f"{label}: figures")
        row = Scored(
            label=label,
            strategy=strategy,
            images=len(paths),
            speed=speed,
            metrics=self.judges.measure(paths, folder),
            details=details or {},
        )
        self.say.finish()
        ours = {one.label: one for one in self.suite.rows} | {row.label: row}
        labels = [self._label(name) for name, _ in self.request.strategies]
        labels += self.request.pictures
        self.suite.rows = [ours[label] for label in labels if label in ours]
        old = self.before.rows if self.before is not None else []
        rest = [one for one in old if one.label not in labels]
        self.on_row(self.suite.model_copy(update={"rows": [*self.suite.rows, *rest]}))

    def _check_prompts(self) -> None:
        """Refuse what the model cannot generate, before any image; captions are encoded and kept."""
        prompts = self.request.captioned.prompts
        self.say.start("prompts", len(prompts))
        for start in range(0, len(prompts), CHECKED):
            part = prompts[start : start + CHECKED]
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                self.pipeline.check_prompts(part)
            cut = [one for one in told if re.match(CUT, str(one.message))]
            self.suite.prompts_cut += len(cut)
            for one in (one for one in told if one not in cut):
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
            self.say.advance(len(part))
        self.say.finish()
