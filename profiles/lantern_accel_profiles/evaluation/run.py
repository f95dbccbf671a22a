"""Runs the parts of an evaluation one after another, keeping each as soon as it is measured."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from lantern_accel._version import __version__
from lantern_accel.errors import DataError, LanternError
from lantern_accel.families.manifest import Manifest
from lantern_accel.files import write_json
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.progress import Progress
from lantern_accel.training.imageset import ImageSet, encode_images, read_images
from lantern_accel_profiles import store
from lantern_accel_profiles.evaluation.grid import FORTY
from lantern_accel_profiles.evaluation.parts import distances, frontier, interchange
from lantern_accel_profiles.evaluation.schema import (
    PARTS,
    Evaluation,
    EvaluationSettings,
    FrontierPoint,
    Interchange,
    StrategyDistance,
    Suite,
)
from lantern_accel_profiles.evaluation.suite.generation import SuiteRequest
from lantern_accel_profiles.evaluation.suite.run import SuiteRun
from lantern_accel_profiles.evaluation.tables import write_tables
from lantern_accel_profiles.quality.features import MEASURES, MISSING, is_there, load_network
from lantern_accel_profiles.quality.scoring import Ambiguity, Likelihood, ambiguity, likelihood


class Source(Protocol):
    """Images that a model was trained on, and those that were kept from it."""

    def images(self, manifest: Manifest, picture: tuple[int, int], split: str) -> ImageSet:
        """Return captioned images of the split ``"heldout"`` or ``"train"``, (width, height) pixels.

        Raises :class:`DataError` where there are none for this model.
        """


class _Unmeasured(Exception):
    """A part that cannot be measured here, and why."""


@dataclass
class Evaluator:
    """Evaluates one loaded model into the file ``out``; a run that was stopped continues where it was.

    ``images``: a folder of captioned images (``lantern_accel.training.imageset``); without one those of
    ``source``, which a model's own trainer knows. Raises :class:`DataError` where ``out`` holds an
    evaluation of another model or under other settings.
    """

    pipeline: Pipeline
    out: Path
    settings: EvaluationSettings = field(default_factory=EvaluationSettings)
    images: Path | None = None
    source: Source | None = None
    say: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        self.net = load_network() if is_there() else None
        self.report = self._report()
        self._set = cache(self._read)

    def _report(self) -> Evaluation:
        """Return what an earlier run left under the same settings, or an empty report."""
        fresh = Evaluation(
            model=self.pipeline.model.manifest.name,
            weights_hash=self.pipeline.model.weights_hash,
            settings=self.settings,
            environment=environment(self.pipeline),
            features=MEASURES if self.net is not None else None,
        )

        def identity(one: Evaluation) -> dict[str, object]:
            same = {n: getattr(one, n) for n in ("model", "weights_hash", "features")}
            return same | {f"setting {n}": v for n, v in one.settings.model_dump().items()}

        stored = store.resume(self.out, fresh, identity, "lantern-accel evaluate")
        stored.skipped = {}  # what could not be measured may be measurable by now
        return stored

    def run(self, parts: tuple[str, ...] = PARTS, suite: SuiteRequest | None = None) -> Evaluation:
        """Measure the parts that are not in the report yet, then the suite; write after each.

        ``suite``: what to generate and measure for the papers' tables, which are written next to ``out``.
        """
        own = environment(self.pipeline)["weights"]
        stored = self.report.environment.get("weights", "full")
        if parts and own != stored:
            raise DataError(
                f"{self.out} was measured with {stored} weights, and the model has {own} ones; "
                "name another file with -o"
            )
        for part in parts:
            if getattr(self.report, part) is None:
                self.say.start(part)
                try:
                    setattr(self.report, part, getattr(self, f"_{part}")())
                except _Unmeasured as reason:
                    self.report.skipped[part] = str(reason)
                self.say.finish()
            self.save()
        if self.net is None:
            self.report.skipped["features"] = MISSING
            self.save()
        if suite is not None:
            before = self.report.suite
            SuiteRun(self.pipeline, suite, before, self._keep_suite, self.say).run()
        write_tables(self.report, self.out)
        return self.report

    def _keep_suite(self, suite: Suite) -> None:
        self.report.suite = suite
        self.save()

    def save(self) -> None:
        """Write the report, whole or not at all."""
        write_json(self.out, self.report.model_dump(mode="json"))

    # --- what is measured on -------------------------------------------------------------------

    def _read(self, split: str) -> ImageSet:
        """Return captioned images of a split; your own folder counts as held out."""
        model, count = self.pipeline.model, self.settings.images
        manifest, picture = model.manifest, model.family.image_size(model.manifest)
        if self.images is not None:
            if split != "heldout":
                raise _Unmeasured("a folder of images has no training part")
            found = read_images(self.images, *picture)
            for name, why in found.skipped.items():
                self.say.log(f"skipped {name}: {why}")
            return ImageSet(found.pixels[:count], found.prompts[:count], found.skipped)
        if self.source is None:
            raise _Unmeasured("they need captioned images; name a folder of them with --images")
        try:
            return self.source.images(manifest, picture, split)
        except LanternError as error:
            raise _Unmeasured(str(error)) from None

    def _codes(self, split: str) -> tuple[ImageSet, Tensor]:
        images = self._set(split)
        return images, encode_images(self.pipeline, images.pixels)

    def _prompts(self, count: int) -> list[str | int]:
        target = self.pipeline.model.manifest.target
        if getattr(target, "conditioning", "text") == "class":
            return [i * 37 % target.num_classes for i in range(count)]
        if self.images is not None:
            own = self._set("heldout").prompts
            return [own[i % len(own)] for i in range(count)]
        chosen = FORTY[:: max(1, len(FORTY) // count)][:count]
        return [chosen[i % len(chosen)] for i in range(count)]

    # --- the parts -----------------------------------------------------------------------------

    def _likelihood(self) -> list[Likelihood]:
        rows = []
        for split in ("heldout", "train"):
            try:
                images, codes = self._codes(split)
            except _Unmeasured:
                if split == "heldout":
                    raise
                continue
            rows.append(likelihood(self.pipeline, images.prompts, codes, f"{split} images"))
            self.say.log(f"{split}: {rows[-1].nll:.3f} nats per token")
        return rows

    def _ambiguity(self) -> list[Ambiguity]:
        images, codes = self._codes("heldout")
        scales, positions = self.settings.cfg, self.settings.positions
        return ambiguity(self.pipeline, images.prompts, codes, scales, positions, "held-out images")

    def _interchange(self) -> list[Interchange]:
        images, codes = self._codes("heldout")
        pixels = torch.from_numpy(images.pixels)
        return interchange(
            self.pipeline, pixels, codes, self.settings.interchange_k, self.settings.seed, self.net
        )

    def _need_drafter(self) -> None:
        if self.pipeline.model.drafter is None:
            raise _Unmeasured("the model has no drafter; `lantern-accel train drafter` trains one")

    def _frontier(self) -> list[FrontierPoint]:
        self._need_drafter()
        prompts = self._prompts(self.settings.frontier_prompts)
        return frontier(self.pipeline, prompts, self.settings, self.say.log)

    def _distances(self) -> list[StrategyDistance]:
        self._need_drafter()
        named = []
        for name in ("eagle", "eagle2", "lantern", "lantern++"):
            strategy = self.pipeline.strategy(name)
            most = self.pipeline.model.manifest.target.vocab_size - 1
            named.append(strategy.override(k=most) if strategy.neighbours > most else strategy)
        prompts = self._prompts(self.settings.distance_images)
        return distances(self.pipeline, prompts, named, self.settings.seed, self.net, self.say.log)


def environment(pipeline: Pipeline) -> dict[str, object]:
    """Return what the figures were measured with."""
    rounding = pipeline.model.rounding
    return {
        "lantern_accel": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "backend": pipeline.backend.name,
        "device": pipeline.backend.facts().name,
        "dtype": str(pipeline.dtype).removeprefix("torch."),
        "weights": "full" if rounding is None else rounding.weights,
    }
