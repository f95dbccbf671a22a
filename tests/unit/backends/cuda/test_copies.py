"""Late reads through pinned memory, on the double."""

from __future__ import annotations

import pytest
import torch
from support.cuda_double import doubled_backend

from lantern_accel.errors import DeviceLostError
from lantern_accel.testing import tiny
from lantern_accel_cuda.copies import SLOTS


def test_reads_come_in_the_order_of_posts_whatever_the_source_holds_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, _ = doubled_backend(monkeypatch)
    source = torch.zeros(2, dtype=torch.int64)
    copy = backend.host_copy(source)
    assert copy.lag == 1
    for value in range(SLOTS + 3):  # more than may be under way at once
        source.fill_(value)
        copy.post()
    source.fill_(-1)
    assert [copy.read().tolist() for _ in range(SLOTS + 3)] == [[v, v] for v in range(SLOTS + 3)]


def test_what_a_cancelled_request_posted_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, _ = doubled_backend(monkeypatch)
    source = torch.zeros(2, dtype=torch.int64)
    copy = backend.host_copy(source)
    for _ in range(SLOTS + 2):
        copy.post()
    copy.clear()
    for value in range(1, SLOTS + 3):
        source.fill_(value)
        copy.post()
    assert [copy.read().tolist() for _ in range(SLOTS + 2)] == [[v, v] for v in range(1, SLOTS + 3)]


def test_a_post_waits_for_nothing_on_the_host_and_orders_both_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, double = doubled_backend(monkeypatch)
    copy = backend.host_copy(torch.zeros(1))
    double.done.clear()
    copy.post()
    taken, waits, copied = double.done
    event = taken.split()[1]
    assert taken == f"event {event} on default"
    assert waits.endswith(f"waits for event {event}")
    assert waits.startswith("side")
    assert copied.startswith("event") and "on side" in copied
    assert not any("host waits" in line for line in double.done)
    copy.read()
    assert double.done[-1] == f"host waits for event {copied.split()[1]}"


def test_all_copies_of_a_backend_share_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, double = doubled_backend(monkeypatch)
    for _ in range(3):
        backend.host_copy(torch.zeros(1)).post()
    assert len({line.split(" waits")[0] for line in double.done if "waits for event" in line}) == 1


def test_an_engine_that_reads_late_decodes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, _ = doubled_backend(monkeypatch)
    with torch.inference_mode():
        for strategy in ("vanilla", "lantern++"):
            engine = tiny.tiny_engine(backend, strategy, batch=2)
            tiny.start(engine, 1)
            seen: list[int] = []
            late = engine.run(on_progress=seen.append)
            monkeypatch.setattr(type(engine.session.progress), "lag", 0)
            tiny.start(engine, 1)
            prompt = engine.run()
            monkeypatch.undo()
            backend, _ = doubled_backend(monkeypatch)
            assert torch.equal(late.tokens, prompt.tokens)
            assert torch.equal(late.steps, prompt.steps)
            assert seen == sorted(seen)


def test_a_card_lost_under_way_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, double = doubled_backend(monkeypatch)
    copy = backend.host_copy(torch.zeros(1))
    copy.post()
    double.lost = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(DeviceLostError, match=r"while decoding .CUDA error: an illegal memory"):
        copy.read()
