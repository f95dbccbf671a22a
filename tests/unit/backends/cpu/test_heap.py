"""The heap: tensors that go leave no holes that the next ones do not fit."""

from __future__ import annotations

import pytest
import torch
from support.growth import growth, measurable

from lantern_accel.device.plugins import open_backend
from lantern_accel.testing import device
from lantern_accel_cpu import heap

SETUP = """
import torch
from lantern_accel_cpu.heap import trim_memory
torch.ones(2**22).add(1)
kept = []
"""
# Sizes that do not fit the holes of those before, with something small that stays between them.
BODY = """
with trim_memory():
    for megabytes in range(10, 30):
        large = torch.ones(megabytes * 2**18)
        kept.append(torch.ones(2**10))
        del large
"""


glibc = pytest.mark.skipif(not heap.is_glibc(), reason="glibc's heap")


@pytest.mark.long
@glibc
@measurable
def test_large_tensors_leave_the_process_when_they_go() -> None:
    # Left alone, glibc took 45 MB; the largest alone has 29.
    assert growth(SETUP, BODY) < 36 * 2**20


@glibc
def test_a_heap_that_the_user_has_set_up_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    assert heap._mallopt.__wrapped__() is not None
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=131072")
    assert heap._mallopt.__wrapped__() is None


@glibc
@measurable
def test_the_kit_sees_a_tensor_though_the_process_kept_memory_for_it() -> None:
    with open_backend("cpu") as backend:
        with backend.trim_memory():
            pass  # From here on, glibc does not raise what is large enough for a mapping.
        *freed, above = [torch.ones(2**22) for _ in range(8)]
        del freed
        assert "64 MiB show as" in device.memory(backend).detail
        assert len(above)
