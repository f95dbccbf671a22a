"""What a failed check says: expected and found, the worst place, a likely cause, the author's line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.faults import small_shapes

from lantern_accel.device.backend import Backend
from lantern_accel.device.plugins import open_backend
from lantern_accel.errors import BackendError, LanternWarning
from lantern_accel.testing import Failed, check_tokens, host, next_to_cpu, operations
from lantern_accel.testing.kit import conform, run_checks, select
from lantern_accel.testing.result import compare


@pytest.fixture
def backend() -> Any:
    with open_backend("cpu", {"native": "off"}) as opened:
        yield opened


def refuse(out: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("no kernel for this")


def test_one_exception_is_one_cause_with_its_line(backend: Backend) -> None:
    real = backend.attend
    backend.attend = lambda *given: refuse(real(*given))  # type: ignore[method-assign]  # a planted fault
    caches = ["kv.round_trip", "kv.sentinels"]  # which no attention reads
    report = run_checks(backend, select([*caches, "attention.float64", "kv.slots", "kv.addresses"]))
    one, other, first, *rest = report.outcomes
    assert one.state == other.state == "passed"
    assert "NotImplementedError: no kernel for this (conformance/test_failures.py:" in first.detail
    assert 'raise NotImplementedError("no kernel for this")' in first.detail
    assert [one.detail for one in rest] == ["the same as attention.float64"] * 2
    assert "3 failed by 1 cause" in report.summary()


def test_conform_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from lantern_accel_cpu.backend import DeviceBackend

    monkeypatch.setattr(DeviceBackend, "energy_mjj", refuse, raising=False)
    with pytest.warns(
        LanternWarning, match=r"energy_mjj is not a method.*did you mean energy_mj\?"
    ):
        assert conform("cpu", only="kv.round_trip").passed


def test_facts_that_cannot_be_made_are_not_a_busy_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from lantern_accel.device.backend import DeviceFacts
    from lantern_accel_cpu.backend import DeviceBackend

    monkeypatch.setattr(DeviceBackend, "facts", lambda self: DeviceFacts(nmae="x"))
    with pytest.raises(BackendError, match=r"failed in facts: .*report it to the plug-in") as told:
        open_backend("cpu")
    assert "first allocation" not in str(told.value)


def test_decoding_is_compared_step_by_step(backend: Backend) -> None:
    found = next_to_cpu(backend)
    assert found.error is not None and found.error < 1e-5
    real = backend.attend
    backend.attend = lambda *given: real(*given) * 1.01  # type: ignore[method-assign]  # a planted fault
    with pytest.raises(Failed, match=r"the logits of the prefill: at \[.*\] it is"):
        next_to_cpu(backend)


def test_a_code_that_may_not_be_has_no_logit(backend: Backend) -> None:
    real = backend.guide
    backend.guide = lambda logits, token, scale, of, penalties: real(logits, token, scale, of)  # type: ignore[method-assign]  # a planted fault
    with pytest.raises(Failed, match="logits of the prefill: a code that may not be has one"):
        next_to_cpu(backend, family="lumina2")


def test_the_first_token_that_differs_is_named() -> None:
    want = torch.arange(12).view(2, 6)
    got = want.clone()
    got[1, 3:] += 1
    with pytest.raises(Failed, match="token 3 of image 1 is 10, expected 9; the 3 tokens before"):
        check_tokens(got, want)


def test_a_nan_is_the_worst_of_all() -> None:
    got, want = torch.zeros(4), torch.ones(4, dtype=torch.float64)
    got[2] = float("nan")
    with pytest.raises(Failed, match=r"at \[2\] it is nan, expected 1"):
        compare(got, want, 0.5, "x")


def test_a_decision_that_is_nearly_a_tie_is_not_held_against_a_device(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "NEAR", 1.0)  # then every token is one
    assert "token 0 is nearly a tie" in next_to_cpu(backend).detail


@pytest.mark.parametrize("shapes", ["small", pytest.param("all", marks=pytest.mark.long)])
def test_arithmetic_in_another_order_passes(
    backend: Backend, shapes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums in pieces, partial sums that are stored, a fused norm: what honest devices do."""

    if shapes == "small":
        small_shapes(monkeypatch)

    def linear(x: Any, weight: Any, bias: Any = None, sums: bool = False) -> torch.Tensor:
        # A sum in four pieces, each stored in the dtype, added from the last on.
        parts = [a @ b.t() for a, b in zip(x.chunk(4, -1), weight.chunk(4, -1), strict=True)]
        out = parts[3] + parts[2] + parts[1] + parts[0]
        out = out if bias is None else out + bias
        return out.float() if sums else out

    def rms_norm(x: Any, weight: Any, eps: float) -> torch.Tensor:
        wide = x.float()
        root = (wide.square().sum(-1, keepdim=True) * (1 / x.shape[-1]) + eps).rsqrt()
        return ((wide * (root * (1 + 2.0**-22))) * weight.float()).to(x.dtype)

    def swiglu(x: Any) -> torch.Tensor:
        gate, up = x.float().chunk(2, -1)
        return (gate * (0.5 + 0.5 * (gate / 2).tanh()) * up).to(x.dtype)

    def attend(q: Any, kv: Any, layer: int, mask: Any) -> torch.Tensor:
        # Scores and weights stored in the dtype, as two products around a softmax have them.
        k, v = kv.by_head(layer, mask.shape[-1])
        scores = (q.transpose(1, 2) * q.shape[-1] ** -0.5) @ k.transpose(2, 3) + mask
        return (scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v).transpose(1, 2)

    backend.pack = lambda weight, form=None, drafts=False: weight  # type: ignore[method-assign]  # as a plug-in may
    backend.linear, backend.rms_norm = linear, rms_norm  # type: ignore[method-assign]
    backend.swiglu, backend.attend = swiglu, attend  # type: ignore[method-assign]
    names = ("linear", "logits", "rms_norm", "swiglu")
    chosen = [*(f"operation.{name}" for name in names), "attention.float64", "attention.trunk"]
    for outcome in run_checks(backend, select(chosen)).outcomes:
        assert outcome.state == "passed", outcome


def test_sums_of_pairs_aligned_to_26_bits_pass(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix engine that adds two products and the sum so far, cut to 26 bits of the largest."""
    monkeypatch.setattr(operations, "MATRICES", ((384, 8), (100, 7)))
    monkeypatch.setattr("lantern_accel.testing.result.dtypes_of", lambda backend: [torch.float32])

    def linear(x: Any, weight: Any, bias: Any = None, sums: bool = False) -> torch.Tensor:
        products = (x.double().unsqueeze(-2) * weight.double()).float().double()
        total = products.new_zeros(products.shape[:-1])
        for first in range(0, products.shape[-1], 2):
            three = torch.cat((total.unsqueeze(-1), products[..., first : first + 2]), -1)
            largest = three.abs().amax(-1, keepdim=True).clamp(min=1e-30)
            unit = 2.0 ** (largest.log2().floor() - 25)
            total = ((three / unit).trunc() * unit).sum(-1).float().double()
        out = total.float()
        return out if bias is None else out + bias

    backend.pack = lambda weight, form=None, drafts=False: weight  # type: ignore[method-assign]  # as a plug-in may
    backend.linear = linear  # type: ignore[method-assign]
    (outcome,) = run_checks(backend, select("operation.linear")).outcomes
    assert outcome.state == "passed", outcome
