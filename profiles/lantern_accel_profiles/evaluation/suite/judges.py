"""The judges of a suite's images: networks and scorers, what they see, and the figures of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from lantern_accel.files import read_json_file, write_json
from lantern_accel.progress import Progress
from lantern_accel.records import not_measured
from lantern_accel_profiles.evaluation.schema import Metric, Reading
from lantern_accel_profiles.evaluation.suite.generation import SuiteRequest
from lantern_accel_profiles.evaluation.suite.image_files import (
    Real,
    Seen,
    cache_path,
    cached_features,
    identity,
    prepare_image,
    read_image,
    read_reference,
    stats_of,
)
from lantern_accel_profiles.evaluation.suite.networks import (
    FeatureNetwork,
    Scorer,
    Unavailable,
    load_network,
    load_scorer,
)
from lantern_accel_profiles.evaluation.suite.protocol import Preprocessing
from lantern_accel_profiles.quality.interval import mean
from lantern_accel_profiles.quality.set_metrics import (
    Reference,
    frechet,
    inception_score,
    precision_recall,
    unpaired_distance,
)

SCORERS = {"clip": "CLIP score", "hpsv2": "HPSv2"}
#: Kernel matrices of more images would take gigabytes.
MOST_KID = 10_000
#: Images that a scorer sees together.
SCORED = 16
Made = TypeVar("Made")


def attempt(make: Callable[..., Made], *given: object) -> Made | Unavailable:
    """Return what a function makes, or why it cannot be made here."""
    try:
        return make(*given)
    except Unavailable as reason:
        return reason


def demand(made: Made | Unavailable) -> Made:
    """Return what was made; raises :class:`Unavailable` with the reason where it was not."""
    if isinstance(made, Unavailable):
        raise made
    return made


class Judges:
    """The networks of a suite's metrics and what they see of the real images, or why these are absent."""

    def __init__(self, request: SuiteRequest, device: torch.device, progress: Progress) -> None:
        """Load what the protocol names, and read the real images."""
        r, p = request, request.protocol
        self.request, self.protocol, self.say = request, p, progress

        def network(name: str) -> FeatureNetwork:
            if r.name == "prompts" and r.reference is None:
                raise Unavailable("there are no real images; --suite coco takes them")
            return load_network(name, r.weights, device, progress.log)

        def scorer(key: str) -> Scorer:
            if not isinstance(r.prompts[0], str):
                raise Unavailable("class ids are not text")
            return load_scorer(key, p, r.weights, device, progress.log)

        self.scorers = {key: attempt(scorer, key) for key in SCORERS}
        self.network = self.manifold = attempt(network, p.network)
        if p.manifold != p.network:
            self.manifold = attempt(network, p.manifold)
        #: The real images as the networks of FID and of precision and recall see them.
        self.real = self.covered = attempt(
            self._see_real, self.network, p.preprocessing, r.reference
        )
        if (p.manifold, p.manifold_preprocessing) != (p.network, p.preprocessing):
            stored = r.reference if r.captioned.images is None else None
            self.covered = attempt(self._see_real, self.manifold, p.manifold_preprocessing, stored)

    def _see_real(
        self, judge: FeatureNetwork | Unavailable, rule: Preprocessing, stored: Path | None
    ) -> Real:
        """Return the real images as a network sees them: those of a stored file, or of the captions."""
        network, r, paths = demand(judge), self.request, self.request.captioned.images
        if stored is not None:
            self.say.start("reference")
            found = read_reference(stored, network, rule, self.say.advance)
            self.say.finish()
            return found
        if paths is None:
            raise Unavailable("there are no real images; name them with --images or --reference")
        if len(paths) < 2:
            raise Unavailable("one real image is not a set of images")
        self.say.start("real images", len(paths))
        seen = cached_features(paths, network, rule, r.work, "reference", self.say.advance)
        self.say.finish()
        about = {
            "images": len(paths),
            "left_out": dict(r.captioned.left_out),
            "not_rgb": seen.modes,
            **identity(network, rule),
        }
        return Real(seen.features, Reference.of_features(seen.features), about)

    def columns(self) -> list[Metric]:
        """Return the columns, measured or not, in the order of the table."""
        p = self.protocol
        of = p.network if isinstance(self.network, Unavailable) else self.network.name
        balls = p.manifold if isinstance(self.manifold, Unavailable) else self.manifold.name
        rule, other = p.preprocessing.text(), p.manifold_preprocessing.text()
        fid = "bootstrap over generated images, the reference as it is"
        limit = "FID extrapolated to infinitely many generated images; FID minus this is its bias"
        score = f"{p.is_splits} consecutive splits"
        rows = [
            ("fid", "FID", "lower", of, rule, fid),
            ("fid_infinity", "FID-infinity", "lower", of, rule, limit),
            ("kid", "KID x 1000", "lower", of, rule, "all pairs in place of random subsets"),
            ("inception_score", "IS", "higher", of, rule, score),
            ("precision", "Precision", "higher", balls, other, f"k = {p.k}"),
            ("recall", "Recall", "higher", balls, other, f"k = {p.k}"),
        ]
        for key, title in SCORERS.items():
            s = self.scorers[key]
            name, note = (title, "") if isinstance(s, Unavailable) else (s.name, s.note)
            rows.append((key, title, "higher", name, p.clip_preprocessing.text(), note))
        return [Metric(**dict(zip(Metric.model_fields, row, strict=True))) for row in rows]

    def measure(self, paths: Sequence[Path], folder: Path) -> dict[str, Reading]:
        """Return a strategy's figure in every column; ``folder`` keeps features for the next run."""
        found = dict[str, Reading]()
        columns: dict[tuple[str, ...], Callable[[Sequence[Path], Path], tuple[Reading, ...]]] = {
            ("fid", "fid_infinity", "kid"): self._distances,
            ("inception_score",): self._inception,
            ("precision", "recall"): self._covering,
            **{(key,): partial(self._score, key) for key in SCORERS},
        }
        for keys, figures in columns.items():
            try:
                found |= dict(zip(keys, figures(paths, folder), strict=True))
            except (Unavailable, ValueError) as reason:  # ValueError: so few images have none
                found |= dict.fromkeys(keys, not_measured(str(reason)))
        return found

    def _look(
        self,
        judge: FeatureNetwork | Unavailable,
        rule: Preprocessing,
        paths: Sequence[Path],
        folder: Path,
    ) -> Seen:
        return cached_features(paths, demand(judge), rule, folder, "features", self.say.advance)

    def _distances(self, paths: Sequence[Path], folder: Path) -> tuple[Reading, ...]:
        seen, real = (
            self._look(self.network, self.protocol.preprocessing, paths, folder),
            demand(self.real),
        )
        fid, infinity = frechet(seen.features, real.moments, self.request.resamples)
        both = (x[:MOST_KID].astype(np.float64) for x in (seen.features, real.features))
        return fid, infinity, unpaired_distance(*both)

    def _inception(self, paths: Sequence[Path], folder: Path) -> tuple[Reading, ...]:
        logits = self._look(self.network, self.protocol.preprocessing, paths, folder).logits
        if logits is None:
            raise Unavailable(f"the network {self.protocol.network} has no classes")
        return (inception_score(logits, self.protocol.is_splits),)

    def _covering(self, paths: Sequence[Path], folder: Path) -> tuple[Reading, ...]:
        covered, rule = demand(self.covered), self.protocol.manifold_preprocessing
        seen = self._look(self.manifold, rule, paths, folder)
        return precision_recall(seen.features, covered.features, self.protocol.k)

    def _score(self, key: str, paths: Sequence[Path], folder: Path) -> tuple[Reading, ...]:
        return (mean(self._scores(paths, folder, key, demand(self.scorers[key]))),)

    def _scores(self, paths: Sequence[Path], folder: Path, key: str, scorer: Scorer) -> list[float]:
        """Return a score per image, from ``folder`` where it was stored for the same ones."""
        rule, prompts = self.protocol.clip_preprocessing, self.request.prompts
        depends = [scorer.name, scorer.note, rule.model_dump(mode="json"), prompts]
        path = cache_path(folder, key, [*depends, stats_of(paths)], ".json")
        try:
            stored = [float(one) for one in read_json_file(path)]
            if len(stored) == len(paths):
                return stored
        except (OSError, ValueError, TypeError):
            pass
        scores: list[float] = []
        for start in range(0, len(paths), SCORED):
            images = [
                prepare_image(read_image(one)[0], rule, None) for one in paths[start:][:SCORED]
            ]
            scores += scorer(images, [str(prompt) for prompt in prompts[start:][:SCORED]])
        write_json(path, scores)
        return scores
