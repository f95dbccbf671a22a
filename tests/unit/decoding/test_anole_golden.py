"""Anole through the engine against LANTERN's own program: static and dynamic trees, three rules.

Recorded one prompt at a time; here both are decoded together, so that padding, positions and masks of
rows with prompts of their own are held to the official results as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chameleon import drafter_recipes, target_recipes
from support.golden import golden
from support.recorded import decode
from torch import Tensor

from lantern_accel.checkpoints.loading import fill
from lantern_accel.checkpoints.weights import Checkpoint, HeldFile
from lantern_accel.families.chameleon.model import (
    ChameleonConfig,
    ChameleonDrafter,
    ChameleonDrafterConfig,
    ChameleonGPT,
)
from lantern_accel.families.chameleon.text import ChameleonIds
from lantern_accel.families.tokenizer import left_pad
from lantern_accel.strategy.rules import Exact, Lantern, LanternPP
from lantern_accel.strategy.trees import EAGLE2_TREE, NAIVE_EXTEND_57
from lantern_accel.strategy.values import Sampling, Strategy

SIZES: dict[str, Any] = {
    "dim": 64, "n_head": 4, "ffn_dim": 96, "height": 6, "width": 8, "prefix_length": 16,
}  # fmt: skip
RULES = {
    "off": Exact(),
    "k10_d5": LanternPP(k=10, lam=5.0),
    "k10_d0.1": Lantern(k=10, delta=0.1),
    "k50_d0.3": Lantern(k=50, delta=0.3),
}

#: Each kind of tree once; the other pairs are long.
PAIRS = [("dynamic", "k10_d0.1"), ("static", "k10_d5")]


def filled(module: Any, tensors: Mapping[str, Tensor], recipes: Callable[..., Any]) -> None:
    held = HeldFile(Path("golden"), tensors)
    checkpoint = Checkpoint(held.path, [held])
    made = recipes(checkpoint, module.config)
    fill(module, checkpoint, made, dtype=torch.float32, device=torch.device("cpu"), what="golden")
    module.eval().requires_grad_(False)


@functools.cache
def models() -> tuple[ChameleonGPT, ChameleonDrafter]:
    weights = dict(golden("lantern_anole/target"))
    target = ChameleonGPT(ChameleonConfig(n_layer=2, **SIZES))
    filled(target, weights, target_recipes)
    own = dict(golden("lantern_anole/drafter"))
    own["embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    own["fc.weight"] = own["fc.weight"] + torch.cat((torch.eye(64), torch.zeros(64, 64)), dim=1)
    drafter = ChameleonDrafter(ChameleonDrafterConfig(**SIZES))
    filled(drafter, own, drafter_recipes)
    return target, drafter


@functools.cache
def decoded(tree: str, rule: str) -> tuple[Tensor, list[list[int]]]:
    """Decode both prompts in one batch; tokens as ids, and the accepted drafts of each step."""
    sequences, ids = golden("lantern_anole/sequences"), ChameleonIds()
    prompts = [
        [ids.bos, *sequences[f"{i}.prompt"].tolist(), ids.end_of_turn, ids.image_start]
        for i in range(2)
    ]
    condition, mask = left_pad([*prompts, *[[ids.bos, ids.image_start]] * 2], 16, ids.pad)
    rows, columns = torch.arange(8192).view(-1, 1), torch.arange(50).view(1, -1)
    strategy = Strategy(
        drafts=NAIVE_EXTEND_57 if tree == "static" else EAGLE2_TREE, acceptance=RULES[rule]
    )
    table = ((37 * rows + 101 * columns + 1) % 8192).int()
    target, drafter = models()
    tokens, accepted, _ = decode(
        target,
        condition,
        Sampling(temperature=0, cfg_scale=3.0),
        mask=mask,
        strategy=strategy,
        drafter=drafter,
        neighbours=table,
        batch=2,
    )
    return tokens + ids.image_first, accepted


@pytest.mark.parametrize(
    ("tree", "rule"),
    [
        pair if pair in PAIRS else pytest.param(*pair, marks=pytest.mark.long)
        for pair in product(("static", "dynamic"), RULES)
    ],
)
@pytest.mark.parametrize("image", [0, 1])
def test_tokens_and_accepted_drafts_are_the_official_ones(image: int, tree: str, rule: str) -> None:
    sequences, name = golden("lantern_anole/sequences"), f"{image}.{tree}.{rule}"
    tokens, accepted = decoded(tree, rule)
    assert torch.equal(tokens[image].int(), sequences[f"{name}.tokens"][:48])
    # The official loop runs on after the last token, and counts drafts past the image's end.
    whole = accepted[image][:-1]
    assert whole == sequences[f"{name}.accepted"].tolist()[: len(whole)]
    assert len(whole) > 15
