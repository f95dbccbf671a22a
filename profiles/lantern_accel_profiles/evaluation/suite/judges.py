"""The judges of a suite's images: networks and scorers, what they see, and the figures of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from lantern_accel.errors import DataError
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
MOMENTS_ONLY = "the reference has moments and no images"
#: Kernel matrices of more images would take gigabytes.
MOST_KID = 10_000
#: Images that a scorer sees together.
SCORED = 16


class Judges:
    """The networks of a suite's metrics and what they see of the real images, or why these are absent."""

    def __init__(
        self,
        request: SuiteRequest,
        device: torch.device,
        progress: Progress,
        skip: Mapping[str, str] | None = None,
    ) -> None:
        """Load what the protocol names; the request's own networks stand in their place.

        ``skip``: keys (``features``, ``clip``, ...) that are left out, with reasons.
        """
        r, p = request, request.protocol
        self.request, self.protocol, self.say = request, p, progress
        self.reasons = dict(skip or {})
        self.network: FeatureNetwork | None = None
        self.manifold: FeatureNetwork | None = None
        self.scorers: dict[str, Scorer] = {}
        made: dict[str, FeatureNetwork] = dict(r.networks)
        for role, name in (("network", p.network), ("manifold", p.manifold)):
            if "features" in self.reasons:
                self.reasons[role] = self.reasons["features"]
                continue
            try:
                if name not in made:
                    made[name] = load_network(name, r.weights, device, progress.log)
                setattr(self, role, made[name])
            except Unavailable as reason:
                self.reasons[role] = str(reason)
        for key in SCORERS:
            if key in self.reasons:
                continue
            try:
                self.scorers[key] = r.scorers.get(key) or load_scorer(
                    key, p, r.weights, device, progress.log
                )
            except Unavailable as reason:
                self.reasons[key] = str(reason)
        #: The real images as the networks of FID and of precision and recall see them.
        self.real = self._real("network", self.network, p.preprocessing)
        self.covered: Real | str = self.real
        if (p.manifold, p.manifold_preprocessing) != (p.network, p.preprocessing):
            self.covered = self._real("manifold", self.manifold, p.manifold_preprocessing)

    def _real(self, role: str, network: FeatureNetwork | None, rule: Preprocessing) -> Real | str:
        """Return the real images as a network sees them, or why there are none."""
        r, paths = self.request, self.request.captioned.images
        if network is None:
            return self.reasons[role]
        # A stored reference is FID's; precision and recall may need another network's features.
        if r.reference is not None and (role == "network" or paths is None):
            self.say.start("reference")
            try:
                return read_reference(r.reference, network, rule, self.say.advance)
            except DataError as error:
                if role == "network":
                    raise
                return str(error)
            finally:
                self.say.finish()
        if paths is None:
            return "there are no real images; name them with --images or --reference"
        if len(paths) < 2:
            return "one real image is not a set of images"
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
        of = self.network.name if self.network else p.network
        balls = self.manifold.name if self.manifold else p.manifold
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
            name, note = (s.name, s.note) if (s := self.scorers.get(key)) else (title, "")
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

    def _look_at(
        self, role: Literal["network", "manifold"], paths: Sequence[Path], at: Path
    ) -> Seen:
        """Return what the network of a role sees; raises :class:`Unavailable` where there is none."""
        network, p = getattr(self, role), self.protocol
        if network is None:
            raise Unavailable(self.reasons[role])
        rule = p.preprocessing if role == "network" else p.manifold_preprocessing
        return cached_features(paths, network, rule, at, "features", self.say.advance)

    def _distances(self, paths: Sequence[Path], folder: Path) -> tuple[Reading, ...]:
        seen, real = self._look_at("network", paths, folder), self.real
        if isinstance(real, str):
            raise Unavailable(real)
        fid, infinity = frechet(seen.features, real.moments, self.request.resamples)
        kid: Reading = not_measured(MOMENTS_ONLY)
        if real.features is not None:
            both = (x[:MOST_KID].astype(np.float64) for x in (seen.features, real.features))
            kid = unpaired_distance(*both)
        return fid, infinity, kid

    def _inception(self, paths: Sequence[Path], folder: Path) -> tuple[Reading, ...]:
        logits = self._look_at("network", paths, folder).logits
        if logits is None:
            assert self.network is not None
            raise Unavailable(f"{self.network.name} has no classes")
        return (inception_score(logits, self.protocol.is_splits),)

    def _covering(self, paths: Sequence[Path], folder: Path) -> tuple[Reading, ...]:
        if isinstance(self.covered, str) or self.covered.features is None:
            raise Unavailable(self.covered if isinstance(self.covered, str) else MOMENTS_ONLY)
        seen = self._look_at("manifold", paths, folder)
        return precision_recall(seen.features, self.covered.features, self.protocol.k)

    def _score(self, key: str, paths: Sequence[Path], folder: Path) -> tuple[Reading, ...]:
        if key not in self.scorers:
            raise Unavailable(self.reasons[key])
        return (mean(self._scores(paths, folder, key, self.scorers[key])),)

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
