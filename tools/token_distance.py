"""Measure how far dtypes, kernels and rounded weights move the distribution of the next token.

    python tools/token_distance.py float32 bfloat16 bfloat16,native=off
    python tools/token_distance.py --file tools/lantern-emoji/composed.txt bfloat16 bfloat16,int8

Total variation per token from the first one's distribution, after guidance and filters, along images that
the first one draws. Each is a dtype, with the weights and a backend's options behind it. Prompts are the
built-in ones of the half that nothing is chosen by, or a file's, one per line.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from torch import Tensor

import lantern_accel
from lantern_accel.families.base import Prompt
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.generation.rounding_price import PLAIN, next_tokens
from lantern_accel.measure.prompts import built_in_prompts
from lantern_accel.nn.rounding import FULL, ROUNDINGS
from lantern_accel.prompts import read_prompts

SEED = 7


def opened(text: str, model: str, device: str) -> Pipeline:
    """Open what ``bfloat16,int8,native=off`` says."""
    dtype, *rest = text.split(",")
    weights = next((word for word in rest if word in ROUNDINGS), FULL)
    options = dict(word.split("=", 1) for word in rest if "=" in word)
    return lantern_accel.load(model, device=device, dtype=dtype, weights=weights, options=options)


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kinds", nargs="+", metavar="KIND", help="such as bfloat16,int8,native=off")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--half", choices=["tuning", "reporting"], default="reporting")
    parser.add_argument("--file", type=Path, help="prompts, one per line")
    parser.add_argument("--model", default="lantern-emoji")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        all_ = [stack.enter_context(opened(t, args.model, args.device)) for t in args.kinds]
        first = all_[0]
        sampling = first.sampling()
        if args.file is None:
            prompts = built_in_prompts(first, args.half)
        else:
            prompts = [str(one) for one in read_prompts(args.file)]
        moved: dict[str, list[float]] = {kind: [] for kind in args.kinds[1:]}
        for number, prompt in enumerate(prompts[: args.prompts]):
            tokens = first.decode_only([prompt], PLAIN, sampling, SEED + number)[0].tokens
            rows = [said(one, prompt, tokens) for one in all_]
            for kind, row in zip(args.kinds[1:], rows[1:], strict=True):
                moved[kind].append(float(0.5 * (row - rows[0]).abs().sum(-1).mean()))
    print(f"| from {args.kinds[0]} to | TV per token, mean | by image, least to most |")
    print("|---|---|---|")
    for kind, found in moved.items():
        mean = sum(found) / len(found)
        print(f"| {kind} | {mean:.4f} | {min(found):.4f} to {max(found):.4f} |")


def said(pipeline: Pipeline, prompt: Prompt, tokens: Tensor) -> Tensor:
    """Return a pipeline's distributions along an image, on the host."""
    with pipeline.backend.inference():
        model, given = pipeline.model, pipeline.conditions([prompt])
        found = next_tokens(model, pipeline.backend, given, tokens, pipeline.sampling())
        return found.cpu().double()


if __name__ == "__main__":
    main()
