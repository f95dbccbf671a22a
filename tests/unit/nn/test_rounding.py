"""Weights in fewer bits: what is kept, and how far it is from what was rounded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lantern_accel.errors import RequestError
from lantern_accel.nn.rounding import (
    ROUNDINGS,
    Rounding,
    pack_levels,
    round_weight,
    rounding,
    unpack_levels,
)
from lantern_accel.nn.transformer import REFERENCE, Projection, pack, rounded_copy

FORMATS = [*ROUNDINGS.values(), Rounding("by 32", 4, 32)]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [4, 6])
@given(data=st.data())
def test_packed_levels_come_back(bits, data):
    count = 4 * data.draw(st.integers(1, 16))
    levels = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=count, max_size=count))
    given_ = torch.tensor(levels, dtype=torch.uint8)
    made = pack_levels(given_, bits)
    assert made.numel() * 8 == count * bits
    assert torch.equal(unpack_levels(made, bits), given_)


@pytest.mark.parametrize("how", FORMATS, ids=lambda h: h.name)
@pytest.mark.parametrize("inputs", [64, 100, 7])
def test_no_weight_is_further_than_a_step_from_what_it_was(how, inputs):
    weight = drawn(9, inputs)
    made = round_weight(weight, how)
    dense = made.dense(torch.float64)
    assert dense.shape == weight.shape
    step = made.step.double().repeat_interleave(how.group or inputs, dim=1)[:, :inputs]
    # Without a cut half a step; a cut is taken where the squared error is less, and a bfloat16 step may
    # end the range 2**-8 of its width early.
    levels = 2**how.bits
    most = 0.5 * step if not how.group else step * levels * 0.15
    assert ((dense - weight).abs() <= most * (1 + 1e-6)).all()
    bits = how.bits + (32 / how.group if how.group else 0)
    assert how.bits_per_weight == bits


def test_bytes_are_those_of_the_bits():
    weight = drawn(64, 1024)
    for name, share in (("int8", 8), ("int6", 6.5), ("int4", 4.5)):
        made = round_weight(weight, ROUNDINGS[name])
        rows = 4 * 64 if name == "int8" else 0
        assert made.nbytes == weight.numel() * share / 8 + rows


def test_more_bits_are_nearer_and_a_row_of_zeros_stays_one():
    weight = drawn(32, 256)
    weight[3] = 0
    errors = []
    for name in ("int4", "int6", "int8"):
        dense = round_weight(weight, ROUNDINGS[name]).dense(torch.float32)
        assert (dense[3] == 0).all()
        errors.append(float((dense - weight).square().mean()))
    # Two bits more are 16 times less squared error; a row's step is wider than a group's.
    assert errors[0] > 10 * errors[1] > 40 * errors[2]


@pytest.mark.parametrize("name", ["int6", "int4"])
def test_one_try_cuts_nothing_and_costs_six_bits_next_to_nothing(name):
    weight = drawn(64, 256, seed=3)
    best, quick = (round_weight(weight, ROUNDINGS[name], tries=tries) for tries in (9, 1))
    assert torch.equal(round_weight(weight, ROUNDINGS[name]).codes, best.codes)
    errors = [float((one.dense(torch.float32) - weight).norm()) for one in (best, quick)]
    assert errors[0] < errors[1] < errors[0] * (1.03 if name == "int6" else 1.15)
    groups = torch.unflatten(weight, 1, (-1, 64))
    wide = groups.amax(-1) - groups.amin(-1)
    steps = quick.step.float() * (2 ** ROUNDINGS[name].bits - 1)
    assert torch.allclose(steps, wide, rtol=2**-8), "the whole range of every group"


def test_a_copy_that_drafts_is_rounded_in_one_try():
    target = torch.nn.Sequential(Projection(128, 40, bias=False))
    made, quick = (
        rounded_copy(target, REFERENCE, ROUNDINGS["int4"], drafts=drafts)[0].packed
        for drafts in (False, True)
    )
    weight = target[0].weight
    assert torch.equal(made.codes, round_weight(weight, ROUNDINGS["int4"]).codes)
    assert torch.equal(quick.codes, round_weight(weight, ROUNDINGS["int4"], tries=1).codes)


def test_rounding_in_pieces_is_rounding_at_once(monkeypatch):
    weight = drawn(50, 128)
    whole = round_weight(weight, ROUNDINGS["int6"])
    monkeypatch.setattr("lantern_accel.nn.rounding._AT_ONCE", 128 * 7)
    parts = round_weight(weight, ROUNDINGS["int6"])
    assert torch.equal(whole.codes, parts.codes)
    assert whole.offset is not None
    assert parts.offset is not None
    assert torch.equal(whole.offset, parts.offset)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_projection_in_fewer_bits_multiplies_by_its_dense_weights(name):
    layer = Projection(96, 40, bias=True)
    weight = layer.weight.detach().clone()
    pack(layer, REFERENCE, ROUNDINGS[name])
    x, rest = drawn(3, 96), drawn(3, 40, seed=1)
    dense = round_weight(weight, ROUNDINGS[name]).dense(torch.float32)
    expected = torch.nn.functional.linear(x, dense, layer.bias)
    assert torch.equal(layer(x, REFERENCE), expected)
    assert torch.equal(layer(x, REFERENCE, rest), rest + expected)
    assert layer.weight.shape == weight.shape  # its shape, and no memory
    assert layer.weight.untyped_storage().nbytes() == 4


def test_an_unknown_rounding_is_refused_with_the_names():
    assert rounding("int8").bits == 8
    with pytest.raises(RequestError, match=r"int9.*int8.*full"):
        rounding("int9")
