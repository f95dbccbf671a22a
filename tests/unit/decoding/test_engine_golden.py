"""Whole images decoded greedily, against those of LANTERN's official code."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from support.golden import golden
from support.recorded import decode, lantern_drafter, lantern_target

from lantern_accel.strategy.rules import Acceptance, Exact, Lantern, LanternPP
from lantern_accel.strategy.trees import EAGLE2_TREE, NAIVE_EXTEND_57
from lantern_accel.strategy.values import Sampling, Strategy

RULES: dict[str, Acceptance] = {
    "off": Exact(),
    "k10_d0.1": Lantern(k=10, delta=0.1),
    "k10_d5": LanternPP(k=10, lam=5),
}
TREES = {"static": NAIVE_EXTEND_57, "dynamic": EAGLE2_TREE}


def decoded(cap: int, strategy: Strategy) -> tuple[torch.Tensor, list[int]]:
    io = golden("lantern/target_io")
    tokens, accepted, _ = decode(
        lantern_target(),
        io[f"cap{cap}.cond_left_padded"][None],
        Sampling(temperature=0, cfg_scale=3.0),
        mask=io[f"cap{cap}.mask_left"].bool()[None],
        strategy=strategy,
        drafter=lantern_drafter(),
        neighbours=golden("lantern/proximity")["nearest_raw"].int(),
    )
    return tokens[0], accepted[0]


@pytest.mark.parametrize("cap", [0, pytest.param(1, marks=pytest.mark.long)])
def test_vanilla_tokens_are_the_official_ones(cap: int) -> None:
    tokens, _ = decoded(cap, Strategy())
    recorded = golden("lantern/greedy_sequences")[f"cap{cap}.vanilla_greedy"]
    assert torch.equal(tokens, recorded.long())


@pytest.mark.long
@pytest.mark.parametrize("tree", ["dynamic"])
def test_a_padded_caption_decodes_exactly_although_our_drafter_hides_its_pads(tree: str) -> None:
    tokens, accepted = decoded(0, Strategy(drafts=TREES[tree]))
    recorded = golden("lantern/greedy_sequences")[f"cap0.{tree}.off.tokens"]
    assert torch.equal(tokens, recorded.long())
    assert sum(accepted) > 50


# The quick tier has a static and a dynamic one in families/llamagen/test_official_golden.py.
@pytest.mark.long
@pytest.mark.parametrize(("tree", "rule"), [*product(TREES, RULES)])
def test_tokens_and_accepted_drafts_are_the_official_ones(tree: str, rule: str) -> None:
    tokens, accepted = decoded(1, Strategy(drafts=TREES[tree], acceptance=RULES[rule]))
    stored = golden("lantern/greedy_sequences")
    assert torch.equal(tokens, stored[f"cap1.{tree}.{rule}.tokens"].long())
    recorded = stored[f"cap1.{tree}.{rule}.best_and_accept"][:, 1].tolist()
    # The official loop runs one step more than the image needs.
    assert accepted == recorded[:-1]
