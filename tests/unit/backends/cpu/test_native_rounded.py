"""Products with weights in fewer bits, on every instruction set of this machine."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from lantern_accel.device.packed import dense
from lantern_accel.nn.rounding import ROUNDINGS, Rounded, round_weight
from lantern_accel_cpu.backend import DeviceBackend
from lantern_accel_cpu.native.backend import NativeCpu
from lantern_accel_cpu.native.rounded import RoundedPanels
from tests.support.native import draw, kernels, needs_native, threads, unit_cases

pytestmark = needs_native
FORMATS = sorted(ROUNDINGS)
#: Rows, inputs and outputs: one row and many, more rows than a block has, ends of every kind.
SIZES = [
    (1, 64, 32),
    (2, 256, 96),
    (5, 130, 40),
    (7, 67, 33),
    (13, 200, 64),
    (34, 1024, 70),
    (100, 65, 31),
]


@functools.cache
def reference(name: str, outputs: int, inputs: int) -> tuple[Rounded, RoundedPanels, RoundedPanels]:
    """Return a matrix as the reference rounds it, and a target's and a copy's panels of it."""
    made = round_weight(draw(4, outputs, inputs), ROUNDINGS[name])
    return made, RoundedPanels.of(made), RoundedPanels.of(made, drafts=True)


#: Inputs that share a step: a target's, the largest of which has 2047 of it (12 bits), and a copy's, 127.
WORDS, SPAN = 64, 256


def half_steps(x: Tensor, shared: int, most: int) -> Tensor:
    """Return by how much inputs are off at most where ``shared`` of them have a step in common."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % shared)).unflatten(1, (-1, shared))
    largest = padded.abs().amax(-1).double().repeat_interleave(shared, 1)
    return largest[:, : x.shape[1]] / (2 * most)


def check_product(found: Tensor, x: Tensor, made: Rounded, words: bool = False) -> None:
    """Check a product with rounded weights against float64, by the roundings that it has.

    ``words``: inputs are rounded to 12 bits.
    """
    inputs, weight = x.shape[1], made.dense(torch.float64)
    expected = x.double() @ weight.T
    # A rounding a term, of numbers that 128 makes larger before it is taken off again.
    most = x.double().abs() @ (weight.abs() + 160 * made.step.double().amax(1, True)).T
    error = (found.double() - expected).abs()
    out = expected.abs() * (2**-8 if x.dtype == torch.bfloat16 else 2**-23)
    bound = most * 2**-24 * (inputs**0.5 + 8) + out + 1e-30
    if words and x.dtype == torch.bfloat16:
        bound += 1.001 * half_steps(x, WORDS, 2047) @ weight.abs().T
    assert (error <= bound).all(), (*x.shape, len(weight), float((error / bound).max()))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("out", "inputs"), [(32, 64), (33, 67), (70, 130), (1, 1)])
def test_panels_give_back_what_they_were_made_of(name, out, inputs):
    made = round_weight(draw(1, out, inputs), ROUNDINGS[name])
    back = RoundedPanels.of(made).to_rounded()
    assert torch.equal(back.levels(), made.levels())
    assert torch.equal(back.step, made.step)
    assert torch.equal(back.dense(torch.float32), made.dense(torch.float32))


@pytest.mark.product("name", "drafts")
@pytest.mark.parametrize("unit", unit_cases())
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("drafts", [False, True], ids=["target", "copy"])
def test_a_matrix_is_rounded_as_the_reference_rounds_it(unit, name, dtype, packed, drafts):
    """In one native call, of weights as they are or of panels, in whole numbers as well."""
    ops, how = NativeCpu(0, kernels(unit)), ROUNDINGS[name]
    for out, inputs in ((64, 128), (70, 100), (33, 67), (1, 1), (300, 320)):
        weight = draw(9, out, inputs) * draw(10, out, 1).exp()
        weight[0] = 0
        given = weight.to(dtype)
        source = ops.pack(given) if packed else given
        with threads(2):
            found = ops.pack(source, how, drafts)
        whole = dense(source) if packed else given
        codes = round_weight(whole, how, tries=1) if drafts else round_weight(whole, how)
        made = RoundedPanels.of(codes, drafts)
        assert torch.equal(found.panels, made.panels), (out, inputs)
        assert (found.address & 15) == (made.address & 15), "how it is kept"


