"""Tokens that a plain pass's bytes bring with drafts of the model's own weights, counted.

    python tools/self_drafts.py --prompts 24 self:16,int6,window=16 self:8,int6

A step reads the copy's weights once a guessing pass and the full ones once; a plain pass reads the full
ones. Counted in weights alone: caches and the rows that a check multiplies are left out, so this is no
speed. Nothing was trained to draft, but with ``--head``. In float32, on the built-in prompts of the
reporting half, or on a file's, one per line:

    python tools/self_drafts.py --file tools/lantern-emoji/composed.txt self:24,int6,window=24,passes=6
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lantern_accel
from lantern_accel.measure.prompts import built_in_prompts
from lantern_accel.nn.rounding import ROUNDINGS
from lantern_accel.prompts import read_prompts
from lantern_accel.strategy.trees import parse_tree
from lantern_accel.strategy.values import SelfDrafts, Strategy


def main() -> None:
    """Count what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("drafts", nargs="+")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--bits", type=float, default=16, help="of a full weight")
    parser.add_argument("--half", choices=["tuning", "reporting"], default="reporting")
    parser.add_argument(
        "--file", type=Path, help="prompts, one per line, in place of built-in ones"
    )
    parser.add_argument(
        "--head", action="store_true", help="the model's draft head guesses in the copy's windows"
    )
    args = parser.parse_args()
    print("| drafts | tokens a step | plain passes' bytes a step | tokens a plain pass's bytes |")
    print("|---|---|---|---|")
    with lantern_accel.load(device="cpu", dtype="float32") as pipeline:
        if not args.head:  # nothing that was trained to draft
            pipeline.model.target.draft_head = None
        if args.file is None:
            prompts = built_in_prompts(pipeline, args.half)
        else:
            prompts = [str(one) for one in read_prompts(args.file)]
        prompts = prompts[: args.prompts]
        for text in args.drafts:
            tree = parse_tree(text)
            assert isinstance(tree, SelfDrafts)
            done, _ = pipeline.decode_only(
                prompts, Strategy(name="self", tree=tree), pipeline.sampling(), 7
            )
            cost = 1 + tree.copy_passes * ROUNDINGS[tree.weights].bits_per_weight / args.bits
            tokens = done.step_compression
            print(f"| {text} | {tokens:.2f} | {cost:.2f} | {tokens / cost:.2f} |", flush=True)
            pipeline.release_engines()


if __name__ == "__main__":
    main()
