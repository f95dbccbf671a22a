"""Race `auto` against plain decoding, prompt by prompt: is it ever slower, and by how much is it faster?

    python tools/race_auto.py --prompts 24 --seeds 3 --batch 1 --batch 4 -o race-auto.json

Both decode every prompt with every seed in turns, after one warm-up each, several times; the fastest of a
seed's times counts, since noise makes times long and never short. A prompt's ratio is the median over its
seeds. Prompts are the reporting half of the built-in draw, or a file's, one per line. Constants
were chosen on the built-in ones, so figures for publication come from others:

    python tools/race_auto.py --file tools/lantern-emoji/prompts.txt --draw 2211 -o race-auto.json

A strategy's name may have a coupling behind it, to compare the two (docs/exactness.md):

    python tools/race_auto.py --file tools/lantern-emoji/composed.txt --strategy sjd@maximal

With a size, random weights of that size are raced, and drafts are accepted as the model's own were on the
same prompts and seeds, which are recorded first: its steps are the size's, its counts are replayed. A
draft head is made at that size too, so that its guesses cost what they would.

    python tools/race_auto.py --size llamagen-b-256 --file tools/lantern-emoji/prompts.txt --draw 2511
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: From a prompt's number, a strategy's name, a batch and a seed: tokens per second, and per step.
Draw = Callable[[int, str, int, int], tuple[float, float]]


def drawing(pipeline: Any, prompts: list[Any]) -> Draw:
    """Draw with a model as a user does."""

    def draw(number: int, name: str, batch: int, seed: int) -> tuple[float, float]:
        strategy, _, coupling = name.partition("@")
        stats = pipeline.generate(
            prompts[number],
            strategy=strategy,
            coupling=coupling or None,
            num_images=batch,
            batch_size=batch,
            seed=seed,
        ).stats
        return stats.tokens_per_second, stats.step_compression

    return draw


def replaying(pipeline: Any, replay: Any) -> Draw:
    """Decode with random weights, and accept drafts as was recorded."""

    def draw(number: int, name: str, batch: int, seed: int) -> tuple[float, float]:
        replay.request = number, seed
        strategy, sampling = pipeline.strategy(name), pipeline.sampling()
        done, seconds = pipeline.decode_only([number] * batch, strategy, sampling, seed)
        return done.tokens.numel() / seconds, done.step_compression

    return draw


def race(
    draw: Draw, prompts: list[Any], batch: int, seeds: int, repeats: int, strategies: list[str]
) -> Any:
    """Return, per prompt, the strategies' ratios of tokens per second to plain decoding, by seed."""
    for name in strategies:
        draw(0, name, batch, 0)
    rows = []
    for number, prompt in enumerate(prompts):
        found: dict[str, list[float]] = {name: [] for name in strategies[1:]}
        steps: dict[str, list[float]] = {name: [] for name in strategies[1:]}
        for seed in range(1, seeds + 1):
            rates = dict.fromkeys(strategies, 0.0)
            for repeat in range(repeats):
                order = strategies if (seed + repeat) % 2 else strategies[::-1]
                for name in order:
                    rate, compression = draw(number, name, batch, seed)
                    rates[name] = max(rates[name], rate)
                    if name in steps and not repeat:
                        steps[name].append(compression)
            for name in found:
                found[name].append(rates[name] / rates[strategies[0]])
        rows.append({"prompt": prompt, "ratios": found, "tokens_per_step": steps})
        words = ", ".join(f"{n} {statistics.median(r):.2f}x" for n, r in found.items())
        print(f"batch {batch}, {number + 1} of {len(prompts)}: {prompt}: {words}", file=sys.stderr)
    return rows


