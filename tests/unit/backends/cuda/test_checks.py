"""This backend's own conformance checks: they pass on the double, and each catches its planted fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.cuda_double import CudaDouble, doubled_backend
from support.interpreter import compiles
from torch import Tensor

from lantern_accel.device.backend import Backend
from lantern_accel.testing import kit
from lantern_accel.testing.result import Failed
from lantern_accel_cuda import agreement, attention, checks
from lantern_accel_cuda.graphs import GraphReplay


@pytest.fixture(autouse=True)
def fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "STRATEGIES", ("vanilla", "lantern++"))
    monkeypatch.setattr(checks, "REPLAYS", 3)


def outcomes(backend: Backend, *names: str) -> dict[str, kit.Outcome]:
    report = kit.run_checks(backend, kit.select(names or "gpu", kit.checks_of(backend)))
    return {one.name: one for one in report.outcomes}


@pytest.mark.long
def test_they_pass_or_say_what_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "has_triton", lambda: False)
    backend, _ = doubled_backend(monkeypatch)
    found = outcomes(backend)
    assert {name: one.state for name, one in found.items()} == {
        "gpu.no_host_read": "passed",
        "gpu.no_allocation": "passed",
        "gpu.released": "passed",
        "gpu.sampling_kernels": "not applicable",
        **{f"gpu.kernel_{name}": "not applicable" for name in agreement.KERNELS},
    }
    assert torch.cuda.get_sync_debug_mode() == 0
    # What older torch allocates to begin a capture is not what the step left in the pool.
    backend, double = doubled_backend(monkeypatch, graph="phases")
    double.bookkeeping = 1024
    assert outcomes(backend, "gpu.no_allocation")["gpu.no_allocation"].state == "passed"
    backend, _ = doubled_backend(monkeypatch, graph="off")
    assert outcomes(backend, "gpu.no_allocation")["gpu.no_allocation"].state == "not applicable"


def reads(backend: Backend, double: CudaDouble, patch: pytest.MonkeyPatch) -> None:
    honest = backend.write

    def write(kv, layer, address, k, v):
        if address.max().item() >= 0:
            honest(kv, layer, address, k, v)

    patch.setattr(backend, "write", write)


def allocates(backend: Backend, double: CudaDouble, patch: pytest.MonkeyPatch) -> None:
    double.allocates_in_replay = True


def keeps(backend: Backend, double: CudaDouble, patch: pytest.MonkeyPatch) -> None:
    honest = backend.write

    def write(kv, layer, address, k, v):
        double.allocated += 512 * (double.capturing is not None and layer == 0)
        honest(kv, layer, address, k, v)

    patch.setattr(backend, "write", write)


def never_frees(backend: Backend, double: CudaDouble, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GraphReplay, "release", lambda self: double.pools.update({len(double.pools): 64}))


Plant = Callable[[Backend, CudaDouble, pytest.MonkeyPatch], None]


@pytest.mark.parametrize(
    ("plant", "check", "says"),
    [
        (reads, "gpu.no_host_read", "called a synchronizing CUDA operation"),
        (allocates, "gpu.no_allocation", "vanilla: 3 allocations in 3 replays"),
        (keeps, "gpu.no_allocation", "keep 1024 bytes in their pool"),
        (never_frees, "gpu.released", "bytes stay after three captures"),
    ],
)
def test_each_catches_its_fault(
    monkeypatch: pytest.MonkeyPatch, plant: Plant, check: str, says: str
) -> None:
    backend, double = doubled_backend(monkeypatch)
    plant(backend, double, monkeypatch)
    found = outcomes(backend, check)[check]
    assert found.state == "failed"
    assert says in found.detail
    assert torch.cuda.get_sync_debug_mode() == 0


@compiles
@pytest.mark.parametrize("wrong", range(6))
def test_attention_is_compared_in_every_form_that_serves(
    wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forms are blocks of queries, widths of heads and warps; each is wrong once, the rest by torch."""
    from lantern_accel_cuda.kernels import tree_attention

    forms = agreement.QUERIES
    plans = {
        (n, w): tree_attention.plan(n, 704, w, 40, 2, 82)[:4]
        for n in (1, 16, 17, 32, 33, 64)
        for w in (64, 100)
    }
    checked = {tree_attention.plan(n, 704, w, 40, 2, 82)[:4] for n, w in forms}
    assert set(plans.values()) == checked

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, cores: int) -> Tensor:
        width = q.shape[-1]
        added = torch.zeros(mask.shape).masked_fill(mask == 0, float("-inf"))
        out = attention.sdpa(q, k[..., :width], v[..., :width], added)
        return out * (1.1 if (q.shape[1], width) == forms[wrong] else 1.0)

    monkeypatch.setattr(tree_attention, "attend", attend)
    site = agreement.Site(torch.device("cpu"), 82, (torch.float32,))
    with pytest.raises(Failed, match="attention"):
        agreement.attend(site)


@compiles
def test_programs_share_what_the_checks_give_them() -> None:
    from lantern_accel_cuda.kernels import advance, few

    assert all(few.pieces_of(640, 72, shape, 82) > 1 for shape in few.SHAPES)
    assert advance.pieces_of(agreement.CODES)[1] > 1
    defaults = [
        one.__wrapped__.__defaults__
        for one in (agreement.advance, agreement.enter, agreement.guesses)
    ]
    assert all(given is not None and agreement.CODES in given for given in defaults)
