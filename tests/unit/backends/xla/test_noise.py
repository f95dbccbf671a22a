"""Noise on a device that divides in place of shifting, and contracts a product and a sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.xla_double import Double
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lantern_accel.device.noise import exponential, noise_keys
from lantern_accel_xla.backend import DeviceBackend, round_product, shift_right

ADD, MUL = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor


class Contracting(TorchDispatchMode):
    """Rounds a float32 sum of a product once, as XLA's CPU client does."""

    def __init__(self) -> None:
        super().__init__()
        #: Products, kept so that no other tensor gets their ids, and each in float64.
        self.products: dict[int, tuple[Tensor, Tensor]] = {}
        self.contracted = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in (ADD, MUL) or out.dtype != torch.float32:
            return out
        if func is MUL:
            a, b = (torch.as_tensor(one, dtype=torch.float32).double() for one in args)
            self.products[id(out)] = (out, a * b)
            return out
        for one, other in (args[::-1], args):
            if isinstance(one, Tensor) and id(one) in self.products:
                self.contracted += 1
                term = torch.as_tensor(other, dtype=torch.float32).double()
                return (self.products[id(one)][1] + term).float()
        return out


def test_noise_has_the_reference_s_bits_where_products_and_sums_are_contracted() -> None:
    keys, positions = noise_keys([7, 2**63 + 11], [0, 3]), torch.arange(8).repeat(2, 1)
    want = exponential(keys, positions, 1003)
    with Contracting() as mode:
        plain = exponential(keys, positions, 1003)
        assert mode.contracted == 7
        assert not torch.equal(plain, want)
        assert torch.equal(DeviceBackend(Double()).noise(keys, positions, 1003), want)
    assert mode.contracted == 7


def test_a_product_is_what_it_was() -> None:
    a = torch.linspace(-33, 33, 4001)
    for b in (a.flip(0) / 33, 0.693147182464599609375, 1 / 13, -0.0):
        assert torch.equal(round_product(a, b), a * b)


@pytest.mark.parametrize("by", [3, 6, 15, 16, 17, 19, 26])
def test_words_are_shifted_where_a_shift_is_a_division(by: int) -> None:
    words = torch.randint(-(2**31), 2**31, (4096,), dtype=torch.int64).to(torch.int32)
    words = torch.cat((words, torch.tensor([-(2**31), -1, 0, 1, 2**31 - 1], dtype=torch.int32)))
    cleared = words & -(1 << by)
    divided = torch.div(cleared, 1 << by, rounding_mode="trunc").to(torch.int32)
    assert torch.equal(shift_right(words, by), words >> by)
    assert torch.equal(divided, words >> by)