def summary(rows: list[dict[str, Any]], name: str) -> dict[str, float]:
    """Return the median and the least of the prompts' medians, and how many are below 0.97."""
    medians = sorted(statistics.median(row["ratios"][name]) for row in rows)
    return {
        "median": statistics.median(medians),
        "least": medians[0],
        "most": medians[-1],
        "below_0.97": sum(one < 0.97 for one in medians),
        "tokens_per_step": statistics.mean(
            statistics.mean(row["tokens_per_step"][name]) for row in rows
        ),
    }


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="lantern-emoji")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=int, default=24, help="how many")
    parser.add_argument("--file", type=Path, help="prompts, one per line")
    parser.add_argument("--draw", type=int, help="draw at random, none of the built-in; the seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help="times that a seed is decoded")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--strategy", action="append", help="others to race next to auto")
    parser.add_argument("--size", help="race random weights of this size, counts replayed")
    parser.add_argument("--threads", type=int, default=2, help="of the processor, with --size")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args(words)

    import lantern_accel
    from lantern_accel.files import write_json
    from lantern_accel.generation.built_in_prompts import REPORTING, TUNING, built_in_prompts
    from lantern_accel_profiles.measure.environment import describe

    strategies = ["vanilla", "auto", *(given.strategy or [])]
    result: dict[str, Any] = {"kind": "lantern_accel.race_auto", "batches": {}}
    with lantern_accel.load(given.model, device=given.device, dtype=given.dtype) as pipeline:
        lines = given.file.read_text(encoding="utf-8").split("\n") if given.file else []
        prompts = [line.strip() for line in lines if line.strip()] or built_in_prompts(pipeline)
        if given.draw is not None:
            known = {*TUNING, *REPORTING}
            prompts = sorted(set(prompts) - known)
            if not prompts:
                parser.error(
                    "--draw leaves out the built-in prompts, which were tuned on; name a --file"
                )
            prompts = random.Random(given.draw).sample(prompts, min(len(prompts), given.prompts))
        prompts = prompts[: given.prompts]
        environment = describe(pipeline.backend, pipeline.dtype)
        result["environment"] = environment.model_dump(mode="json")
        for batch in given.batch or [1]:
            raced, close = pipeline, None
            draw = drawing(pipeline, prompts)
            if given.size is not None:
                raced, draw = _sized(pipeline, prompts, batch, given)
                close = raced.close
                result |= {"size": given.size, "acceptance": f"replayed from {given.model}"}
            rows = race(draw, prompts, batch, given.seeds, given.repeats, strategies)
            found = {name: summary(rows, name) for name in strategies[1:]}
            asked = raced.strategy("auto")
            chosen = raced.measurements.resolve(asked, batch, raced.sampling())
            choice = raced.measurements.choice(asked, batch, raced.sampling())
            result["batches"][batch] = {
                "summary": found,
                "rows": rows,
                "auto": chosen.model_dump(mode="json"),
                "compared": {} if choice is None else choice.evidence,
            }
            of = f", {given.size}, acceptance replayed from {given.model}" if given.size else ""
            for name, figures in found.items():
                print(
                    f"batch {batch}, {name}{of}: "
                    + ", ".join(f"{k} {v:.2f}" for k, v in figures.items())
                )
            if given.output is not None:
                write_json(given.output, result)
            if close is not None:
                close()
    return 0


def _sized(pipeline: Any, prompts: list[Any], batch: int, given: Any) -> tuple[Any, Draw]:
    """Return a pipeline with random weights of a size, and how it draws: counts are replayed."""
    from replayed_counts import Recorder, Replay

    from lantern_accel.device.plugins import open_backend
    from lantern_accel.families.base import Conditions
    from lantern_accel.families.random_weights import random_model, sized, with_head
    from lantern_accel.generation.pipeline import Pipeline

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    recorder = Recorder(pipeline, prompts, batch, range(given.seeds + 1), say)
    options = {"threads": given.threads} if pipeline.backend.name == "cpu" else {}
    backend = open_backend(pipeline.backend.name, options)
    say(f"making random weights of {given.size}")
    with backend.inference():
        manifest = sized(given.size)
        if getattr(pipeline.model.target, "draft_head", None) is not None:
            manifest = with_head(manifest)  # its guesses are replayed
        model = random_model(manifest, backend, pipeline.dtype)
    large = Pipeline(model, backend, pipeline.dtype)

    def conditions(asked: Any, size: Any = None) -> Conditions:
        made = model.family.tiny_conditions(model, len(asked), 0)
        values = made.condition.to(backend.device)
        values = values.to(pipeline.dtype) if values.is_floating_point() else values
        return Conditions(values, made.mask.to(backend.device), made.shape)

    if (
        getattr(model.manifest.target, "conditioning", "text") == "class"
    ):  # prompts are their numbers
        return large, replaying(large, Replay(large, recorder))
    large.conditions = conditions  # type: ignore[method-assign,assignment]
    return large, replaying(large, Replay(large, recorder))


if __name__ == "__main__":
    sys.exit(main())
