"""GSD's and Cool-SD's rules: their arithmetic, that they are what they say, and their price."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lantern_accel.decoding.accept import examine, residual
from lantern_accel.decoding.maximal_coupling import couple
from lantern_accel.decoding.rule import Rule
from lantern_accel.errors import StrategyError
from lantern_accel.strategy.rules import AcceptanceRule, Annealed, Exact, Grouped, Tried, parse_rule
from lantern_accel.strategy.values import DynamicTree, StaticTree, Window, named_strategy

VOCAB = 9
RULES = [Annealed(weight=3.0, decay=0.5), Grouped(reach=2, close=0.1), Grouped(reach=7, close=1.0)]


def rows(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.rand(count, VOCAB, generator=generator, dtype=torch.float64).pow(3)
    raw[:, 1] = 0
    return raw / raw.sum(-1, keepdim=True)


def counts_for(rule: AcceptanceRule, p: list[float], q: list[float], x: int, depth: int) -> float:
    """A(x) in plain Python."""
    if isinstance(rule, Annealed):
        return p[x] * (1 + (rule.weight - 1) * rule.decay**depth)
    assert isinstance(rule, Grouped)
    order = sorted(range(len(p)), key=lambda code: -p[code])
    place = order.index(x)
    near = order[max(place - rule.reach, 0) : place + rule.reach + 1]
    group = [code for code in near if abs(p[code] - p[x]) < rule.close]
    ratio = sum(p[c] for c in group) / max(sum(q[c] for c in group), 1e-38)
    return max(q[x] * ratio, p[x])


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_what_a_draft_counts_for(rule: AcceptanceRule) -> None:
    p, q = rows(200, 1), rows(200, 2)
    for x in range(VOCAB):
        code = torch.full((200,), x)
        px, qx = p[:, x], q[:, x]
        tried = Tried(px, qx, p[:, :0], p, code, x % 3, q)
        runtime_params = torch.tensor(rule.runtime_values(), dtype=torch.float64)
        count, more = rule.borrowed(tried, runtime_params)
        assert not count.any(), "no neighbour's own mass is taken"
        want = [
            counts_for(rule, a, b, x, x % 3) for a, b in zip(p.tolist(), q.tolist(), strict=True)
        ]
        # Codes at the edge of the group may fall either way by a rounding; none does here.
        torch.testing.assert_close(px + more, torch.tensor(want, dtype=torch.float64))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_all_codes_of_one_row_at_once(rule: AcceptanceRule) -> None:
    p, q, codes = rows(1, 8), rows(1, 9), torch.arange(VOCAB)
    runtime_params = torch.tensor(rule.runtime_values(), dtype=torch.float64)
    seen = Tried(
        p, q, p[..., :0], p.expand(1, VOCAB, -1), codes.unsqueeze(0), 0, q.expand(1, VOCAB, -1)
    )
    together = rule.borrowed(seen, runtime_params)[1][0]
    for x in range(VOCAB):
        alone = Tried(p[:, x], q[:, x], p[:, :0], p, codes[x : x + 1], 0, q)
        torch.testing.assert_close(together[x : x + 1], rule.borrowed(alone, runtime_params)[1])


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_certain_draft_counts_for_its_group(rule: AcceptanceRule) -> None:
    p = rows(50, 3)
    code = torch.arange(50) % VOCAB
    px = p.gather(1, code.unsqueeze(1)).squeeze(1)
    runtime_params = torch.tensor(rule.runtime_values(), dtype=torch.float64)
    _, more = rule.borrowed(Tried(px, torch.ones_like(px), p[:, :0], p, code), runtime_params)
    assert (more >= 0).all() and (more > 0).any() and (px + more <= 1 + 2 * px).all()


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_law_of_a_token_is_as_far_as_the_price_says(rule: AcceptanceRule) -> None:
    """Every draft and both outcomes, enumerated: total variation is the mean price, to rounding."""
    moved = 0.0
    for seed in range(20):
        p, q = rows(1, seed)[0].float(), rows(1, seed + 100)[0].float()
        law, price = torch.zeros(VOCAB), 0.0
        code = torch.arange(VOCAB)
        many, few = p.expand(VOCAB, -1), q.expand(VOCAB, -1)
        test = examine(Rule(rule), many, few, code, 0, None)
        after = residual(Rule(rule), test)
        for x in range(VOCAB):
            law[x] += q[x] * test.probability[x]
            law += q[x] * (1 - test.probability[x]) * after[x]
            price += float(q[x] * test.price[x])
        assert float(law.sum()) == pytest.approx(1, abs=1e-5)
        distance = 0.5 * float((law - p).abs().sum())
        assert distance == pytest.approx(price, abs=1e-5)
        moved += distance
    assert moved > 0.1, "the rules relax something"


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_windows_take_them(rule: AcceptanceRule) -> None:
    generator = torch.Generator().manual_seed(4)
    p, q = rows(300 * 5, 5).float().view(300, 5, -1), rows(300 * 4, 6).float().view(300, 4, -1)
    x = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(300, 4)
    tests, draws = (torch.rand(300, n, generator=generator) for n in (4, 5))
    strict = couple(x, p, q, Rule(Exact()), tests, draws)
    loose = couple(x, p, q, Rule(rule), tests, draws)
    assert (loose.count >= strict.count).all() and (loose.count > strict.count).any()
    assert (loose.price >= -1e-6).all() and loose.price.sum() > 0


def test_as_text() -> None:
    assert parse_rule("cool-sd:weight=3,decay=0.5") == Annealed(weight=3, decay=0.5)
    assert parse_rule("gsd:reach=3") == Grouped(reach=3, close=0.15)
    with pytest.raises(StrategyError, match=r"cool-sd: weight .*1 or more"):
        parse_rule("cool-sd:weight=0.5")
    trees = {"static": StaticTree(paths=((0,),)), "dynamic": DynamicTree(top_k=1, depth=0, total=2)}
    scd = named_strategy("scd", **trees)  # type: ignore[arg-type]
    loose = scd.override(acceptance=parse_rule("gsd"))
    assert loose.acceptance.relaxed and isinstance(loose.tree, Window) and loose.neighbours == 0
