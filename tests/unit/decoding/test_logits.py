"""From logits to draws: filters as LlamaGen's, guidance, and the inverse CDF."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chi_square import misfit
from support.golden import golden

from lantern_accel.decoding.logits import distribution
from lantern_accel.device.sampling import guide
from lantern_accel.nn.transformer import REFERENCE
from lantern_accel.strategy.values import Sampling

RECORDED = sorted(k for k in golden("llamagen_c2i/io") if k.startswith("probs."))


@pytest.mark.parametrize("name", RECORDED)
def test_filtered_probabilities_are_the_official_ones(name: str) -> None:
    found = re.fullmatch(r"probs\.t([\d.]+)_k(\d+)_p([\d.]+)", name)
    assert found is not None
    temperature, top_k, top_p = float(found[1]), int(found[2]), float(found[3])
    io = golden("llamagen_c2i/io")
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    probs = distribution(io["sample_in_logits"], sampling)
    assert (probs - io[name]).abs().max() < 1e-6
    assert torch.equal(probs > 0, io[name] > 0)


def test_the_order_of_the_filters_matters_where_both_are_set() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    settings_ = {"top_k": 2, "top_p": 0.55}
    first = distribution(logits, Sampling(**settings_))
    second = distribution(logits, Sampling(**settings_, order="top_p_first"))
    # Among the best two alone, 0.4 is already 0.571 of the mass.
    assert first.tolist() == pytest.approx([1, 0, 0, 0])
    assert second.tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0])


def test_codes_equal_to_the_kth_stay() -> None:
    probs = distribution(torch.tensor([2.0, 1.0, 1.0, 0.0]), Sampling(top_k=2))
    assert (probs > 0).tolist() == [True, True, True, False]


@pytest.mark.product
@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize(("top_k", "top_p"), [(5, 0.8), (40, 0.8), (40, 0.99), (63, 0.3)])
def test_both_filters_at_once_keep_what_one_after_the_other_keeps(
    top_k: int, top_p: float, bfloat16: bool
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(200, 64) * torch.linspace(0.05, 5, 200).unsqueeze(-1)
    if bfloat16:  # brings equal values, at the k-th place too
        logits = logits.bfloat16().float()
    found = distribution(logits, Sampling(top_k=top_k, top_p=top_p))
    for row, probs in zip(logits, found, strict=True):
        kth = row.sort(descending=True).values[top_k - 1]
        ordered = row[row >= kth].sort(descending=True).values
        mass = ordered.double().softmax(-1)
        before = mass.cumsum(-1) - mass
        clear = (before - top_p).abs().min() > 1e-6
        count = int((before <= top_p).sum())
        kept = row[probs > 0].sort(descending=True).values
        assert len(kept) == count or not clear or ordered[count - 1] == kth
        assert torch.equal(kept[: top_k - 1], ordered[: len(kept)][: top_k - 1])
        assert probs.sum() == pytest.approx(1, abs=1e-5)


def test_the_best_code_survives_every_top_p() -> None:
    probs = distribution(torch.randn(20, 30), Sampling(top_p=1e-6))
    assert ((probs > 0).sum(-1) == 1).all()


def test_greedy_ignores_the_filters() -> None:
    logits = torch.randn(3, 9)
    raw = distribution(logits, Sampling(temperature=0, top_k=2))
    assert torch.equal(raw, logits.softmax(-1))


def test_guidance_extrapolates_and_a_scale_of_one_is_the_conditional_row_bit_for_bit() -> None:
    logits = torch.randn(4, 3, 7)
    scale = torch.tensor([[1.0, 3.0, 0.5], [7.5, 1.0, 2.0]])
    out = guide(logits, scale)
    for image in range(2):
        cond, uncond = logits[image], logits[image + 2]
        for t in range(3):
            s = float(scale[image, t])
            if s <= 1:
                assert torch.equal(out[image, t], cond[t])
            else:
                expected = (1 - s) * uncond[t] + s * cond[t]
                assert (out[image, t] - expected).abs().max() < 1e-5
    assert guide(logits, None) is logits


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=9).filter(any),
    st.integers(0, 2**23 - 1),
    st.floats(0.01, 100),
)
def test_draw_inverts_the_cumulative_distribution(
    weights: list[int], grid: int, scale: float
) -> None:
    u = torch.tensor((2 * grid + 1) / 2**24).clamp(max=1 - 2.0**-22)
    code = int(REFERENCE.sample(torch.tensor(weights, dtype=torch.float32) * scale, u))
    assert weights[code] > 0, "a code without weight is never drawn"
    below, total = sum(weights[:code]), sum(weights)
    assert below / total <= float(u) + 1e-6
    assert float(u) - 1e-6 <= (below + weights[code]) / total


@pytest.mark.parametrize("u", [2.0**-24, 1 - 2.0**-22])
def test_extreme_uniforms_draw_codes_that_have_weight(u: float) -> None:
    for seed in range(20):
        weights = torch.rand(5, 16384, generator=torch.Generator().manual_seed(seed))
        weights[:, :7] = 0
        weights[:, 12000:] = 0
        code = REFERENCE.sample(weights / weights.sum(-1, keepdim=True), torch.full((5,), u))
        assert (weights.gather(1, code.unsqueeze(1)) > 0).all()


def test_draws_without_replacement_follow_the_conditional_probabilities() -> None:
    weights = torch.tensor([0.4, 0.0, 0.3, 0.2, 0.1])
    count = 100_000
    u = torch.rand(count, 3, generator=torch.Generator().manual_seed(0)).clamp(max=1 - 2.0**-22)
    codes = REFERENCE.sample(weights.expand(count, -1), u)
    expected = torch.zeros(5, 5, 5)
    for a, b, c in itertools.permutations([0, 2, 3, 4], 3):
        rest_a = 1 - weights[a]
        rest_b = rest_a - weights[b]
        expected[a, b, c] = weights[a] * weights[b] / rest_a * weights[c] / rest_b
    cells = (codes[:, 0] * 5 + codes[:, 1]) * 5 + codes[:, 2]
    counts = torch.bincount(cells, minlength=125)
    # Codes that repeat, or have no weight, are expected never: an infinite misfit.
    assert misfit(counts, expected) < 4.9
    with_replacement = torch.einsum("a,b,c->abc", weights, weights, weights)
    assert misfit(counts, with_replacement) > 10


def test_where_codes_run_out_draws_repeat_one_that_has_no_weight_left() -> None:
    weights = torch.tensor([[0.5, 0.0, 0.5, 0.0]])
    codes = REFERENCE.sample(weights, torch.full((1, 4), 0.3))
    assert codes.tolist() == [[0, 2, 3, 3]]


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"), [(1, 0.505, 51), (10, 0.505, 51), (1, 0.99, 100)]
)
def test_ties_of_the_kth_value_count_one_by_one_towards_top_p(
    top_k: int, top_p: float, kept: int
) -> None:
    # Top-k keeps all hundred, as the official filter does; top-p then keeps as many as hold p.
    both = distribution(torch.zeros(100), Sampling(top_k=top_k, top_p=top_p))
    assert int((both > 0).sum()) == kept
