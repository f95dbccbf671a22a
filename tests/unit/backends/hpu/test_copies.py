"""Late reads on a stream of their own, on the double: order, events, and no wait for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.gaudi import Gaudi, on_cpu

from lantern_accel.errors import DeviceLostError
from lantern_accel_hpu.backend import DeviceBackend
from lantern_accel_hpu.bridge import Bridge


@pytest.fixture(params=["pinned", "pageable"])
def opened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Gaudi]:
    """Open the real backend on a double; the CPU's memory stands for what is pinned."""
    pinned = request.param == "pinned"
    monkeypatch.setattr(
        Bridge,
        "allocate_pinned",
        lambda self, *of: torch.empty(of[0], dtype=of[1]) if pinned else None,
    )
    hpu = Gaudi()
    return on_cpu(DeviceBackend(Bridge(hpu))), hpu


def test_progress_waits_for_an_event_and_never_for_the_device(opened) -> None:
    backend, hpu = opened
    copy = backend.host_copy(torch.zeros(1))
    hpu.log.clear()
    copy.post()
    assert hpu.log == ["record"] * (1 + (copy._free[0].host is not None))  # nothing waits
    hpu.log.clear()
    copy.read()
    assert hpu.log == ["event.synchronize"] * (copy._free[0].host is not None)
    assert "synchronize" not in hpu.log
    others = [backend.host_copy(torch.zeros(1))._stream for _ in range(2)]
    assert all(one is copy._stream for one in others)


def test_a_card_lost_under_way_is_told(opened) -> None:
    backend, hpu = opened
    copy = backend.host_copy(torch.zeros(1))
    if copy._free[0].host is None:
        pytest.skip("a blocking copy raises by itself")
    copy.post()

    def lost() -> None:
        raise RuntimeError("synStatus=17 [Device is in reset] Event synchronize failed")

    hpu.later(lost)
    with pytest.raises(DeviceLostError, match="while decoding"):
        copy.read()


def test_no_event_is_trusted_with_memory_that_is_not_pinned(monkeypatch) -> None:
    """The bridge copies to pageable memory in a thread of its own, which an event does not wait for."""
    real, late = torch.Tensor.copy_, []

    def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if not non_blocking or self.is_pinned():
            return real(self, source)
        late.append((self, source.clone()))  # lands when nobody waits for it any more
        return self

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    source = torch.zeros(2)
    copy = on_cpu(DeviceBackend(Bridge(Gaudi()))).host_copy(source)
    for value in (1, 2, 3):
        source.fill_(value)
        copy.post()
        assert copy.read().tolist() == [value, value]
    assert not late


def test_only_memory_that_torch_knows_to_be_pinned_is(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = Bridge(Gaudi()).allocate_pinned
    for pinned in (False, True):
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, device: self)
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self, device, pinned=pinned: pinned)
        assert (allocate((2,), torch.int32) is not None) == pinned
    monkeypatch.undo()
    assert allocate((2,), torch.int32) is None  # this torch knows no such device
