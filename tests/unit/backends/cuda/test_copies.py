"""Late reads through pinned memory, on the double."""

from __future__ import annotations

import pytest
import torch
from support.cuda_double import doubled_backend

from lantern_accel.errors import DeviceLostError


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


def test_a_card_lost_under_way_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, double = doubled_backend(monkeypatch)
    copy = backend.host_copy(torch.zeros(1))
    copy.post()
    double.lost = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(DeviceLostError, match=r"while decoding .CUDA error: an illegal memory"):
        copy.read()
