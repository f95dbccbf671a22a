"""Put our windows next to the authors' sampler on the same tiny random weights.

    python tools/race_windows.py --sjd CLONE

with a clone of tyshiwo1/Accelerating-T2I-AR-with-SJD. Nothing of it is copied: the
classes that test, resample and match are taken from the clone's own file. They are driven as the
generation loop does it (batch 1, one-hot random fresh drafts, the window filled up), on our model's
distributions, so that only the samplers differ. Reported: tokens per step on 36-token images, and how
far the law of 4-token images is from the target's own (chi-square, in standard deviations).
"""

from __future__ import annotations

import argparse
import ast
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lantern_accel.decoding.jacobi import JacobiEngine
from lantern_accel.decoding.logits import distribution
from lantern_accel.device.operations import TensorOps
from lantern_accel.families.llamagen.model import LlamaGenConfig, LlamaGenGPT
from lantern_accel.strategy.values import Sampling, Strategy, Window

SAMPLERS = {"sjd": "scheduler/jacobi_iteration_lumina_mgpt.py"}
NAMES = ("SpeculativeSampler", "prefix_matching_next_tokens", "sampling_logits2tokens")
PREFIX, WINDOW = 3, 8


def official(clone: Path, file: str) -> dict[str, Any]:
    """Return the clone's classes and functions, without what its file imports to run a model."""
    path = clone / file
    if not path.is_file():
        raise SystemExit(f"{path} is missing; name a clone of the authors' repository")
    parts = ast.parse(path.read_text("utf-8")).body
    wanted: list[ast.stmt] = [
        p for p in parts if isinstance(p, ast.ClassDef | ast.FunctionDef) and p.name in NAMES
    ]
    space: dict[str, Any] = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional}
    exec(compile(ast.Module(wanted, []), str(path), "exec"), space)
    return space


def tiny(grid: int, vocab: int) -> LlamaGenGPT:
    """Build a small target whose next token depends on all tokens before it."""
    sizes = {"dim": 32, "n_layer": 2, "n_head": 2, "ffn_dim": 64, "caption_dim": 8}
    config = LlamaGenConfig(**sizes, vocab_size=vocab, grid=grid, prefix_length=PREFIX)
    model = LlamaGenGPT(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(7)
    for name, weight in model.named_parameters():
        if "norm" not in name:
            weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5)
    model.output.weight.mul_(3.0)
    return model


class Teller:
    """The target's distribution after any tokens, dense and in float32."""

    def __init__(self, model: LlamaGenGPT, sampling: Sampling) -> None:
        self.model, self.sampling = model, sampling
        generator = torch.Generator().manual_seed(1)
        self.features = torch.randn(1, PREFIX, 8, generator=generator)
        self.mask = torch.ones(1, PREFIX, dtype=torch.bool)

    @functools.cache  # noqa: B019 - one teller a run
    def after(self, said: tuple[int, ...]) -> Tensor:
        """Return the distribution of the token after ``said``, ``[V]``."""
        tokens = torch.tensor([said], dtype=torch.int64).view(1, -1)
        with torch.inference_mode():
            states = self.model.forward_dense(self.features, tokens, self.mask)
            logits = self.model.head(states[:, -1:])
        return distribution(logits, self.sampling)[0, 0].clone()


def theirs(
    space: dict[str, Any], teller: Teller, tokens: int, window: int
) -> tuple[tuple[int, ...], int]:
    """Decode one image with the official sampler; return it and how many steps it took."""
    vocab = teller.model.config.vocab_size
    sampler = space["SpeculativeSampler"](
        reject_sampling_relative_ids=torch.zeros(1, dtype=torch.long),
        reject_sampling_draft_token_logits=torch.zeros(1, vocab),
        sampling_last_draft_token=torch.zeros(1, dtype=torch.long),
    )

    def as_they_are(ids: Tensor, scores: Tensor) -> Tensor:
        return scores

    known = [int(torch.multinomial(teller.after(()), 1))]
    drafts, scores, steps = torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, 0, vocab), 0
    while len(known) < tokens:
        missing = window - 1 - drafts.shape[1]
        fresh = torch.randint(0, vocab, (1, missing))
        drafts = torch.cat((drafts, fresh), 1)
        scores = torch.cat((scores, torch.nn.functional.one_hot(fresh, vocab).float()), 1)
        inputs = torch.cat((torch.tensor([[known[-1]]]), drafts), 1)
        past = [*known, *drafts[0].tolist()]
        # Past the end of the image the model has no positions; what stands there is dropped.
        rows = [teller.after(tuple(past[: min(len(known) + i, tokens - 1)])) for i in range(window)]
        logits = torch.stack(rows).unsqueeze(0).log()
        every = torch.tensor([known])
        said, p = space["sampling_logits2tokens"](
            logits, every, torch.ones(1, 1, dtype=torch.long), 0, output_token_num=window,
            logits_processor=as_they_are, logits_warper=as_they_are,
        )  # fmt: skip
        _, matched, drafts, _, scores = space["prefix_matching_next_tokens"](
            model_input_ids=inputs,
            next_tokens=said,
            next_token_scores=p,
            input_token_scores=torch.cat((torch.zeros(1, 1, vocab), scores), 1),
            prefix_token_sampler=sampler,
            logits_processor=as_they_are,
            logits_warper=as_they_are,
            all_collected_input_ids=every,
        )
        known += matched[0].tolist()
        steps += 1
    return tuple(known[:tokens]), steps


