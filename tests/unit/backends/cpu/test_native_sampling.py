"""Native filters, draws and the walk down a tree, each instruction set against the reference."""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import get_args

import pytest
import torch
from support import native, sampled
from support.sampled import RULES, Half, situation, uniform

from lantern_accel.decoding.accept import accept
from lantern_accel.decoding.logits import Filters
from lantern_accel.decoding.rule import Rule
from lantern_accel.device.plan import Filter
from lantern_accel.device.sampling import FLOOR
from lantern_accel.nn.neighbours import neighbour_table
from lantern_accel.nn.transformer import REFERENCE
from lantern_accel.strategy.values import Residual, Sampling
from lantern_accel_cpu.backend import DeviceBackend
from lantern_accel_cpu.native import races, sampling
from lantern_accel_cpu.native.backend import NativeCpu

pytestmark = native.needs_native
UNITS = native.unit_cases()
#: Ragged, whole vectors, and long enough for every way to find the k-th value.
SIZES = [1, 7, 33, 256, 5000]
FILTERS = [
    Filter(),
    Filter(0.7, top_k=5),
    Filter(1.3, top_k=2100),
    Filter(top_p=0.9),
    Filter(torch.tensor([1.5]), top_k=40, top_p=torch.tensor([0.6])),
    Filter(0.5, top_k=40, top_p=0.8, p_first=True),
    Filter(top_k=10**6, top_p=1e-6),
]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("given", FILTERS, ids=str)
def test_filters_keep_what_the_reference_keeps(unit: str, given: Filter) -> None:
    sampled.check_filter(partial(sampling.filter, native.kernels(unit)), given, SIZES)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_broken_row_is_seen_in_its_probabilities(unit: str, bad: float) -> None:
    sampled.check_broken_row(partial(sampling.filter, native.kernels(unit)), bad)


@pytest.mark.parametrize("unit", UNITS)
def test_draws_are_those_of_running_sums_in_double(unit: str) -> None:
    kernels, reference = native.kernels(unit), DeviceBackend(0)
    for size in SIZES:
        weights = native.draw(size, 50, size).exp() * 3
        weights[weights < 1] = 0.0
        weights[3] = 0.0
        u = uniform(size, 50, 4)
        want = reference.sample(weights, u)
        assert torch.equal(sampling.sample(kernels, weights, u), want)
        alone = sampling.sample(kernels, weights, u[:, :1])
        assert alone is not None
        assert torch.equal(alone[:, 0], reference.sample(weights, u[:, 0]))


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("size", SIZES)
def test_a_race_is_won_by_the_largest_score(unit: str, size: int) -> None:
    kernels, keys = native.kernels(unit), torch.tensor([[5, -6, 1]], dtype=torch.int32)
    positions, heavy = torch.arange(40).view(1, -1), torch.arange(40).remainder(size)
    weights = uniform(3, 1, 40, size)
    for share in (0.0, 0.02, 0.2, 0.3, 0.4, 1.0):  # of the codes that have a weight
        some = weights * (uniform(4, 1, 40, size) < share)
        some[0, torch.arange(40), heavy] += 0.1 if share else 0.0
        found, scores = (
            kind(kernels, some, keys, positions) for kind in (races.race, races.perturb)
        )
        assert found is not None and scores is not None
        assert torch.equal(found, scores.argmax(-1)), share


@pytest.mark.parametrize("image_scale", [None, 1.4])
@pytest.mark.parametrize("whole", [False, True])
def test_guidance_is_the_reference_s(image_scale: float | None, whole: bool) -> None:
    sampled.check_guidance(partial(sampling.guide, native.kernels()), image_scale, whole)


