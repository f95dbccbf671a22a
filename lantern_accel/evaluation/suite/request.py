"""What a suite is asked for: prompts, strategies by name or with settings, networks, folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lantern_accel.errors import RequestError, StrategyError
from lantern_accel.evaluation.suite.captions import Captioned
from lantern_accel.evaluation.suite.networks import FeatureNetwork, Scorer
from lantern_accel.evaluation.suite.protocol import Protocol
from lantern_accel.files import read_text_file
from lantern_accel.generation.pipeline import Pipeline, Prompt
from lantern_accel.quality.set_metrics import FID_RESAMPLES
from lantern_accel.strategy.presets import PRESETS
from lantern_accel.strategy.values import AUTO, Sampling, Strategy

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
    name, colon, text = label.partition(":")
    asked: dict[str, Any] = {"strategy": name}
    if label.endswith(".json"):
        try:
            asked["strategy"] = Strategy.model_validate_json(read_text_file(Path(label)))
        except (OSError, ValueError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or "it is no strategy"
            raise StrategyError(f"{label} cannot be read as a strategy ({why})") from None
    elif name in {one.name for one in PRESETS}:
        asked = {"preset": name}
    else:
        for pair in text.split(",") if colon else ():
            key, _, value = (part.strip() for part in pair.partition("="))
            if not key or not value:
                raise RequestError(
                    f"the strategy {label!r} cannot be read; write NAME:SETTING=VALUE,SETTING=VALUE, "
                    "such as lantern++:k=10,lambda=2"
                )
            asked[{"lambda": "lam"}.get(key, key.replace("-", "_"))] = _value(value)
    return pipeline.request(example, **asked, batch_size=batch, sampling=sampling).strategy


def _value(text: str) -> Any:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text
