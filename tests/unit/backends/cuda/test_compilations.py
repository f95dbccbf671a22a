"""How many kernels a first picture waits for: those that its kernels' checks compile."""

from __future__ import annotations

import contextlib

import pytest
import torch
from support.compilations import Compilations
from support.interpreter import compiles

from lantern_accel.testing.result import Failed, Measured
from lantern_accel_cuda import agreement

#: Of the checks of all kernels for one dtype, and of the products with weights in fewer bits alone.
MOST, MOST_ROUNDED = 64, 13


def counted(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> dict[str, int]:
    """Return the variants that checks compile; they compare what nothing has computed."""
    made = Compilations(monkeypatch)
    monkeypatch.setattr(agreement, "_near", lambda *given: Measured())
    monkeypatch.setattr(agreement, "within", lambda *given: Measured())
    monkeypatch.setattr(torch, "equal", lambda *given: True)
    site = agreement.Site(torch.device("cpu"), 132, (torch.bfloat16,))
    for name in names:
        with contextlib.suppress(Failed), torch.inference_mode():
            agreement.KERNELS[name](site)
    return made.names()


@compiles
def test_the_checks_of_a_first_picture_compile_few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    found = counted(monkeypatch, [*agreement.KERNELS])
    assert len(found) >= 12  # they were launched
    assert sum(found.values()) <= MOST, found


@compiles
def test_products_in_fewer_bits_are_few_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found = counted(monkeypatch, ["rounded"])
    assert 6 < sum(found.values()) <= MOST_ROUNDED, found
