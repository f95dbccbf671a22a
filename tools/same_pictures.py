"""Counts the tokens that differ from plain decoding's: whether a seed is a picture on a device.

    python tools/same_pictures.py --prompts 24 --seeds 4 --batches 1 3 8
    python tools/same_pictures.py --device cpu --option native=off --prompts 4 --seeds 1
    python tools/same_pictures.py --dtype bfloat16 --prompts 24 --seeds 1 --batches 1 8
    python tools/same_pictures.py --option native=off --prompts 24 --seeds 1 --margins

Every strategy draws the same prompts with the same seeds, in batches of every size, and each image is
compared with that of ``vanilla`` at batch 1. In float32 all are equal on every device, short of two
scores within rounding of each other; ``--margins`` counts how close plain decoding's two best scores lie.
In bfloat16 a pass over many positions may round unlike a pass over one: the table says after how many
tokens images part.

Prompts are lines of a file that nothing was tuned on (tools/lantern-emoji/composed.txt).
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lantern_accel
from lantern_accel.decoding.engines import engine_for
from lantern_accel.device.operations import TensorOps
from lantern_accel.files import write_whole
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.strategy.values import NoTree, Strategy

COMPOSED = Path(__file__).parent / "lantern-emoji" / "composed.txt"
STRATEGIES = ["vanilla", "auto", "scd", "sjd", "eagle", "eagle2", "self"]


def draw(pipeline: Pipeline, prompts: list[str], seeds: list[int], name: str, batch: int) -> Tensor:
    """Return the tokens of all prompts and seeds, int64 ``[seeds, prompts, tokens]``.

    A name such as ``eagle=chain:3`` is a strategy with a tree of its own.
    """
    strategy, _, tree = name.partition("=")
    settings: dict[str, Any] = {"tree": tree} if tree else {}
    rows = [
        pipeline.generate(
            prompts, seed=seed, strategy=strategy, batch_size=batch, **settings
        ).tokens
        for seed in seeds
    ]
    return torch.stack([torch.as_tensor(one) for one in rows])


def compare(found: Tensor, want: Tensor) -> str:
    """Return the cells of a table's row: images that differ, tokens before they part."""
    wrong = found != want
    images = wrong.any(-1)
    if not images.any():
        return f"0 of {images.numel()} | |"
    first = wrong[images].float().argmax(-1).float()
    return (
        f"{int(images.sum())} of {images.numel()} | "
        f"{float(first.median()):.0f} ({float(first.min()):.0f} to {float(first.max()):.0f}) |"
    )


class Margins(TensorOps):
    """The reference's operators, which note how far the two best scores of each draw lie apart."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def perturb(self, weights: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
        """As the reference's."""
        scores = super().perturb(weights, keys, positions)
        best = scores.double().topk(2, dim=-1).values
        self.found.append((1 - best[..., 1] / best[..., 0]).flatten())
        return scores


def margins(pipeline: Pipeline, prompts: list[str], seeds: list[int]) -> str:
    """Return how many draws of plain decoding have a second score within a part of the best."""
    model, noted = pipeline.model, Margins()
    sampling = pipeline.sampling()
    rows = model.family.rows(model, pipeline.conditions(prompts), sampling)
    strategy = Strategy(name="vanilla", tree=NoTree())
    engine = engine_for(model.target, None, noted, strategy, sampling, batch=len(prompts))
    for seed in seeds:
        given = engine.randomness(seed, list(range(len(prompts))))
        engine.start(rows.condition, rows.mask, given)
        engine.run()
    apart = torch.cat(noted.found)
    said = [f"{apart.numel():,} draws; the two best scores lie within"]
    for part in (1e-3, 1e-4, 1e-5, 1e-6):
        said.append(f"{part:g} of each other in {int((apart < part).sum()):,}")
    return ", ".join(said).replace("within,", "within")


def main() -> None:
    """Draw and compare what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--model", default="lantern-emoji")
    parser.add_argument("--file", type=Path, default=COMPOSED)
    parser.add_argument("--draw", type=int, default=2611, help="the seed that picks prompts")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 3, 8])
    parser.add_argument("--strategies", nargs="+", default=[*STRATEGIES, "eagle=chain:3"])
    parser.add_argument("--margins", action="store_true", help="count close scores instead")
    parser.add_argument("-o", "--output", type=Path, help="also write the table here")
    args = parser.parse_args()
    lines = sorted({one.strip() for one in args.file.read_text("utf-8").splitlines()} - {""})
    picked = random.Random(args.draw)
    prompts = picked.sample(lines, min(args.prompts, len(lines)))
    seeds = [0, 7, 2**32 + 7, 2**62 + 1][: args.seeds]
    seeds += [picked.randrange(2**63) for _ in range(args.seeds - len(seeds))]
    options = dict(one.split("=", 1) for one in args.option)
    if args.margins:
        with (
            torch.inference_mode(),
            lantern_accel.load(
                args.model, device="cpu", dtype="float32", options=options
            ) as pipeline,
        ):
            print(margins(pipeline, prompts, seeds))
        return
    said = [
        "| strategy | batch | images that differ | tokens before they part |",
        "|---|---|---|---|",
    ]
    print("\n".join(said), flush=True)
    different = False
    with lantern_accel.load(
        args.model, device=args.device, dtype=args.dtype, options=options or None
    ) as pipeline:
        want = draw(pipeline, prompts, seeds, "vanilla", 1)
        for name in args.strategies:
            for batch in args.batches:
                if (name, batch) == ("vanilla", 1):
                    continue
                found = draw(pipeline, prompts, seeds, name, batch)
                different |= not torch.equal(found, want)
                said.append(f"| {name} | {batch} | {compare(found, want)}")
                print(said[-1], flush=True)
    if args.output is not None:
        text = "\n".join(said) + "\n"
        write_whole(args.output, text)
    raise SystemExit(different and args.dtype == "float32")


if __name__ == "__main__":
    main()