@pytest.mark.product("kind", "residual")
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("drawn", [False, True], ids=["q=1", "drawn"])
@pytest.mark.parametrize("residual", get_args(Residual))
@pytest.mark.parametrize("kind", RULES)
def test_a_tree_is_walked_as_the_reference_walks(
    kind: str, residual: Residual, drawn: bool, unit: str
) -> None:
    refused = accepted = 0
    backend = NativeCpu(0, native.kernels(unit))
    for seed in range(12):
        vocab = 29 if seed % 2 else 64
        tree, logits = situation(100 * seed, vocab, drawn, 4, (1, 14))
        masked = seed % 3 == 0
        if masked:
            logits[..., ::5] = float("-inf")
        table = None if kind == "exact" else neighbour_table(native.draw(5, vocab, 3), 8)
        values = torch.tensor(RULES[kind].runtime_values())
        rule = Rule(RULES[kind], residual, table, values)
        top_k = 20 if seed % 4 == 1 else 0
        filters = Filters(Sampling(top_k=top_k, top_p=0.95), 0.9, 0.95, backend)
        tests, bonus = uniform(seed, 4, sum(tree.max_children)), uniform(seed + 1, 4)
        got = accept(tree, logits, filters, rule, tests, bonus, masked=masked)
        given = copy(filters)
        given.ops = DeviceBackend(0)
        given.ops.filter = backend.filter  # type: ignore[method-assign]  # the rest is compared
        want = accept(tree, logits, given, rule, tests, bonus, masked=masked)
        fields = ("path", "length", "bonus", "weights", "quality_loss")
        ours, theirs = ([getattr(one, name) for name in fields] for one in (got, want))
        kept, none = sampled.check_walk(ours, theirs)
        accepted, refused = accepted + kept, refused + none
    assert accepted > 4
    assert refused > 4


def test_a_rule_of_another_kind_goes_the_reference_s_way() -> None:
    backend = NativeCpu(0, native.kernels())
    tree, logits = situation(3, 29, True, 4, (1, 14))
    table = neighbour_table(native.draw(5, 29, 3), 8)
    rule = Rule(Half(kind="half", k=4), "aggregate", table, torch.tensor([]))
    tests, bonus = uniform(1, 4, sum(tree.max_children)), uniform(2, 4)
    assert backend.accept(tree, logits, Filter(), rule.given, tests, bonus, False) is None
    filters = Filters(Sampling(), 1.0, 1.0, backend)
    assert accept(tree, logits, filters, rule, tests, bonus).path.shape[0] == 4


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("lucky", [False, True])
def test_the_likeliest_codes_are_the_reference_s(unit: str, lucky: bool) -> None:
    kernels = native.kernels(unit)
    for size in SIZES:
        count = min(size, 6)
        weights = native.draw(size, 2, 3, size).softmax(dim=-1)
        luck = 1 / uniform(size, 2, 1, size) if lucky else None
        want = REFERENCE.likeliest(weights, count, luck)
        got = sampling.likeliest(kernels, weights, count, luck)
        assert got is not None
        # A logarithm within rounding of the last digit, and of a sum in another order.
        assert torch.allclose(got[0], want[0], rtol=1e-6, atol=1e-6)
        assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("unit", UNITS)
def test_equally_likely_codes_come_by_number_and_none_is_beyond_the_row(unit: str) -> None:
    kernels = native.kernels(unit)
    weights = torch.zeros(1, 3, 33)
    weights[0, 0, [30, 4]] = 0.5
    weights[0, 1, 20] = 1.0
    weights[0, 2] = float("nan")
    got = sampling.likeliest(kernels, weights, 4, None)
    assert got is not None
    assert got[1][0, :2].tolist() == [[4, 30, 0, 1], [20, 0, 1, 2]]
    assert torch.equal(got[0][0, 1], torch.tensor([0.0, FLOOR, FLOOR, FLOOR]))
    assert got[1][0, 2].ge(0).all() and got[1][0, 2].lt(33).all() and got[0].isfinite().all()


def test_the_best_of_equal_values_are_the_first() -> None:
    with NativeCpu(0, native.kernels(UNITS[0])) as backend:
        values, places = backend.best(torch.tensor([[1.0, 3.0, 1.0, 3.0, 2.0, 1.0]]), 4)
    assert values.tolist() == [[3.0, 3.0, 2.0, 1.0]] and places.tolist() == [[1, 3, 4, 0]]


def test_what_no_kernel_takes_goes_the_reference_s_way() -> None:
    backend, keys = NativeCpu(0, native.kernels()), torch.tensor([[5, -6, 1]], dtype=torch.int32)
    weights, places = native.draw(1, 1, 2, 9).softmax(-1), torch.tensor([[3, 4]])
    assert torch.equal(
        backend.race(weights, keys, places, 3), REFERENCE.race(weights, keys, places, 3)
    )
    logits = native.draw(2, 3, 8).half()
    assert torch.equal(backend.filter(logits, Filter()), DeviceBackend(0).filter(logits, Filter()))
    x = native.draw(3, 3, 8).requires_grad_()
    assert backend.swiglu(x).requires_grad
