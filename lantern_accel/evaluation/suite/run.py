"""Runs a suite: real images first, then each strategy's pictures and figures, each row kept at once."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from lantern_accel.errors import DataError, RequestError
from lantern_accel.evaluation.schema import Metric, Reading, Row, Speed, Suite
from lantern_accel.evaluation.suite.captions import digest
from lantern_accel.evaluation.suite.drawing import (
    Chunk,
    Drawn,
    SuiteRequest,
    drawn_pictures,
    save_geneval,
)
from lantern_accel.evaluation.suite.networks import (
    FeatureNetwork,
    Scorer,
    Unavailable,
    load_network,
    load_scorer,
)
from lantern_accel.evaluation.suite.pictures import (
    Real,
    Seen,
    identity,
    kept_path,
    look_once,
    prepared,
    read_picture,
    read_reference,
    save_reference,
    stats_of,
)
from lantern_accel.evaluation.suite.protocol import Preprocessing, published_rows
from lantern_accel.files import read_json_file, write_json
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.quality.interval import mean, paired, share
from lantern_accel.quality.progress import Progress
from lantern_accel.quality.set_metrics import (
    Reference,
    frechet,
    inception_score,
    precision_recall,
    unpaired_distance,
)
from lantern_accel.records import not_measured
from lantern_accel.store import check_same

SCORERS = {"clip": "CLIP score", "hpsv2": "HPSv2", "imagereward": "ImageReward"}
DISTANCES = ("fid", "fid_infinity", "kid")
COVERING = ("precision", "recall")
MOMENTS_ONLY = "the reference has moments and no images"
#: Kernel matrices of more images would take gigabytes.
MOST_KID = 10_000
#: Pictures that a scorer sees together.
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
            return "one real image is no set of images"
        self.say.start("real images", len(paths))
        seen = look_once(paths, network, rule, r.work, "reference", self.say.advance)
        self.say.finish()
        about = {
            "images": len(paths),
            "left_out": dict(r.captioned.left_out),
            "not_rgb": seen.modes,
            **identity(network, rule),
        }
        if r.save_reference is not None and role == "network":
            save_reference(r.save_reference, seen.features, about)
        return Real(seen.features, Reference.of_features(seen.features), about)

    def columns(self) -> list[Metric]:
        """Return the columns, measured or not, in the order of the table."""
        p = self.protocol
        of = self.network.name if self.network else p.network
        balls = self.manifold.name if self.manifold else p.manifold
        rule, other = p.preprocessing.text(), p.manifold_preprocessing.text()
        fid = "bootstrap over generated images, the reference as it is"
        limit = "FID extrapolated to endlessly many generated images; FID minus this is its bias"
        score = f"{p.is_splits} consecutive splits"
        rows = [
            ("fid", "FID", "lower", of, rule, fid),
            ("fid_infinity", "FID-infinity", "lower", of, rule, limit),
            ("kid", "KID x 1000", "lower", of, rule, "all pairs in place of random subsets"),
            ("inception_score", "IS", "higher", of, rule, score),
            ("precision", "Precision", "higher", balls, other, f"k = {p.k}"),
            ("recall", "Recall", "higher", balls, other, f"k = {p.k}"),
        ]
        found = [
            Metric(key=k, title=t, better=b, network=n, preprocessing=r, note=note)
            for k, t, b, n, r, note in rows
        ]
        for key, title in SCORERS.items():
            scorer = self.scorers.get(key)
            found.append(
                Metric(
                    key=key,
                    title=title,
                    better="higher",
                    network=scorer.name if scorer else title,
                    preprocessing=p.clip_preprocessing.text(),
                    note=scorer.note if scorer else "",
                )
            )
        return found

    def measure(self, paths: Sequence[Path], folder: Path) -> dict[str, Reading]:
        """Return a strategy's figure in every column; ``folder`` keeps features for the next run."""
        found = dict[str, Reading]()
        columns: dict[tuple[str, ...], Callable[[Sequence[Path], Path], tuple[Reading, ...]]] = {
            DISTANCES: self._distances,
            ("inception_score",): self._inception,
            COVERING: self._covering,
            **{(key,): partial(self._score, key) for key in SCORERS},
        }
        for keys, figures in columns.items():
            try:
                found |= dict(zip(keys, figures(paths, folder), strict=True))
            except (Unavailable, ValueError) as reason:  # ValueError: so few images have none
                found |= dict.fromkeys(keys, not_measured(str(reason)))
        return found

    def _seen(self, role: Literal["network", "manifold"], paths: Sequence[Path], at: Path) -> Seen:
        """Return what the network of a role sees; raises :class:`Unavailable` where there is none."""
        network, p = getattr(self, role), self.protocol
        if network is None:
            raise Unavailable(self.reasons[role])
        rule = p.preprocessing if role == "network" else p.manifold_preprocessing
        return look_once(paths, network, rule, at, "features", self.say.advance)

    def _distances(self, paths: Sequence[Path], folder: Path) -> tuple[Reading, ...]:
        seen, real = self._seen("network", paths, folder), self.real
        if isinstance(real, str):
            raise Unavailable(real)
        fid, infinity = frechet(seen.features, real.moments, self.request.resamples)
        kid: Reading = not_measured(MOMENTS_ONLY)
        if real.features is not None:
            both = (x[:MOST_KID].astype(np.float64) for x in (seen.features, real.features))
            kid = unpaired_distance(*both)
        return fid, infinity, kid

    def _inception(self, paths: Sequence[Path], folder: Path) -> tuple[Reading, ...]:
        logits = self._seen("network", paths, folder).logits
        if logits is None:
            assert self.network is not None
            raise Unavailable(f"{self.network.name} has no classes")
        return (inception_score(logits, self.protocol.is_splits),)

    def _covering(self, paths: Sequence[Path], folder: Path) -> tuple[Reading, ...]:
        if isinstance(self.covered, str) or self.covered.features is None:
            raise Unavailable(self.covered if isinstance(self.covered, str) else MOMENTS_ONLY)
        seen = self._seen("manifold", paths, folder)
        return precision_recall(seen.features, self.covered.features, self.protocol.k)

    def _score(self, key: str, paths: Sequence[Path], folder: Path) -> tuple[Reading, ...]:
        if key not in self.scorers:
            raise Unavailable(self.reasons[key])
        return (mean(self._scores(paths, folder, key, self.scorers[key])),)

    def _scores(self, paths: Sequence[Path], folder: Path, key: str, scorer: Scorer) -> list[float]:
        """Return a score per picture, from ``folder`` where it was stored for the same ones."""
        rule, prompts = self.protocol.clip_preprocessing, self.request.prompts
        depends = [scorer.name, scorer.note, rule.model_dump(mode="json"), prompts]
        path = kept_path(folder, key, [*depends, stats_of(paths)], ".json")
        try:
            stored = [float(one) for one in read_json_file(path)]
            if len(stored) == len(paths):
                return stored
        except (OSError, ValueError, TypeError):
            pass
        scores: list[float] = []
        for start in range(0, len(paths), SCORED):
            images = [prepared(read_picture(one)[0], rule, None) for one in paths[start:][:SCORED]]
            scores += scorer(images, [str(prompt) for prompt in prompts[start:][:SCORED]])
        write_json(path, scores)
        return scores


