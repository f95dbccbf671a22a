"""The tensor code decides as a plain float64 reading of the papers' rules does."""

from __future__ import annotations

import random
from typing import Any, Literal, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracle
from support.tree_tensors import children_of, draft_tree, random_parents
from torch import Tensor

from lantern_accel.decoding.accept import accept_greedy, accept_sampling
from lantern_accel.decoding.rule import Rule
from lantern_accel.nn.transformer import REFERENCE
from lantern_accel.strategy.rules import Acceptance, Exact, Lantern, LanternPP
from lantern_accel.strategy.values import Residual

Kind = Literal["exact", "lantern", "lantern++"]
#: Nearer to a threshold than this, float32 and float64 may decide differently.
MARGIN = 1e-6
#: A residual that keeps less of its mass magnifies float32's rounding beyond the tolerance.
TRUST = 0.05
EXAMPLES = pytest.mark.parametrize("examples", [30, pytest.param(200, marks=pytest.mark.long)])


def checked(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None)


@st.composite
def situations(draw_from: st.DrawFn) -> dict[str, Any]:
    vocab = draw_from(st.integers(3, 24))
    return {
        "seed": draw_from(st.integers(0, 2**32 - 1)),
        "vocab": vocab,
        "batch": draw_from(st.integers(1, 5)),
        "nodes": draw_from(st.integers(2, 12)),
        "width": draw_from(st.integers(1, min(4, vocab - 1))),
        "k": draw_from(st.integers(1, vocab - 2)),
        "delta": draw_from(st.sampled_from([0.01, 0.05, 0.2, 0.4, 0.77, 1.0])),
        "lam": draw_from(st.sampled_from([1.0, 1.3, 2.0, 5.0, 50.0])),
        "shape": draw_from(st.sampled_from(["flat", "peaked", "zeros", "ties", "near one"])),
    }


class Situation:
    """Random trees, distributions and neighbours that one draw of hypothesis stands for."""

    def __init__(self, size: dict[str, Any], kind: Kind, residual: Residual) -> None:
        self.size = size
        self.rng = random.Random(size["seed"])
        self.generator = torch.Generator().manual_seed(size["seed"])
        shape = size["nodes"], size["width"]
        self.parents = [random_parents(self.rng, *shape) for _ in range(size["batch"])]
        vocab = size["vocab"]
        near = torch.rand(vocab, vocab, generator=self.generator)
        near.fill_diagonal_(2.0)
        self.near = near.argsort(dim=-1)[:, : size["k"] + 1][:, : vocab - 1].int()
        rules: dict[Kind, Acceptance] = {
            "exact": Exact(),
            "lantern": Lantern(k=size["k"], delta=size["delta"]),
            "lantern++": LanternPP(k=size["k"], lam=size["lam"]),
        }
        # A budget is kept with the optimal residual alone; there, every second case has one.
        budget = None
        if residual == "optimal" and kind != "exact" and size["seed"] % 2:
            budget = 0.02 + 0.3 * self.rng.random()
        self.rule = Rule(
            rules[kind],
            residual,
            None if kind == "exact" else self.near,
            budget=None if budget is None else torch.tensor([budget]),
        )
        self.oracle = oracle.OracleRule(
            kind,
            residual,
            size["k"],
            size["delta"] if kind == "lantern" else size["lam"],
            self.near.tolist(),
            budget,
        )

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator)

    def weights(self, *rows: int) -> Tensor:
        shape, vocab = self.size["shape"], self.size["vocab"]
        u = self.rand(*rows, vocab)
        if shape == "flat":
            w = 1 + 0.05 * u
        elif shape == "peaked":
            w = torch.exp(8 * u)
        elif shape == "zeros":
            w = u * (self.rand(*rows, vocab) < 0.5)
        elif shape == "ties":
            w = (4 * u).floor()
        else:
            w = torch.exp(20 * u)
        return torch.where(w.sum(-1, keepdim=True) > 0, w, torch.ones_like(w))

    def distributions(self, *rows: int) -> Tensor:
        w = self.weights(*rows)
        return w / w.sum(-1, keepdim=True)

    def uniforms(self, *shape: int) -> Tensor:
        return ((self.rand(*shape) * 2**23).floor() * 2 + 1) / 2**24


