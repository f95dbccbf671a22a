"""The Triton kernels of filters, draws and the walk down a tree, under Triton's interpreter.

They run in a process of their own (:mod:`support.interpreter`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import sampled
from support.cuda_double import doubled_backend
from support.interpreter import compiles, interpreted
from support.sampled import RULES, Half, normal, situation, uniform

from lantern_accel.decoding.accept import accept_sampling
from lantern_accel.decoding.rule import Rule
from lantern_accel.device.plan import Filter
from lantern_accel.nn.neighbours import neighbour_table
from lantern_accel.nn.transformer import REFERENCE
from lantern_accel.strategy.rules import Exact, LanternPP


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make rows of a few hundred codes go through several blocks."""
    from lantern_accel_cuda.kernels import rows

    monkeypatch.setattr(rows, "BLOCK", 128)
    monkeypatch.setattr(rows, "FILTER_BLOCK", 32)


SIZES = [1, 70]
FILTERS = [
    Filter(),
    Filter(0.7, top_k=5),
    Filter(torch.tensor([1.3]), top_k=40),
    Filter(top_p=0.9),
    Filter(torch.tensor([1.5]), top_k=40, top_p=torch.tensor([0.6])),
    Filter(0.5, top_k=4, top_p=0.8, p_first=True),
    Filter(0.5, top_k=30, top_p=0.4, p_first=True),
    Filter(top_k=10**6, top_p=1e-6),
    Filter(top_p=1.0),
]


@interpreted
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "given",
    # Quick: either filter, both, and both in the other order.
    [
        pytest.param(one, marks=() if at in (1, 3, 4, 6) else pytest.mark.long)
        for at, one in enumerate(FILTERS)
    ],
    ids=str,
)
def test_filters_keep_what_the_reference_keeps(given: Filter) -> None:
    from lantern_accel_cuda.kernels import sampling

    sampled.check_filter(sampling.filter, given, SIZES)


@interpreted
def test_equal_values_stay_by_code_while_there_is_room() -> None:
    from lantern_accel_cuda.kernels import sampling

    logits = torch.zeros(1, 8)
    logits[0, 5] = torch.tensor(3.0).log()
    # Masses of 0.1, and 0.3 for code 5: the codes before the third 0.1 hold 0.5.
    got = sampling.filter(logits, Filter(top_p=0.55))
    assert got is not None
    assert got.nonzero()[:, 1].tolist() == [0, 1, 2, 5]
    got = sampling.filter(logits, Filter(top_k=3))
    assert got is not None
    assert bool((got > 0).all())  # seven are the third largest


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the NaN that is asked for
@pytest.mark.parametrize(
    "bad",
    [
        float("nan"),
        *(pytest.param(x, marks=pytest.mark.long) for x in (float("inf"), -float("inf"))),
    ],
)
def test_a_broken_row_is_seen_in_its_probabilities(bad: float) -> None:
    from lantern_accel_cuda.kernels import sampling

    sampled.check_broken_row(sampling.filter, bad)


@interpreted
@pytest.mark.usefixtures("small_blocks")
def test_draws_are_the_reference_s_but_where_rounding_decides() -> None:
    from lantern_accel_cuda.kernels import sampling

    different = 0
    for size in SIZES:
        weights = normal(size, 3, 4, size).exp() * 3
        weights[weights < 1] = 0.0
        weights[0, 3] = 0.0
        u = uniform(size, 3, 24)[:, 4:].view(3, 4, 5)  # a piece of a wider tensor, as in a step
        want = REFERENCE.sample(weights, u)
        got = sampling.sample_codes(weights, u, torch.int64)
        assert got is not None
        different += int((got != want).sum())
        again = sampling.sample_codes(weights, u, torch.int64)
        assert again is not None
        assert torch.equal(got, again)
        has = (weights > 0).sum(-1, keepdim=True) > torch.arange(5)
        assert bool((weights.gather(-1, got) > 0)[has].all())  # no code without a weight
        assert bool((got == size - 1)[~has].all())
    assert different <= 2


@interpreted
@pytest.mark.parametrize("image_scale", [None, 1.4, torch.tensor([1.4])], ids=str)
@pytest.mark.parametrize("whole", [False, True])
def test_guidance_is_the_reference_s(image_scale: Any, whole: bool) -> None:
    from lantern_accel_cuda.kernels import sampling

    sampled.check_guidance(sampling.guide, image_scale, whole)