def speed_of(chunks: Sequence[Chunk], vanilla: Sequence[Chunk] | None) -> Speed:
    """Return a strategy's speed from its chunks; ``vanilla``'s drew the same prompts."""
    counted = ([float(c.tokens - c.images) for c in chunks], [float(c.steps) for c in chunks])
    moved = [c.total_variation * c.tokens for c in chunks]
    warm = [c for c in chunks if c.warm]
    seconds: Reading
    faster: Reading
    if any(c.simulated for c in chunks):
        seconds = faster = not_measured("the device is simulated")
    elif not warm:
        seconds = faster = not_measured(
            "one chunk only, which started cold; draw more images or smaller chunks (--chunk)"
        )
    else:
        seconds = paired(share, [c.seconds for c in warm], [float(c.images) for c in warm])
        pairs = [] if vanilla is None else zip(vanilla, chunks, strict=True)
        both = [(a.seconds, b.seconds) for a, b in pairs if a.warm and b.warm]
        if both:
            faster = paired(share, *(list(side) for side in zip(*both, strict=True)))
        elif vanilla is None:
            faster = not_measured("vanilla is not among the strategies")
        else:
            faster = not_measured("no chunk was drawn warm by vanilla too")
    return Speed(
        seconds_per_image=seconds,
        speedup=faster,
        tokens_per_step=paired(share, *counted)
        if all(counted[1])
        else not_measured("no step was taken"),
        total_variation=paired(share, moved, [float(c.tokens) for c in chunks]),
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
            per_prompt=r.per_prompt,
            prompts_source=r.prompts_source,
            prompts_sha256=digest(r.prompts),
            resamples=r.resamples,
        )
        self.before = before
        if before is not None:
            check_same("the output's suite", before.question, self.suite.question, "file with -o")
        if len(r.prompts) < 2:
            raise RequestError("a suite needs two pictures at least; give more prompts")
        self.drawn = Drawn(pipeline, request)

    def run(self) -> Suite:
        """Draw and measure every strategy; return the table."""
        r, prompts = self.request, self.request.prompts
        self._check_prompts()
        text = all(isinstance(one, str) for one in prompts)
        host = r.host or self.pipeline.backend.simulated
        device = torch.device("cpu") if host else self.pipeline.backend.device
        skip = (
            {} if text else dict.fromkeys(("clip", "hpsv2", "imagereward"), "class ids are no text")
        )
        if r.name == "prompts" and r.reference is None:
            skip["features"] = "there are no real images; --suite coco takes them"
        elsewhere = {
            label: drawn_pictures(label, folder, len(prompts))
            for label, folder in r.pictures.items()
        }
        judges = Judges(r, device, self.say, skip)
        if isinstance(judges.real, Real):
            self.suite.reference = judges.real.about
        self.suite.columns = judges.columns()
        self.suite.published = published_rows(r.name)
        vanilla = self._full_vanilla()

        def judged(label: str, paths: Sequence[Path], folder: Path) -> dict[str, Reading]:
            self.say.start(f"{label}: figures")
            found = judges.measure(paths, folder)
            self.say.finish()
            return found

        for name, strategy in r.strategies:
            label = self._label(name)
            folder = self.drawn.of(strategy, label)
            paths = self.drawn.paths(folder)
            self.say.start(f"{label}: pictures", len(prompts))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=CUT)  # counted when they were checked
                chunks = self.drawn.draw(strategy, folder, self.say.advance)
            self.say.finish()
            self.pipeline.release_engines()  # the metrics' networks may need the room
            if strategy.name == "vanilla" and vanilla is None:
                vanilla = chunks
            row = Row(
                label=label,
                strategy=strategy,
                images=len(prompts),
                speed=speed_of(chunks, vanilla),
                metrics=judged(label, paths, folder),
                details=chunks[-1].details,
            )
            self._keep(row)
            if r.geneval is not None and r.captioned.metadata is not None:
                save_geneval(r.geneval / folder.name, paths, r.captioned.metadata, r.per_prompt)
        for label, paths in elsewhere.items():
            figures = judged(label, paths, r.work / f"elsewhere-{digest([label])[:8]}")
            unknown = not_measured("the pictures were drawn elsewhere")
            speed = Speed(**dict.fromkeys(Speed.model_fields, unknown))
            row = Row(label=label, strategy=None, images=len(paths), speed=speed, metrics=figures)
            self._keep(row)
        return self.suite

    def _label(self, name: str) -> str:
        """Return what a row is called: the strategy, and weights in fewer bits."""
        rounding = self.pipeline.model.rounding
        return name if rounding is None else f"{name}, {rounding.weights} weights"

    def _full_vanilla(self) -> list[Chunk] | None:
        """Return what plain decoding took with the model's own weights, where these are fewer bits."""
        if self.pipeline.model.rounding is None:
            return None
        for name, strategy in self.request.strategies:
            if strategy.name == "vanilla":
                chunks = [one for _, _, one in self.drawn.records(self.drawn.of(strategy, name))]
                whole = [one for one in chunks if one is not None]
                return whole if len(whole) == len(chunks) else None
        return None

    def _keep(self, row: Row) -> None:
        """Put a row into the table, with those of other strategies that the file had before."""
        old = self.before.rows if self.before is not None else []
        ours = {r.label: r for r in self.suite.rows} | {row.label: row}
        labels = [self._label(name) for name, _ in self.request.strategies]
        labels += self.request.pictures
        rest = [r for r in old if r.label not in labels]
        order = [ours[label] for label in labels if label in ours]
        self.suite.rows = order
        self.on_row(self.suite.model_copy(update={"rows": [*order, *rest]}))

    def _check_prompts(self) -> None:
        """Refuse what the model cannot draw, before any picture; captions are encoded and kept."""
        prompts = self.request.captioned.prompts
        self.say.start("prompts", len(prompts))
        for start in range(0, len(prompts), CHECKED):
            part = prompts[start : start + CHECKED]
            with warnings.catch_warnings(record=True) as told, self.pipeline.backend.inference():
                warnings.simplefilter("always")
                self.pipeline.check_prompts(part)
            cut = [one for one in told if re.match(CUT, str(one.message))]
            self.suite.prompts_cut += len(cut)
            for one in (one for one in told if one not in cut):
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
            self.say.advance(len(part))
        self.say.finish()
