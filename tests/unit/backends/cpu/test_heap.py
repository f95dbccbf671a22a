"""The heap: tensors that go leave no holes that the next ones do not fit."""

from __future__ import annotations

import platform

import pytest
from support.growth import growth, measurable

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


glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's heap")


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