def drafted_tokens(s: Situation, probs: Tensor, q: Tensor | None) -> Tensor:
    """Draft siblings that differ: drawn from q, or likely and unlikely codes where q = 1."""
    batch, nodes, width = s.size["batch"], s.size["nodes"], s.size["width"]
    tokens = torch.zeros(batch, nodes, dtype=torch.int64)
    source = q if q is not None else 0.5 * probs + 0.5 / s.size["vocab"]
    picks = REFERENCE.sample(source, s.uniforms(batch, nodes, width))
    for image, parents in enumerate(s.parents):
        for node, kids in enumerate(children_of(parents)):
            for rank, child in enumerate(kids):
                tokens[image, child] = picks[image, node, rank]
    return tokens


@pytest.mark.product("kind", "residual")
@EXAMPLES
@pytest.mark.parametrize("drawn", [False, True], ids=["q=1", "drawn"])
@pytest.mark.parametrize("residual", get_args(Residual))
@pytest.mark.parametrize("kind", get_args(Kind))
def test_sampling_decides_as_the_oracle(
    kind: Kind, residual: Residual, drawn: bool, examples: int
) -> None:
    seen = {"compared": 0, "images": 0, "accepted": 0, "refused": 0}

    @checked(examples)
    @given(situations())
    def check(size: dict[str, Any]) -> None:
        s = Situation(size, kind, residual)
        batch, nodes = size["batch"], size["nodes"]
        probs = s.distributions(batch, nodes)
        q = s.distributions(batch, nodes) if drawn else None
        if q is not None:
            # Half of the drafters know something of the target.
            blend = (s.rand(batch, 1, 1) < 0.5).float()
            q = blend * (0.8 * probs + 0.2 * q) + (1 - blend) * q
        tokens = drafted_tokens(s, probs, q)
        tree = draft_tree(s.parents, tokens, q=q)
        tests = s.uniforms(batch, sum(tree.max_children))
        bonus = s.uniforms(batch)
        ours = accept_sampling(tree, probs, s.rule, tests, bonus)
        assert torch.equal(ours.bonus, REFERENCE.sample(ours.weights, bonus))
        for image in range(batch):
            levels, start = [], 0
            for width in tree.max_children:
                levels.append(tests[image, start : start + width].double().tolist())
                start += width
            verdict = oracle.sampling(
                s.oracle,
                children_of(s.parents[image]),
                tokens[image].tolist(),
                probs[image].double().tolist(),
                levels,
                None if q is None else q[image].double().tolist(),
            )
            seen["images"] += 1
            if verdict.closest < MARGIN or verdict.trust < TRUST:
                continue
            seen["compared"] += 1
            length = int(ours.length[image])
            assert ours.path[image, : length + 1].tolist() == verdict.path
            expected = torch.tensor(verdict.next, dtype=torch.float64)
            weights = ours.weights[image].double()
            assert (weights / weights.sum() - expected / expected.sum()).abs().max() < 1e-5
            assert float(ours.quality_loss[image].sum()) == pytest.approx(
                verdict.quality_loss, abs=1e-5
            )
            seen["accepted"] += length
            seen["refused"] += verdict.next != probs[image, verdict.path[-1]].double().tolist()

    check()
    assert seen["compared"] > 0.7 * seen["images"] > 30
    assert seen["accepted"] > 2 and seen["refused"] > 2


