"""Race `auto` against plain decoding, prompt by prompt: is it ever slower, and by how much is it faster?

    python tools/race_auto.py --prompts 24 --seeds 3 --batch 1 --batch 4 -o race-auto.json

Both decode every prompt with every seed in turns, after one warm-up each, several times; the fastest of a
seed's times counts, since noise makes times long and never short. A prompt's ratio is the median over its
seeds. Prompts are the reporting half of the built-in draw, or a file's, one per line. Constants
were chosen on the built-in ones, so figures for publication come from others:

    python tools/race_auto.py --file tools/lantern-emoji/prompts.txt --draw 2211 -o race-auto.json
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from pathlib import Path
from typing import Any


def race(
    pipeline: Any, prompts: list[Any], batch: int, seeds: int, repeats: int, strategies: list[str]
) -> Any:
    """Return, per prompt, the strategies' ratios of tokens per second to plain decoding, by seed."""
    for name in strategies:
        pipeline.generate(prompts[0], strategy=name, num_images=batch, batch_size=batch, seed=0)
    rows = []
    for number, prompt in enumerate(prompts):
        found: dict[str, list[float]] = {name: [] for name in strategies[1:]}
        steps: dict[str, list[float]] = {name: [] for name in strategies[1:]}
        for seed in range(1, seeds + 1):
            rates = dict.fromkeys(strategies, 0.0)
            for repeat in range(repeats):
                order = strategies if (seed + repeat) % 2 else strategies[::-1]
                for name in order:
                    stats = pipeline.generate(
                        prompt, strategy=name, num_images=batch, batch_size=batch, seed=seed
                    ).stats
                    rates[name] = max(rates[name], stats.tokens_per_second)
                    if name in steps and not repeat:
                        steps[name].append(stats.step_compression)
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
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args(words)

    import lantern_accel
    from lantern_accel.files import write_json
    from lantern_accel.measure.environment import describe
    from lantern_accel.measure.prompts import REPORTING, TUNING, built_in_prompts

    strategies = ["vanilla", "auto", *(given.strategy or [])]
    result: dict[str, Any] = {"kind": "lantern_accel.race_auto", "batches": {}}
    with lantern_accel.load(given.model, device=given.device, dtype=given.dtype) as pipeline:
        lines = given.file.read_text(encoding="utf-8").split("\n") if given.file else []
        prompts = [line.strip() for line in lines if line.strip()] or built_in_prompts(pipeline)
        if given.draw is not None:
            known = {*TUNING, *REPORTING}
            prompts = sorted(set(prompts) - known)
            prompts = random.Random(given.draw).sample(prompts, min(len(prompts), given.prompts))
        prompts = prompts[: given.prompts]
        environment = describe(pipeline.backend, pipeline.dtype)
        result["environment"] = environment.model_dump(mode="json")
        for batch in given.batch or [1]:
            rows = race(pipeline, prompts, batch, given.seeds, given.repeats, strategies)
            found = {name: summary(rows, name) for name in strategies[1:]}
            asked = pipeline.strategy("auto")
            chosen = pipeline.auto.resolve(asked, batch, pipeline.sampling())
            result["batches"][batch] = {
                "summary": found,
                "rows": rows,
                "auto": chosen.model_dump(mode="json"),
            }
            for name, figures in found.items():
                print(
                    f"batch {batch}, {name}: "
                    + ", ".join(f"{k} {v:.2f}" for k, v in figures.items())
                )
            if given.output is not None:
                write_json(given.output, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
