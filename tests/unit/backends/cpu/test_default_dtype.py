"""The default dtype: bfloat16 where it is read or multiplied fast, and said with the reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from support import native

from lantern_accel.device.backend import dtype_policy
from lantern_accel.device.plugins import open_backend
from lantern_accel.testing.tiny import start, tiny_engine
from lantern_accel.training.device import TrainDevice
from lantern_accel_cpu import backend as cpu
from lantern_accel_cpu.backend import DeviceBackend
from lantern_accel_cpu.native import build
from lantern_accel_cpu.native.backend import NativeCpu
from lantern_accel_cpu.native.kernels import Kernels
from lantern_accel_cpu.spec import Spec


@pytest.mark.parametrize(
    ("products", "unit", "best", "operators", "said"),
    [
        (True, "avx512bf16", torch.bfloat16, None, "the processor multiplies it"),
        (True, None, torch.bfloat16, None, "the processor multiplies it"),
        (False, "avx2", torch.bfloat16, torch.float32, "multiplied as integers"),
        (False, "avx512", torch.bfloat16, torch.float32, "widened in registers"),
        (False, "neon", torch.float32, torch.float32, "slower here"),
        (False, None, torch.float32, torch.float32, "slower here"),
    ],
)
def test_the_default_is_what_is_fast_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
    products: bool,
    unit: str | None,
    best: torch.dtype,
    operators: torch.dtype | None,
    said: str,
) -> None:
    monkeypatch.setattr(cpu, "computes_bfloat16", lambda: products)
    kernels = SimpleNamespace(library=SimpleNamespace(unit=unit))
    with DeviceBackend(0) if unit is None else NativeCpu(0, cast(Kernels, kernels)) as backend:
        monkeypatch.setattr(build, "missing", lambda: "" if unit else "no compiler")
        monkeypatch.setattr(build, "chosen_units", lambda: [unit])
        words = cpu.default_dtype(native=unit is not None)
        assert words.startswith(f"{str(best).removeprefix('torch.')} by default") and said in words
        policy = dtype_policy(backend)
        assert (policy.compute, policy.operators) == (best, operators)
        assert dtype_policy(backend, "bfloat16").operators is None  # somebody asked for it
        assert TrainDevice(backend).dtype == (operators or best)


def test_the_device_is_described_with_it() -> None:
    for own in (True, False):
        assert cpu.default_dtype(own) in Spec(own).probe().devices[0]


@native.needs_native
@pytest.mark.parametrize("unit", native.unit_cases("plain", "neon"))
def test_exact_strategies_draw_the_same_tokens_in_bfloat16(
    unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the default promises: these kernels make every number in one order, whatever the rows."""
    with open_backend("cpu", None) as backend, torch.inference_mode():
        kernels = native.kernels(unit)
        kernels.library.tiles_from(3)  # plain steps by vectors, windows by tiles
        monkeypatch.setattr(backend, "kernels", kernels)
        found = []
        for strategy in ("vanilla", "eagle", "eagle2", "scd", "self"):
            engine = tiny_engine(backend, strategy, batch=2, dtype=torch.bfloat16)
            start(engine, 5)
            found.append(engine.run().tokens)
        assert all(torch.equal(one, found[0]) for one in found)
