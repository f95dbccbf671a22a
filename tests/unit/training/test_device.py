"""Training goes through the backend: its dtypes, its compiler, its pauses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lantern_accel.device.operations import TensorOps
from lantern_accel.device.plugins import open_backend
from lantern_accel.errors import BackendError
from lantern_accel.training.device import TrainDevice


def test_a_device_without_data_trains_nothing() -> None:
    with pytest.raises(
        BackendError, match="has shapes and no data, so nothing can be trained on it"
    ):
        TrainDevice(open_backend("null"))


def test_the_precision_is_the_device_s_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    # Elsewhere torch's own operators, which train, stay in float32.
    monkeypatch.setattr("lantern_accel_cpu.backend.computes_bfloat16", lambda: True)
    backend = open_backend("cpu", None)
    orders = {
        torch.bfloat16: (torch.bfloat16, torch.float32),
        torch.float32: (torch.float16, torch.float32, torch.bfloat16),
    }
    for expected, able in orders.items():
        monkeypatch.setattr(backend, "compute_dtypes", lambda able=able: able)
        assert TrainDevice(backend).dtype == expected
    assert TrainDevice(backend, "bfloat16").dtype == torch.bfloat16
    monkeypatch.setattr(backend, "compute_dtypes", lambda: (torch.float32,))
    with pytest.raises(BackendError, match="does not compute in bfloat16"):
        TrainDevice(backend, "bfloat16")
    x = torch.ones(2, 2)
    with TrainDevice(backend).autocast():
        assert (x @ x).dtype == torch.float32
    monkeypatch.setattr(backend, "compute_dtypes", lambda: (torch.bfloat16, torch.float32))
    with TrainDevice(backend).autocast():
        assert (x @ x).dtype == torch.bfloat16


def test_a_step_pauses_through_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = open_backend("cpu", None)
    seen: list[str] = []
    monkeypatch.setattr(backend, "flush", lambda: seen.append("flush"))
    device = TrainDevice(backend, "float32")
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    run, optimizer = device.prepare(model, compile=False), device.adamw(model.parameters(), lr=0.1)
    loss = run(torch.ones(1, 2)).sum()
    device.descend(optimizer, loss, model.parameters(), 0.1, clip_norm=1.0)
    assert seen == ["flush", "flush"]
    assert not torch.equal(model.weight, before)
    assert model.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_attention_is_the_reference_s(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    device = TrainDevice(open_backend("cpu", None))
    model = nn.Module()
    model.ops = TensorOps()  # type: ignore[assignment]
    device.adopt(model)
    ops: Any = model.ops
    q, k, v = (torch.randn(2, 5, 3, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    mask = ops.mask(torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 1, 5, 5), dtype)
    found = []
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda now=compiling: now)
        out = ops.attend_dense(q, k, v, mask)
        found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    tolerance = 1e-5 if dtype == torch.float32 else 0.06
    for reference, products in zip(*found, strict=True):
        assert torch.allclose(reference.float(), products.float(), atol=tolerance)


def test_without_a_fused_kernel_the_reference_optimiser_is_the_plain_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = torch.optim.AdamW

    def adamw(groups: Any, *, fused: bool = False, **settings: Any) -> torch.optim.Optimizer:
        if fused:
            raise RuntimeError("`fused=True` requires all the params to be on a supported device")
        return real(groups, **settings)

    monkeypatch.setattr(torch.optim, "AdamW", adamw)
    made = TrainDevice(open_backend("cpu", None)).adamw([nn.Parameter(torch.zeros(2))], lr=0.5)
    assert isinstance(made, real) and not made.defaults["fused"]
