"""Runs a suite: real images first, then each strategy's pictures and figures, each row kept at once."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from lantern_accel.errors import DataError, RequestError, StrategyError
from lantern_accel.evaluation.schema import Reading, Row, Suite
from lantern_accel.evaluation.suite.captions import Captioned, digest
from lantern_accel.evaluation.suite.drawing import (
    Chunk,
    Drawn,
    draw,
    drawn_pictures,
    picture_paths,
    records,
    save_geneval,
)
from lantern_accel.evaluation.suite.measuring import Tools, measure, speed_of, unknown_speed
from lantern_accel.evaluation.suite.networks import FeatureNetwork, Scorer
from lantern_accel.evaluation.suite.pictures import (
    Real,
    identity,
    look_once,
    read_reference,
    save_reference,
)
from lantern_accel.evaluation.suite.protocol import Preprocessing, Protocol, published_rows
from lantern_accel.generation.pipeline import Pipeline, Prompt
from lantern_accel.quality.progress import Progress
from lantern_accel.quality.set_metrics import FID_RESAMPLES, Reference
from lantern_accel.strategy.presets import PRESETS
from lantern_accel.strategy.values import AUTO, Sampling, Strategy

#: Prompts that are checked together, their captions encoded and kept.
CHECKED = 256
#: How the warning begins that a prompt was cut; thousands of them are a note of the table.
CUT = r"the (prompt|caption) has \d+ tokens"
#: A chunk has so many pictures unless somebody asks for another number.
CHUNK = 16


@dataclass
class SuiteRequest:
    """What a suite draws and measures with; ``networks`` and ``scorers`` stand in for published ones."""

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
    per_prompt: int = 1
    reference: Path | None = None
    save_reference: Path | None = None
    geneval: Path | None = None
    pictures: Mapping[str, Path] = field(default_factory=dict)
    weights: Mapping[str, Path] = field(default_factory=dict)
    host: bool = False
    resamples: int = FID_RESAMPLES
    networks: Mapping[str, FeatureNetwork] = field(default_factory=dict)
    scorers: Mapping[str, Scorer] = field(default_factory=dict)

    @property
    def prompts(self) -> list[str | int]:
        """The prompt of each picture."""
        return [one for one in self.captioned.prompts for _ in range(self.per_prompt)]


def choose_strategies(
    pipeline: Pipeline, words: Sequence[str], sampling: Sampling, batch: int, example: Prompt
) -> list[tuple[str, Strategy]]:
    """Return labels and strategies of names, presets' names, and names with settings.

    Each is resolved as a request for ``example`` would be, with this sampling and batch.
    ``lantern:k=10,delta=0.4`` is a name with settings; a ``.json`` file holds a strategy as tables
    write it. Raises :class:`StrategyError` or :class:`RequestError` for what the model cannot do.
    """
    found: dict[str, Strategy] = {}
    for word in words:
        parts = [word] if ":" in word or word.endswith(".json") else word.split(",")
        for label in (part.strip() for part in parts):
            if label:
                found[label] = _strategy(pipeline, label, sampling, batch, example)
    for strategy in found.values():
        pipeline.engines.check(strategy, sampling)
    if len(set(map(_known, found.values()))) < len(found):
        raise RequestError(f"two of the strategies {', '.join(found)} are the same; leave one out")
    if not found:
        raise RequestError("--strategy names none; give names such as vanilla,eagle,lantern++")
    return list(found.items())


def _known(strategy: Strategy) -> str:
    return strategy.model_dump_json(exclude={"name"}) + (
        strategy.name if strategy.name == AUTO else ""
    )


def _strategy(
    pipeline: Pipeline, label: str, sampling: Sampling, batch: int, example: Prompt
) -> Strategy:
    settings: dict[str, Any] = {"batch_size": batch, "sampling": sampling}
    if label.endswith(".json"):
        from lantern_accel.files import read_text_file

        try:
            strategy = Strategy.model_validate_json(read_text_file(Path(label)))
        except (OSError, ValueError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or "it is no strategy"
            raise StrategyError(f"{label} cannot be read as a strategy ({why})") from None
        return pipeline.request(example, strategy=strategy, **settings).strategy
    name, colon, text = label.partition(":")
    if name in {one.name for one in PRESETS}:
        return pipeline.request(example, preset=name, **settings).strategy
    if not colon:
        return pipeline.request(example, strategy=name, **settings).strategy
    changes: dict[str, Any] = {}
    for pair in text.split(","):
        key, equals, value = pair.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise RequestError(
                f"the strategy {label!r} cannot be read; write NAME:SETTING=VALUE,SETTING=VALUE, such as "
                "lantern++:k=10,lambda=2"
            )
        field_ = {"lambda": "lam"}.get(key.strip(), key.strip().replace("-", "_"))
        changes[field_] = _value(value.strip())
    return pipeline.request(example, strategy=name, **changes, **settings).strategy


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


class SuiteRun:
    """One suite on one pipeline; ``on_row`` gets the table after each strategy."""

    def __init__(
        self,
        pipeline: Pipeline,
        request: SuiteRequest,
        *,
        before: Suite | None = None,
        on_row: Callable[[Suite], None] = lambda suite: None,
        progress: Progress | None = None,
    ) -> None:
        self.pipeline, self.request, self.on_row = pipeline, request, on_row
        self.say = Progress() if progress is None else progress
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
        if before is not None and (other := before.same_question(self.suite)):
            raise DataError(
                f"the output file has a suite with another {' and '.join(other)}; name another "
                "file with -o"
            )
        if len(r.prompts) < 2:
            raise RequestError("a suite needs two pictures at least; give more prompts")
        self.drawn = Drawn(r.work, self._identity())

    def _identity(self) -> dict[str, Any]:
        """Return all that the pictures depend on, the strategy excepted."""
        p, s = self.pipeline, self.suite
        return {
            "model": p.model.manifest.name,
            "weights_hash": p.model.weights_hash,
            "backend": p.backend.name,
            "device": p.backend.facts().name,
            "dtype": str(p.dtype).removeprefix("torch."),
            "seed": s.seed,
            "sampling": s.sampling,
            "chunk": s.chunk,
            "batch": s.batch,
            "images_per_prompt": s.per_prompt,
            "prompts": s.prompts_sha256,
        }

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
        tools = Tools.load(
            r.protocol, r.weights, device, self.say.log, r.networks, r.scorers, skip=skip
        )
        real, covered = self._real(tools)
        self.suite.columns = tools.columns()
        self.suite.published = published_rows(r.name)
        vanilla = self._full_vanilla()

        def judged(label: str, paths: Sequence[Path], folder: Path) -> dict[str, Reading]:
            self.say.start(f"{label}: figures")
            advance = self.say.advance
            found = measure(paths, prompts, folder, tools, real, covered, r.resamples, advance)
            self.say.finish()
            return found

        for name, strategy in r.strategies:
            label = self._label(name)
            folder = self.drawn.of(strategy, label)
            self.say.start(f"{label}: pictures", len(prompts))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=CUT)  # counted when they were checked
                chunks = draw(
                    self.pipeline,
                    prompts,
                    strategy,
                    r.sampling,
                    folder,
                    seed=r.seed,
                    chunk=r.chunk,
                    batch=r.batch,
                    advance=self.say.advance,
                )
            self.say.finish()
            self.pipeline.release_engines()  # the metrics' networks may need the room
            if strategy.name == "vanilla" and vanilla is None:
                vanilla = chunks
            paths = picture_paths(folder, len(prompts))
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
            speed = unknown_speed("the pictures were drawn elsewhere")
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
                folder = self.drawn.of(strategy, name)
                return records(folder, self.suite.count, self.suite.chunk)
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

    def _real(self, tools: Tools) -> tuple[Real | str, Real | str]:
        """Return the real images as both networks see them, or why there are none."""
        p = tools.protocol
        found: list[Real | str] = []
        pairs = (
            ("network", tools.network, p.preprocessing),
            ("manifold", tools.manifold, p.manifold_preprocessing),
        )
        seen: dict[str, Real] = {}
        for role, network, rule in pairs:
            if network is None:
                found.append(tools.reasons[role])
                continue
            key = str(identity(network, rule))
            if key not in seen:
                made = self._reference(role, network, rule)
                if isinstance(made, str):
                    found.append(made)
                    continue
                seen[key] = made
                if role == "network":
                    self.suite.reference = made.about
            found.append(seen[key])
        return found[0], found[1]

    def _reference(self, role: str, network: FeatureNetwork, rule: Preprocessing) -> Real | str:
        r, paths = self.request, self.request.captioned.images
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
