"""The columns of a suite, and one strategy's figures in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from lantern_accel.evaluation.schema import Metric, Reading, Speed
from lantern_accel.evaluation.suite.drawing import Chunk
from lantern_accel.evaluation.suite.networks import (
    FeatureNetwork,
    Scorer,
    load_network,
    load_scorer,
)
from lantern_accel.evaluation.suite.pictures import (
    Advance,
    Real,
    kept_path,
    look_once,
    prepared,
    read_picture,
    stats_of,
)
from lantern_accel.evaluation.suite.protocol import Preprocessing, Protocol
from lantern_accel.evaluation.suite.weights import Tell, Unavailable
from lantern_accel.files import read_json_file, write_json
from lantern_accel.quality.interval import mean, paired, share
from lantern_accel.quality.set_metrics import (
    frechet,
    inception_score,
    precision_recall,
    unpaired_distance,
)
from lantern_accel.records import not_measured

SCORERS = {"clip": "CLIP score", "hpsv2": "HPSv2", "imagereward": "ImageReward"}
DISTANCES = ("fid", "fid_infinity", "kid")
COVERING = ("precision", "recall")
MOMENTS_ONLY = "the reference has moments and no images"
#: Kernel matrices of more images would take gigabytes.
MOST_KID = 10_000
#: Pictures that a scorer sees together.
SCORED = 16


@dataclass
class Tools:
    """The networks of a suite's metrics; those that could not be had, with reasons."""

    protocol: Protocol
    network: FeatureNetwork | None = None
    manifold: FeatureNetwork | None = None
    scorers: dict[str, Scorer] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(
        cls,
        protocol: Protocol,
        given: Mapping[str, Path],
        device: torch.device,
        tell: Tell,
        networks: Mapping[str, FeatureNetwork] | None = None,
        scorers: Mapping[str, Scorer] | None = None,
        skip: Mapping[str, str] | None = None,
    ) -> Tools:
        """Load what the protocol names; ``networks`` and ``scorers`` stand in their place.

        ``skip``: keys (``features``, ``clip``, ...) that are left out, with reasons.
        """
        tools = cls(protocol, reasons=dict(skip or {}))
        made: dict[str, FeatureNetwork] = dict(networks or {})
        for role, name in (("network", protocol.network), ("manifold", protocol.manifold)):
            if "features" in tools.reasons:
                tools.reasons[role] = tools.reasons["features"]
                continue
            try:
                if name not in made:
                    made[name] = load_network(name, given, device, tell)
                setattr(tools, role, made[name])
            except Unavailable as reason:
                tools.reasons[role] = str(reason)
        for key in SCORERS:
            if key in tools.reasons:
                continue
            try:
                if scorers is not None and key in scorers:
                    tools.scorers[key] = scorers[key]
                else:
                    tools.scorers[key] = load_scorer(key, protocol, given, device, tell)
            except Unavailable as reason:
                tools.reasons[key] = str(reason)
        return tools

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


def measure(
    paths: Sequence[Path],
    prompts: Sequence[str | int],
    folder: Path,
    tools: Tools,
    real: Real | str,
    covered: Real | str,
    resamples: int,
    advance: Advance = lambda count: None,
) -> dict[str, Reading]:
    """Return a strategy's figure in every column.

    ``real`` and ``covered``: the real images as the networks of FID and of precision and recall see
    them, or why there are none. ``folder`` keeps features and scores for the next run.
    """
    p, found = tools.protocol, dict[str, Reading]()
    if tools.network is None:
        found |= _none((*DISTANCES, "inception_score"), tools.reasons["network"])
    else:
        seen = look_once(paths, tools.network, p.preprocessing, folder, "features", advance)
        found |= _distances(seen.features, real, resamples)
        if seen.logits is None:
            found |= _none(("inception_score",), f"{tools.network.name} has no classes")
        else:
            logits = seen.logits
            found["inception_score"] = _tried(lambda: inception_score(logits, p.is_splits))
    if tools.manifold is None:
        found |= _none(COVERING, tools.reasons["manifold"])
    elif isinstance(covered, str) or covered.features is None:
        found |= _none(COVERING, covered if isinstance(covered, str) else MOMENTS_ONLY)
    else:
        rule = p.manifold_preprocessing
        seen = look_once(paths, tools.manifold, rule, folder, "features", advance)
        try:
            both = precision_recall(seen.features, covered.features, p.k)
            found |= dict(zip(COVERING, both, strict=True))
        except ValueError as error:  # so few images have none
            found |= _none(COVERING, str(error))
    for key in SCORERS:
        if key not in tools.scorers:
            found |= _none((key,), tools.reasons[key])
            continue
        scores = _scores(paths, prompts, folder, key, tools.scorers[key], p.clip_preprocessing)
        found[key] = mean(scores)
    return found


def _none(keys: Sequence[str], reason: str) -> dict[str, str]:
    """Return columns that could not be measured."""
    return dict.fromkeys(keys, not_measured(reason))


def _tried(figure: Callable[[], Reading]) -> Reading:
    """Return a figure, or the reason for which so few images have none."""
    try:
        return figure()
    except ValueError as error:
        return not_measured(str(error))


def _distances(features: np.ndarray, real: Real | str, resamples: int) -> Mapping[str, Reading]:
    if isinstance(real, str):
        return _none(DISTANCES, real)
    both = frechet(features, real.moments, resamples)
    kid: Reading = not_measured(MOMENTS_ONLY)
    if real.features is not None:
        ours, theirs = (x[:MOST_KID].astype(np.float64) for x in (features, real.features))
        kid = unpaired_distance(ours, theirs)
    return {"fid": both.value, "fid_infinity": both.infinity, "kid": kid}


def _scores(
    paths: Sequence[Path],
    prompts: Sequence[str | int],
    folder: Path,
    key: str,
    scorer: Scorer,
    rule: Preprocessing,
) -> list[float]:
    """Return a score per picture, from ``folder`` where it was stored for the same ones."""
    depends = [scorer.name, scorer.note, rule.model_dump(mode="json"), list(prompts)]
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


def unknown_speed(reason: str) -> Speed:
    """Return the speed of pictures whose drawing was not seen."""
    unknown = not_measured(reason)
    return Speed(
        seconds_per_image=unknown, speedup=unknown, tokens_per_step=unknown, total_variation=unknown
    )


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
        if vanilla is None:
            faster = not_measured("vanilla is not among the strategies")
        else:
            both = [
                (a.seconds, b.seconds)
                for a, b in zip(vanilla, chunks, strict=True)
                if a.warm and b.warm
            ]
            faster = (
                paired(share, *([list(side) for side in zip(*both, strict=True)]))
                if both
                else not_measured("no chunk was drawn warm by vanilla too")
            )
    return Speed(
        seconds_per_image=seconds,
        speedup=faster,
        tokens_per_step=_tried(lambda: paired(share, *counted))
        if all(counted[1])
        else not_measured("no step was taken"),
        total_variation=paired(share, moved, [float(c.tokens) for c in chunks]),
    )