def walked(kind: str, residual: Any, drawn: bool, seeds: int) -> tuple[int, int]:
    """Compare walks with the reference's; return how many drafts were kept and images refused all."""
    from lantern_accel_cuda.kernels import accept as kernels
    from lantern_accel_cuda.kernels import sampling

    refused = accepted = 0
    for seed in range(seeds):
        vocab = 29 if seed % 2 else 150
        tree, logits = situation(100 * seed, vocab, drawn, 3, (2, 10))
        if seed % 3 == 0:
            logits[..., ::5] = float("-inf")
        table = None
        if kind != "exact":
            table = neighbour_table(normal(5, vocab, 3), 8)
        rule = Rule(RULES[kind], residual, table, torch.tensor(RULES[kind].runtime_values()))
        given = Filter(0.9)  # filters have tests of their own, and the interpreter is slow
        whole = uniform(seed, 3, sum(tree.max_children) + 3)
        tests, bonus = whole[:, 2:-1], whole[:, -1]
        found = kernels.accept(tree, logits, given, rule.given, tests, bonus)
        assert found is not None
        probs = sampling.filter(logits, given)
        assert probs is not None
        want = accept_sampling(tree, probs, rule, tests, bonus)
        kept, none = sampled.check_walk(
            found, (want.path, want.length, want.bonus, want.weights, want.quality_loss)
        )
        accepted, refused = accepted + kept, refused + none
    return accepted, refused


@interpreted
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("kind", "residual", "drawn"),
    [
        ("lantern++", "aggregate", True),
        *(
            pytest.param(kind, residual, drawn, marks=pytest.mark.long)
            for kind in RULES
            for residual in ("aggregate", "optimal")
            for drawn in (False, True)
            if (kind, residual, drawn) != ("lantern++", "aggregate", True)
        ),
    ],
)
def test_a_tree_is_walked_as_the_reference_walks(kind: str, residual: str, drawn: bool) -> None:
    accepted, refused = walked(kind, residual, drawn, 3)
    assert accepted > 0
    assert refused > 0


@interpreted
def test_what_has_no_kernel_goes_the_reference_s_way(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, logits = situation(3, 29, True, 3, (2, 10))
    table = neighbour_table(normal(5, 29, 3), 8)
    tests, bonus = uniform(1, 3, sum(tree.max_children)), uniform(2, 3)
    runtime_params = torch.tensor([2.0])
    backend, _ = doubled_backend(monkeypatch, preset="fast")
    given = tests, bonus, False
    for rule in (
        Rule(Half(kind="half", k=4), "aggregate", table, torch.tensor([])),
        Rule(LanternPP(k=4), "official", table, runtime_params),
        Rule(LanternPP(k=4), "aggregate", table, runtime_params, torch.tensor([0.1])),
    ):
        assert backend.accept(tree, logits, Filter(), rule.given, *given) is None
    served = Rule(LanternPP(k=4), "aggregate", table, runtime_params)
    assert backend.accept(tree, logits, Filter(), served.given, *given) is not None


@compiles
def test_the_backend_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from lantern_accel_cuda.kernels import accept, race, sampling

    made: dict[str, Any] = {name: object() for name in ("guide", "filter", "accept")}
    made |= {"sample_codes": torch.ones(2, 3, 1), "race": torch.ones(2, 3, 1)}
    for name, value in made.items():
        module = {"accept": accept, "race": race}.get(name, sampling)
        monkeypatch.setattr(module, name, lambda *given, value=value: value)
    backend, _ = doubled_backend(monkeypatch, preset="fast")
    logits, token, keys = torch.ones(2, 3, 8), torch.zeros(2, 3), torch.ones(2, 3)
    rule = Rule(Exact()).given
    assert backend.guide(logits, token, None) is made["guide"]
    assert backend.filter(logits, Filter()) is made["filter"]
    tree, _ = situation(3, 29, True, 3, (2, 10))
    given = tree, logits, Filter(), rule, token, token
    assert backend.accept(*given, False) is made["accept"]
    for shape, count in (((2, 3), None), ((2, 3, 1), 1)):
        assert backend.sample(logits, torch.ones(shape)).shape == shape
        assert backend.race(logits, keys, token, count).shape == shape


@compiles
@pytest.mark.parametrize(("warp", "warps"), [(32, 32), (64, 16)])
def test_a_filter_s_program_has_no_more_threads_than_a_device_allows(warp: int, warps: int) -> None:
    from lantern_accel_cuda.kernels.rows import filter_shape

    assert filter_shape(16384, False, warp) == (16384, warps)
    shapes = [filter_shape(size, cut, warp) for size in (100, 8192, 65536) for cut in (0, 1)]
    assert all(count * warp <= 1024 for _, count in shapes)
