"""107 acceptance decisions recorded from LANTERN's official code (residual ``official``)."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from support.golden import golden, golden_metadata
from support.tree_tensors import draft_tree
from torch import Tensor

from lantern_accel.decoding.accept import Accepted, accept_greedy, accept_sampling
from lantern_accel.decoding.logits import distribution
from lantern_accel.decoding.rule import Rule
from lantern_accel.strategy.rules import Exact, Lantern, LanternPP
from lantern_accel.strategy.values import Sampling

CASES: list[dict[str, Any]] = json.loads(golden_metadata("lantern/acceptance")["cases"])


def decide(case: dict[str, Any]) -> tuple[Accepted, list[int], Tensor]:
    """Run one recorded decision; return ours, the recorded path, and the recorded next weights."""
    tensors = golden("lantern/acceptance")
    name = case["case"]

    def of(field: str) -> Tensor:
        return tensors[f"{name}.{field}"]

    static = name.startswith("sta")
    retrieve = (tensors["static.retrieve"] if static else of("retrieve")).tolist()
    parents = [max(int(p), 0) for p in (tensors["static.parent"] if static else of("parent"))]
    nodes = len(parents)
    # Siblings are tried in the order in which the retrieve matrix first names them.
    seen: dict[int, int] = {}
    for rank, row in enumerate(retrieve):
        for node in row:
            seen.setdefault(node, rank * 100 + len(seen))
    order = [0]
    for node in order:
        kids = [n for n in range(1, nodes) if parents[n] == node]
        order += sorted(kids, key=lambda n: seen[n])
    new = {node: place for place, node in enumerate(order)}
    above = [new[parents[node]] for node in order]
    first_row = {n: next(i for i, row in enumerate(retrieve) if n in row) for n in range(nodes)}
    path = [new[n] for n in retrieve[case["best"]][: case["accept"] + 1]]
    q = None
    if static:
        assert order == list(range(nodes)), "group numbers follow node numbers"
        inner = sorted({parents[n] for n in range(1, nodes)})
        q = torch.zeros(1, nodes, of("op").shape[-1])
        q[0, inner] = of("op")
    tree = draft_tree(
        [above], of("tokens")[order][None], row_rank=[[first_row[n] for n in order]], q=q
    )
    logits = of("node_logits")[order][None]
    neighbours = golden("lantern/proximity")["nearest256_raw"].int()
    acceptance: Exact | Lantern | LanternPP = Exact()
    if case["lantern"]:
        small = case["delta"] <= 1
        acceptance = (
            Lantern(k=case["k"], delta=case["delta"])
            if small
            else LanternPP(k=case["k"], lam=case["delta"])
        )
    table = neighbours[:, : case["k"] + 1] if case["lantern"] else None
    rule = Rule(acceptance, "official", table)
    if name.startswith("dynG"):
        return accept_greedy(tree, logits, rule), path, of("next")
    # One uniform a candidate examined, in order; ours have one place a level and sibling.
    uniforms = torch.full((1, sum(tree.max_children)), 0.5, dtype=torch.float64)
    drawn = of("uniforms").tolist()
    offset = used = 0
    children = [[n for n in range(1, nodes) if above[n] == node] for node in range(nodes)]
    for level, width in enumerate(tree.max_children):
        if level <= case["accept"]:
            siblings = children[path[level]]
            tries = len(siblings)
            if level < case["accept"]:
                tries = siblings.index(path[level + 1]) + 1
            for slot in range(tries):
                uniforms[0, offset + slot] = drawn[used]
                used += 1
        offset += width
    assert used == case["used"], "as many candidates as the official code examined"
    sampling = Sampling(
        temperature=case["temperature"],
        top_p=case["top_p"],
        top_k=case["top_k"],
        order="top_p_first",
    )
    probs = distribution(logits, sampling)
    return accept_sampling(tree, probs, rule, uniforms, torch.tensor([0.5])), path, of("next")


@pytest.mark.parametrize("case", CASES, ids=[case["case"] for case in CASES])
def test_the_official_decision(case: dict[str, Any]) -> None:
    accepted, path, following = decide(case)
    length = int(accepted.length)
    assert length == case["accept"]
    assert accepted.path[0, : length + 1].tolist() == path
    ours, theirs = accepted.weights[0], following
    if not case["case"].startswith("dynG"):
        ours, theirs = ours / ours.sum(), theirs / theirs.sum()
    assert (ours - theirs).abs().max() < 1e-5