def test_without_kernels_the_reference_rounds():
    assert isinstance(DeviceBackend(0).pack(draw(11, 40, 128), ROUNDINGS["int8"]), Rounded)


def test_a_matrix_of_several_pieces_is_ordered_as_a_whole(monkeypatch):
    made = round_weight(draw(2, 100, 128), ROUNDINGS["int4"])
    whole = RoundedPanels.of(made).panels
    monkeypatch.setattr("lantern_accel_cpu.native.rounded._AT_ONCE", 4096)
    assert torch.equal(RoundedPanels.of(made).panels, whole)


@pytest.mark.product
@pytest.mark.parametrize("unit", unit_cases())
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_equal_those_in_float64(unit, name, dtype):
    ops = kernels(unit)
    with threads(2):
        for rows, inputs, outputs in SIZES:
            x = draw(3, rows, inputs, dtype=dtype)
            made, panels, _ = reference(name, outputs, inputs)
            found = ops.linear(x, panels, None)
            check_product(found, x, made, bool(ops.library.takes_words()))


@pytest.mark.parametrize("unit", unit_cases())
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_copys_products_lose_nothing_where_8_bits_hold_the_activations(unit, name, dtype):
    ops = kernels(unit)
    with threads(2):
        for rows, inputs, outputs in SIZES:
            whole = torch.randint(
                -127, 128, (rows, inputs), generator=torch.Generator().manual_seed(3)
            )
            whole[:, ::SPAN] = 127  # the largest of every span, so that a step is a power of two
            spans = torch.arange(inputs) // SPAN
            x = (whole * 2.0 ** -(3 + spans)).to(dtype)
            made, _, panels = reference(name, outputs, inputs)
            found = ops.linear(x, panels, None)
            check_product(found, x, made)


@pytest.mark.parametrize("unit", unit_cases())
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("drafts", [False, True], ids=["target", "copy"])
def test_the_largest_codes_and_activations_leave_no_register(unit, name, sign, drafts):
    weight = torch.ones(40, 512)
    weight[:, ::64] = -1.0  # the other end of every group
    made = round_weight(weight, ROUNDINGS[name])
    for rows in (1, 5, 9):
        x = torch.full((rows, 512), sign, dtype=torch.float32 if drafts else torch.bfloat16)
        found = kernels(unit).linear(x, RoundedPanels.of(made, drafts), None)
        check_product(found, x, made)


@pytest.mark.parametrize("unit", unit_cases())
@pytest.mark.parametrize("name", FORMATS)
def test_a_copys_products_are_off_by_half_a_step_of_each_activation_at_most(unit, name):
    ops = kernels(unit)
    for rows, inputs, outputs in SIZES:
        x = draw(3, rows, inputs)
        made = round_weight(draw(4, outputs, inputs), ROUNDINGS[name])
        found = ops.linear(x, RoundedPanels.of(made, drafts=True), None)
        weight = made.dense(torch.float64)
        bound = 1.001 * half_steps(x, SPAN, 127) @ weight.abs().T + 1e-3 * made.step.double().amax()
        assert ((found.double() - x.double() @ weight.T).abs() <= bound).all()


def test_a_bias_is_added_and_other_dtypes_go_the_references_way():
    ops = kernels()
    made = round_weight(draw(7, 48, 96), ROUNDINGS["int8"])
    panels, bias = RoundedPanels.of(made), draw(8, 48)
    x = draw(9, 3, 96)
    expected = x @ made.dense(torch.float32).T + bias
    torch.testing.assert_close(ops.linear(x, panels, bias), expected, rtol=1e-5, atol=1e-4)
    half = ops.linear(x.half(), panels, None)
    assert torch.equal(half, torch.nn.functional.linear(x.half(), made.dense(torch.float16)))