@EXAMPLES
@pytest.mark.parametrize("kind", get_args(Kind))
def test_greedy_decides_as_the_oracle(kind: Kind, examples: int) -> None:
    seen = {"compared": 0, "images": 0, "accepted": 0, "relaxed": 0}

    @checked(examples)
    @given(situations())
    def check(size: dict[str, Any]) -> None:
        s = Situation(size, kind, "aggregate")
        batch, nodes = size["batch"], size["nodes"]
        logits = s.weights(batch, nodes).clamp(min=1e-4).log()
        if size["shape"] == "ties":
            logits = (2 * s.rand(batch, nodes, size["vocab"])).floor()
        tokens = drafted_tokens(s, logits.softmax(-1), None)
        # Half of the first children are what greedy decoding would say.
        best = logits.argmax(-1)
        for image, parents in enumerate(s.parents):
            for node, kids in enumerate(children_of(parents)):
                taken = tokens[image, kids].tolist()
                if kids and s.rng.random() < 0.5 and int(best[image, node]) not in taken:
                    tokens[image, s.rng.choice(kids)] = best[image, node]
        ranks = [s.rng.sample(range(nodes), nodes) for _ in range(batch)]
        tree = draft_tree(s.parents, tokens, row_rank=ranks)
        ours = accept_greedy(tree, logits, s.rule)
        for image in range(batch):
            verdict = oracle.greedy(
                s.oracle,
                s.parents[image],
                tokens[image].tolist(),
                logits[image].double().tolist(),
                ranks[image],
            )
            seen["images"] += 1
            if verdict.closest < MARGIN:
                continue
            seen["compared"] += 1
            length = int(ours.length[image])
            assert ours.path[image, : length + 1].tolist() == verdict.path
            assert ours.weights[image].tolist() == pytest.approx(verdict.next)
            assert int(ours.bonus[image]) == verdict.next.index(max(verdict.next))
            seen["accepted"] += length
            for parent, node in zip(verdict.path[:-1], verdict.path[1:], strict=True):
                seen["relaxed"] += int(tokens[image, node] != best[image, parent])

    check()
    assert seen["compared"] > 0.7 * seen["images"] > 30
    assert seen["accepted"] > 2
    assert (seen["relaxed"] > 3) == (kind != "exact")


def test_the_oracle_knows_the_rules_of_a_worked_example() -> None:
    # p(x) = 0.2, neighbours 0.1, 0.15, 0.3; delta 0.25 admits two, lambda 2 (bound 0.2) one.
    p, near = [0.2, 0.1, 0.15, 0.3, 0.25], [[1, 2, 3]] + [[0, 2, 3]] * 4
    lantern = oracle.OracleRule("lantern", "aggregate", 3, 0.26, near)
    children: list[list[int]] = [[1], []]
    kept = oracle.sampling(lantern, children, [9, 0], [p, p], [[0.44]])
    assert kept.path == [0, 1] and kept.quality_loss == pytest.approx(0.25)
    lost = oracle.sampling(lantern, children, [9, 0], [p, p], [[0.46]])
    assert lost.path == [0] and lost.next == pytest.approx([0, 0, 0, 0.3 / 0.55, 0.25 / 0.55])
    plus = oracle.OracleRule("lantern++", "optimal", 3, 2.0, near)
    lost = oracle.sampling(plus, children, [9, 0], [p, p], [[0.31]])
    assert lost.next == pytest.approx([0, 0.1 / 0.8, 0.15 / 0.8, 0.3 / 0.8, 0.25 / 0.8])
    plus.residual = "official"
    lost = oracle.sampling(plus, children, [9, 0], [p, p], [[0.31]])
    assert lost.next == pytest.approx([0, 0, 0, 0, 1.0])
    q = [0.5, 0.2, 0.1, 0.1, 0.1]
    lost = oracle.sampling(plus, children, [9, 0], [p, p], [[0.61]], [q, q])
    assert lost.next == pytest.approx([0, 0.1 / 0.7, 0.15 / 0.7, 0.3 / 0.7, 0.15 / 0.7])