def ours(teller: Teller, window: Window, images: int) -> tuple[Tensor, Tensor]:
    """Decode many images with the engine; return tokens ``[n, N]`` and steps ``[n]``."""
    engine = JacobiEngine(
        teller.model,
        None,
        TensorOps(),
        Strategy(tree=window, coupling="maximal"),
        teller.sampling,
        batch=images,
    )
    seed = int(torch.randint(2**62, ()))
    with torch.inference_mode():
        engine.start(
            teller.features.expand(images, -1, -1),
            teller.mask.expand(images, -1),
            engine.randomness(seed, list(range(images))),
        )
        done = engine.run()
    return done.tokens, done.steps


def misfit(seen: Counter[tuple[int, ...]], teller: Teller, tokens: int) -> float:
    """Return how many standard deviations counts are from the target's joint law (chi-square)."""
    many, total, cells, rest_seen, rest_due = sum(seen.values()), 0.0, 0, 0.0, 0.0
    for said in itertools.product(range(teller.model.config.vocab_size), repeat=tokens):
        due = float(many)
        for place in range(tokens):
            due *= float(teller.after(said[:place])[said[place]])
        if due < 5:  # cells that are too small are counted together
            rest_seen, rest_due = rest_seen + seen[said], rest_due + due
            continue
        total += (seen[said] - due) ** 2 / due
        cells += 1
    if rest_due > 0:
        total += (rest_seen - rest_due) ** 2 / rest_due
        cells += 1
    return (total - (cells - 1)) / math.sqrt(2 * (cells - 1))


def compare(name: str, space: dict[str, Any], images: int, say: Callable[[str], None]) -> None:
    """Measure one method, theirs and ours, and print a row of the table."""
    sampling = Sampling(top_k=3, temperature=1.0)
    small = Teller(tiny(2, 4), sampling)
    law = Counter(theirs(space, small, 4, 3)[0] for _ in range(images))
    window = Window(length=3, fresh="uniform")
    tokens, _ = ours(small, window, images)
    mine = Counter(tuple(row) for row in tokens.tolist())
    large = Teller(tiny(6, 32), Sampling(top_k=12))
    rates = [35 / theirs(space, large, 36, WINDOW)[1] for _ in range(max(images // 200, 20))]
    _, steps = ours(large, window.model_copy(update={"length": WINDOW}), max(images // 20, 40))
    own = 35 / steps.float()

    def spread(values: Tensor) -> str:
        return f"{values.mean():.2f} ± {values.std() / len(values) ** 0.5:.2f}"

    say(
        f"| {name} | {spread(torch.tensor(rates))} | {spread(own)} | {misfit(law, small, 4):.1f} "
        f"| {misfit(mine, small, 4):.1f} |"
    )


def main() -> None:
    """Compare what clones were named for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in SAMPLERS:
        parser.add_argument(f"--{name}", type=Path, help=f"a clone with the official {name}")
    parser.add_argument("--images", type=int, default=8000, help="of 4 tokens, for the law")
    args = parser.parse_args()
    named = [name for name in SAMPLERS if getattr(args, name)]
    if not named:
        raise SystemExit("name a clone with --sjd")
    torch.manual_seed(0)
    print("| method | tokens per step, theirs | ours | law of theirs, sd | of ours, sd |")
    print("|---|---|---|---|---|")
    for name in named:
        compare(name, official(getattr(args, name), SAMPLERS[name]), args.images, print)


if __name__ == "__main__":
    main()
