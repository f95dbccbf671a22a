"""Ceilings are readings, or say why they are none."""

from __future__ import annotations

import pytest
import torch
from support.profiles import small_ceilings

from lantern_accel.device.backend import Support
from lantern_accel.device.plugins import open_backend
from lantern_accel.strategy.values import Strategy
from lantern_accel_profiles.measure import ceilings, work
from lantern_accel_profiles.measure.record import Ceilings, StepCell, is_measured


@pytest.fixture
def backend(monkeypatch):
    small_ceilings(monkeypatch)
    monkeypatch.setattr(ceilings, "LARGE_MEMORY", 2**60)
    with open_backend("cpu") as opened:
        yield opened


def test_every_ceiling_is_read(backend, monkeypatch):
    monkeypatch.setattr(type(backend), "support", lambda self, name: Support(True))
    found = ceilings.measure_ceilings(backend, torch.bfloat16)
    assert found.copy_bytes == 2**20
    assert set(found.matmul_flops) == {"bfloat16", "float32"}
    for value in (
        found.copy_bytes_per_s,
        *found.matmul_flops.values(),
        found.launch_seconds,
        found.captured_launch_seconds,
    ):
        assert is_measured(value)
        assert value > 0
    assert found.launch_seconds < 1e-3


def test_a_large_device_reads_more_than_its_caches_hold(backend, monkeypatch):
    assert ceilings._buffer_bytes(backend) == 2**20
    monkeypatch.setattr(ceilings, "LARGE_MEMORY", 2**20)
    assert ceilings._buffer_bytes(backend) == 2**22


def test_what_a_device_cannot_do_is_told(backend, monkeypatch):
    monkeypatch.setattr(
        type(backend), "support", lambda self, name: Support(False, "it forgets everything")
    )
    real = torch.mm

    def half_a_device(a, b, **kwargs):
        if a.dtype == torch.bfloat16:
            raise RuntimeError("no bfloat16 here\nstack trace")
        return real(a, b, **kwargs)

    monkeypatch.setattr(torch, "mm", half_a_device)
    found = ceilings.measure_ceilings(backend, torch.bfloat16)
    assert found.matmul_flops["bfloat16"] == "not measured: the matmul failed: no bfloat16 here"
    assert is_measured(found.matmul_flops["float32"])
    assert found.captured_launch_seconds == "not measured: it forgets everything"


def test_a_copy_counts_what_is_read_and_what_is_written(backend, monkeypatch):
    monkeypatch.setattr(ceilings, "_best_seconds", lambda backend, run: 0.5)

    assert ceilings._copy(backend, 4096) == 2 * 4096 / 0.5


def test_no_step_lies_above_a_ceiling() -> None:
    plain = Ceilings(
        copy_bytes_per_s=1e9,
        read_bytes_per_s=2e9,
        copy_bytes=2**20,
        matmul_flops={"float32": 1e12},
        launch_seconds=1e-6,
        captured_launch_seconds=1e-6,
    )
    cell = StepCell(kind="step", strategy=Strategy(name="fast"), batch=1, nodes=1, ms=[2.0, 1.0])
    for flops, nbytes in ((1e8, 1e6), (1e9, 2e6)):  # at the ceilings, at most
        cell.floor_flops, cell.floor_bytes = flops, nbytes
        assert ceilings.raise_ceilings(plain, "float32", cell) == plain
    cell.floor_flops, cell.floor_bytes = 3e9, 8e6
    found = ceilings.raise_ceilings(plain, "float32", cell)
    assert found.matmul_flops["float32"] == pytest.approx(3e12)
    assert found.bandwidth == pytest.approx(8e9) and found.raised_by == "fast"
    assert work.floor_of(cell.floor_flops, cell.floor_bytes, found, "float32") <= 1.001e-3
