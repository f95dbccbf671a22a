"""Tokens per step of every source of drafts in a window: the table in docs/jacobi.md.

    python tools/window_sources.py --windows 16,64 --variants "" uniform,passes=0 -o sources.json

All prompts decode in one batch: how many tokens a step gives does not depend on load, batch or device. A
row is written as soon as it is measured; a run that was interrupted goes on. Prompts are words drawn at
random from the text model's vocabulary, whole words of its training captions, in two halves: choose on
``tuning``, report on ``reporting``. With ``--file`` they are lines of a file, drawn at random among those
that nothing was chosen on:

    python tools/window_sources.py --file tools/lantern-emoji/prompts.txt --draw 1122 --prompts 48
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import lantern_accel
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.measure.prompts import REPORTING, TUNING
from lantern_accel.strategy.trees import parse_tree
from lantern_accel.strategy.values import Strategy, Window

CAPTIONS = Path(__file__).parent / "lantern-emoji" / "prompts.txt"
#: Prompts of low acceptance, shown next to the mean.
HARD = ("dog face", "rocket")
SEED = 19


def words(pipeline: Pipeline, half: str, count: int) -> list[str]:
    """Return ``count`` words of the vocabulary that captions have whole, drawn with a fixed seed."""
    captions = {word for line in CAPTIONS.read_text("utf-8").split("\n") for word in line.split()}
    folder = Path(lantern_accel.__file__).parent / "assets" / "lantern-emoji"
    tokenizer = json.loads((folder / "text_tokenizer.json").read_text("utf-8"))
    known = sorted(w for w in tokenizer["model"]["vocab"] if w in captions and w.isalpha())
    known = [word for word in known if len(word) > 3]
    random.Random(SEED).shuffle(known)
    chosen = known[half == "reporting" :: 2][:count]
    pipeline.check_prompts(chosen)
    return chosen


def captions(pipeline: Pipeline, file: Path, draw: int, count: int) -> list[str]:
    """Return ``count`` lines of a file, drawn with the seed ``draw``, none of them a built-in prompt."""
    lines = {line.strip() for line in file.read_text("utf-8").split("\n")}
    known = sorted(lines - {"", *TUNING, *REPORTING, *HARD})
    chosen = random.Random(draw).sample(known, min(count, len(known)))
    pipeline.check_prompts(chosen)
    return chosen


def plan(args: argparse.Namespace) -> Iterator[tuple[str, Strategy]]:
    """Yield what is measured: a label and a strategy, with every coupling that is asked for."""
    for coupling in args.couplings:
        said = "" if coupling == "invariant" else f", {coupling}"
        for length in args.windows:
            for text in args.variants:
                window = parse_tree(f"window:{length},{text}" if text else f"window:{length}")
                assert isinstance(window, Window)
                yield f"{length} {text or 'scd'}{said}", Strategy(tree=window, coupling=coupling)
        for tree in args.trees:
            one = Strategy(name="eagle", tree=parse_tree(tree), coupling=coupling)
            yield f"eagle {tree}{said}", one


def measure(
    pipeline: Pipeline, strategy: Strategy, prompts: list[str], seeds: int
) -> dict[str, Any]:
    """Decode all prompts; return tokens per step of each, over ``seeds`` images."""
    sampling = pipeline.sampling()
    steps = torch.zeros(len(prompts))
    first = 0.0
    for seed in range(seeds):
        done, _ = pipeline.decode_only(prompts, strategy, sampling, seed)
        steps += done.steps
        first += float(done.histogram[:, 0].sum() / done.histogram.sum()) / seeds
    pipeline.release_engines()
    tokens = seeds * (done.tokens.shape[1] - 1)
    rates = (tokens / steps).tolist()
    return {
        "rates": dict(zip(prompts, rates, strict=True)),
        "mean": sum(rates) / len(rates),
        "pooled": tokens * len(prompts) / float(steps.sum()),
        "one_token": first,
    }


def row(label: str, found: dict[str, Any]) -> str:
    """Return one line of the table."""
    random_ones = {k: v for k, v in found["rates"].items() if k not in HARD}
    rates = list(random_ones.values())
    hard = " | ".join(f"{found['rates'].get(p, float('nan')):.2f}" for p in HARD)
    return (
        f"| {label} | {sum(rates) / len(rates):.2f} ({min(rates):.2f} to {max(rates):.2f}) | {hard} "
        f"| {found['pooled']:.2f} | {found['one_token']:.0%} |"
    )


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--windows", type=lambda t: [int(n) for n in t.split(",")], default=[16])
    parser.add_argument(
        "--variants",
        nargs="*",
        default=[""],
        help="what follows window:N, such as uniform,passes=0",
    )
    parser.add_argument(
        "--trees", nargs="*", default=[], help="trees of the drafter, such as chain:4"
    )
    parser.add_argument(
        "--couplings", nargs="*", choices=["invariant", "maximal"], default=["invariant"]
    )
    parser.add_argument("--half", choices=["tuning", "reporting"], default="reporting")
    parser.add_argument("--prompts", type=int, default=14)
    parser.add_argument("--file", type=Path, help="prompts, one per line, instead of words")
    parser.add_argument("--draw", type=int, default=1122, help="seed that draws them")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    settings = {"half": args.half, "prompts": args.prompts, "seeds": args.seeds}
    if args.file:
        settings = {**settings, "half": args.file.name, "draw": args.draw}
    report: dict[str, Any] = {"settings": settings, "rows": {}}
    if args.output and args.output.exists():
        stored = json.loads(args.output.read_text("utf-8"))
        if stored["settings"] != settings:
            raise SystemExit(f"{args.output} holds other settings; name another file")
        report = stored
    print(
        "| window and drafts | tokens per step (least to most) | dog face | rocket | pooled | one token |"
    )
    print("|---|---|---|---|---|---|")
    with lantern_accel.load(device="cpu", dtype="float32") as pipeline:
        if args.file:
            drawn = captions(pipeline, args.file, args.draw, args.prompts)
        else:
            drawn = words(pipeline, args.half, args.prompts)
        prompts = [*drawn, *HARD]
        for label, strategy in plan(args):
            if label not in report["rows"]:
                report["rows"][label] = measure(pipeline, strategy, prompts, args.seeds)
                if args.output:
                    args.output.write_text(json.dumps(report, indent=1), "utf-8")
            print(row(label, report["rows"][label]), flush=True)


if __name__ == "__main__":
    main()
