"""The static-shape proof on fake tensors of the device ``cuda``, through the real backend's code."""

from __future__ import annotations

import pytest
import torch
from support.cuda_double import doubled_backend
from support.fake_cuda import Indexing

from lantern_accel.testing import static


@pytest.mark.parametrize("preset", ["safe", "fast"])
def test_a_step_on_fake_cuda_tensors_reads_nothing_and_stays_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch, preset: str
) -> None:
    if preset == "fast":
        pytest.importorskip("triton")
    backend, _ = doubled_backend(monkeypatch, preset=preset)
    backend.device = torch.device("cuda", 0)
    for strategy, batch, temperature in (("lantern++", 2, 1.0), ("eagle2", 1, 0.0)):
        with Indexing():
            seen = static.trace_shapes(backend, strategy, batch, temperature, torch.bfloat16)
        assert seen.violations == []
        assert len(seen.signature) > 300
        made = {str(entry[-1]) for entry in seen.signature}
        assert not any("float64" in one for one in made)


def test_a_host_read_in_a_step_is_found_on_fake_cuda_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, _ = doubled_backend(monkeypatch)
    backend.device = torch.device("cuda", 0)
    honest = backend.write

    def reads(kv, layer, address, k, v):
        if address.max().item() >= 0:
            honest(kv, layer, address, k, v)

    monkeypatch.setattr(backend, "write", reads)
    with Indexing():
        seen = static.trace_shapes(backend, "lantern++", 1, 1.0, torch.float32)
    assert {one.rule for one in seen.violations} == {"host_read"}
    assert seen.violations[0].operator == "aten::_local_scalar_dense"
