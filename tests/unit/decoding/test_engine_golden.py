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


# The quick tier has plain decoding, a static and a dynamic tree in
# families/llamagen/test_official_golden.py.
@pytest.mark.long
def test_plain_tokens_are_the_official_ones() -> None:
    tokens, _ = decoded(1, Strategy())
    recorded = golden("lantern/greedy_sequences")["cap1.vanilla_greedy"]
    assert torch.equal(tokens, recorded.long())


@pytest.mark.long
@pytest.mark.parametrize(
    ("cap", "tree", "rule"), [(0, "dynamic", "off"), *((1, *one) for one in product(TREES, RULES))]
)
def test_tokens_and_accepted_drafts_are_the_official_ones(cap: int, tree: str, rule: str) -> None:
    tokens, accepted = decoded(cap, Strategy(drafts=TREES[tree], acceptance=RULES[rule]))
    stored = golden("lantern/greedy_sequences")
    assert torch.equal(tokens, stored[f"cap{cap}.{tree}.{rule}.tokens"].long())
    if cap:  # of the other caption our drafter hides the pads, and accepts as it would without
        recorded = stored[f"cap{cap}.{tree}.{rule}.best_and_accept"][:, 1].tolist()
        # The official loop runs one step more than the image needs.
        assert accepted == recorded[:-1]
