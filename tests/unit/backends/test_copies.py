"""Late reads of what a step counts, on the double of each device that copies on a stream of its own."""

from __future__ import annotations

import pytest
import torch
from support.cuda_double import doubled_backend
from support.gaudi import Gaudi, on_cpu

from lantern_accel.device.backend import Backend
from lantern_accel.testing import tiny
from lantern_accel_cuda import copies as cuda
from lantern_accel_hpu import copies as hpu
from lantern_accel_hpu.backend import DeviceBackend
from lantern_accel_hpu.bridge import Bridge

SLOTS = max(cuda.SLOTS, hpu.SLOTS)


@pytest.fixture(params=["cuda", "hpu pinned", "hpu pageable"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Open a backend on its double; the CPU's memory stands for what is pinned."""
    if request.param == "cuda":
        return doubled_backend(monkeypatch)[0]
    pinned = request.param == "hpu pinned"
    monkeypatch.setattr(
        Bridge,
        "allocate_pinned",
        lambda self, *of: torch.empty(of[0], dtype=of[1]) if pinned else None,
    )
    return on_cpu(DeviceBackend(Bridge(Gaudi())))


@pytest.mark.product
@pytest.mark.parametrize("cancelled", [0, SLOTS + 2])
def test_reads_come_in_the_order_of_posts_and_forget_a_cancelled_request(
    backend: Backend, cancelled: int
) -> None:
    """Neither a later value of the source nor a post before ``clear`` is read."""
    source = torch.zeros(2, dtype=torch.int64)
    copy = backend.host_copy(source)
    assert copy.lag == 1
    for _ in range(cancelled):
        copy.post()
    copy.clear()
    for value in range(1, SLOTS + 4):  # more than may be under way at once
        source.fill_(value)
        copy.post()
    source.fill_(-1)
    assert [copy.read().tolist() for _ in range(SLOTS + 3)] == [[v, v] for v in range(1, SLOTS + 4)]


@pytest.mark.product
@pytest.mark.parametrize("strategy", ["vanilla", "lantern++"])
@torch.inference_mode()
def test_an_engine_that_reads_late_decodes_the_same(
    backend: Backend, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny.tiny_engine(backend, strategy, batch=2)
    tiny.start(engine, 1)
    seen: list[int] = []
    late = engine.run(on_progress=seen.append)
    monkeypatch.setattr(type(engine.session.progress), "lag", 0)
    tiny.start(engine, 1)
    prompt = engine.run()
    assert torch.equal(late.tokens, prompt.tokens)
    assert torch.equal(late.steps, prompt.steps)
    assert seen == sorted(seen)
