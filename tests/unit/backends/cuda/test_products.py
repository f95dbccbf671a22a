"""Products that are added to a residual: in its memory where nobody needs it any more."""

from __future__ import annotations

import pytest
import torch
from support.cuda_double import doubled_backend

from lantern_accel.device.operations import TensorOps
from lantern_accel.nn.transformer import Decoder, Pass, RMSNorm


def test_a_product_is_added_where_the_residual_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, _ = doubled_backend(monkeypatch)
    random = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 3, 8, generator=random), torch.randn(6, 8, generator=random)
    residual, bias = torch.randn(2, 3, 6, generator=random), torch.randn(6, generator=random)
    want = TensorOps().linear_add(x, weight, residual)
    assert torch.equal(want, residual + x @ weight.t())
    with_bias = TensorOps().linear_add(x, weight, residual, bias)
    with torch.inference_mode():
        torch.testing.assert_close(backend.linear_add(x, weight, residual.clone(), bias), with_bias)
        wide = residual.transpose(0, 1).contiguous().transpose(0, 1)
        torch.testing.assert_close(backend.linear_add(x, weight, wide), want)
        torch.testing.assert_close(wide, residual)
        got = backend.linear_add(x, weight, residual)
    assert got is residual
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("able", [True, False])
def test_logits_keep_the_sums_where_torch_gives_them(
    able: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processor's torch gives no sums; in its place a product that does."""
    backend, _ = doubled_backend(monkeypatch)
    plain, asked = torch.mm, []

    def mm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        asked.append(out_dtype)
        return plain(a.to(out_dtype), b.to(out_dtype))

    if able:
        monkeypatch.setattr(torch, "mm", mm)
    random = torch.Generator().manual_seed(1)
    x, weight, bias = (
        torch.randn(*shape, generator=random).bfloat16() for shape in ((2, 3, 8), (6, 8), (6,))
    )
    for added in (None, bias):
        with torch.inference_mode():
            got = backend.linear(x, weight, added, sums=True)
        want = TensorOps().linear(
            x.float(), weight.float(), None if added is None else added.float()
        )
        assert got.dtype == torch.float32 and got.shape == (2, 3, 6)
        torch.testing.assert_close(
            got, want, rtol=1e-6 if able else 2e-2, atol=1e-5 if able else 2e-2
        )
    assert bool(asked) == able


def test_gradients_flow_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, _ = doubled_backend(monkeypatch)
    residual = torch.zeros(2, 4, requires_grad=True)
    got = backend.linear_add(torch.ones(2, 3), torch.ones(4, 3), residual * 1.0)
    got.sum().backward()
    assert residual.grad is not None
    assert torch.equal(residual.grad, torch.ones(2, 4))


def test_states_between_blocks_stay_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, _ = doubled_backend(monkeypatch)
    torch.manual_seed(0)
    blocks = Decoder.plain(16, 2, 24, 1e-5, 3).blocks().requires_grad_(False).eval()
    x = torch.randn(2, 5, 16)
    at = Pass(torch.ones(1, 5, 1, 4), torch.zeros(1, 5, 1, 4))
    with torch.inference_mode():
        want = TensorOps().trunk(blocks, x.clone(), at, (1, 2), RMSNorm(16, 1e-5))
        got = backend.trunk(blocks, x.clone(), at, (1, 2), RMSNorm(16, 1e-5))
    torch.testing.assert_close(got, want)
