"""Measure what rounding a model's weights costs, by format: the table in docs/fewer_bytes.md.

    python tools/rounding_formats.py --prompts 24 int8 int4:64 int4:32:symmetric

Total variation per token between the rounded model's distribution and the full one's, after guidance and
filters, along images that the full model drew; in float32, so that it is the rounding's alone. A format
is BITS, or BITS:GROUP, or BITS:GROUP:symmetric. Prompts are the built-in ones of the half that
nothing is chosen by with ``--half reporting``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import lantern_accel
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.generation.rounding_price import PLAIN, next_tokens
from lantern_accel.measure.prompts import built_in_prompts
from lantern_accel.nn.rounding import Rounding, rounded
from lantern_accel.nn.transformer import Projection

AT_ONCE = 4


def read_format(text: str) -> Rounding:
    """Read ``int4:64:symmetric``."""
    bits, _, rest = text.partition(":")
    group, _, kind = rest.partition(":")
    return Rounding(text, int(bits.removeprefix("int")), int(group or 0), kind == "symmetric")


def rows(pipeline: Pipeline, prompts: list[Any], tokens: Tensor) -> Iterator[Tensor]:
    """Yield the model's distributions along images, ``[b, N, V]``."""
    model, sampling = pipeline.model, pipeline.sampling()
    for start in range(0, len(prompts), AT_ONCE):
        given = pipeline.conditions(prompts[start : start + AT_ONCE])
        here = tokens[start : start + AT_ONCE]
        yield next_tokens(model, pipeline.backend, given, here, sampling)


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("formats", nargs="+")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--half", choices=["tuning", "reporting"], default="tuning")
    parser.add_argument("--model", default="lantern-emoji")
    args = parser.parse_args()
    options = {"native": "off"}
    with lantern_accel.load(args.model, device="cpu", dtype="float32", options=options) as pipeline:
        prompts = built_in_prompts(pipeline, args.half)[: args.prompts]
        tokens = torch.cat(
            [pipeline.decode_only([p], PLAIN, pipeline.sampling(), 7)[0].tokens for p in prompts]
        )
        with torch.inference_mode():
            exact = list(rows(pipeline, prompts, tokens))
            kept = {
                part: part.packed.to_dense() if part.packed is not None else part.weight
                for part in pipeline.model.target.modules()
                if isinstance(part, Projection)
            }
            print(
                "| format | bits per weight | TV per token, mean | median | by image, least to most |"
            )
            print("|---|---|---|---|---|", flush=True)
            for text in args.formats:
                how = read_format(text)
                for part, weight in kept.items():
                    part.packed = rounded(weight, how).dense(torch.float32)
                found = torch.cat(
                    [
                        0.5 * (p - q).abs().sum(-1)
                        for p, q in zip(exact, rows(pipeline, prompts, tokens), strict=True)
                    ]
                )
                image = found.mean(1)
                print(
                    f"| {text} | {how.bits_per_weight:.3g} | {found.mean():.4f} | {found.median():.4f} "
                    f"| {image.min():.4f} to {image.max():.4f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
