"""The device's own instruments: its clock and its meters."""

from __future__ import annotations

import time
from functools import partial

import torch

from lantern_accel.device.backend import Backend
from lantern_accel.device.clock import both_clocks, lasting, products
from lantern_accel.testing.result import Failed, Measured, NotApplicable, on_card, within

MIB = 2**20
#: Blocks of 64 MiB that are held at most.
BLOCKS = 8


def stopwatch(backend: Backend) -> Measured:
    """Time work that the device does behind the host's back: the stopwatch sees all of it."""
    on_card(backend, "its clock is the host's")
    work = lasting(partial(products, backend), 0.05)
    # Other processes may take the host away in between.
    pairs = [both_clocks(backend, work) for _ in range(3)]
    best = min(abs(1 - watch / host) for watch, host in pairs)
    return within(best, 0.25, "share of the device's time that the stopwatch does not see")


def memory(backend: Backend) -> Measured:
    """Hold 64 MiB more: the memory in use and its peak show them.

    A process keeps memory that was freed, and a new tensor may lie there: another one is held then.
    """
    if not (able := backend.support("memory")):
        raise NotApplicable(able.reason)
    held: list[torch.Tensor] = []
    before, grown = backend.memory().in_use or 0, 0.0
    while grown < 60 and len(held) < BLOCKS:
        held.append(torch.ones(64 * MIB // 4, dtype=torch.float32, device=backend.device))
        backend.synchronize()
        now = backend.memory()
        grown, before = ((now.in_use or 0) - before) / MIB, now.in_use or 0
    if grown < 60:
        raise Failed(f"64 MiB were allocated, the memory in use grew by {grown:.0f} MiB")
    if now.peak is not None and now.peak < (now.in_use or 0):
        raise Failed(f"the peak, {now.peak} bytes, is below what is in use, {now.in_use}")
    return Measured(f"64 MiB show as {grown:.0f} MiB")


def energy(backend: Backend) -> Measured:
    """Let the device work: the meter rises, by less than 3 kW would."""
    on_card(backend, "there is no energy meter")
    if not (able := backend.support("energy")):
        raise NotApplicable(able.reason)
    work = lasting(partial(products, backend), 0.5)
    first, began = backend.energy_mj() or 0, time.perf_counter()
    work()
    backend.synchronize()
    joules = ((backend.energy_mj() or 0) - first) / 1000
    watts = joules / (time.perf_counter() - began)
    if not 0 < watts < 3000:
        raise Failed(f"the meter shows {watts:.1f} W while the device works")
    return Measured(f"{watts:.0f} W under load")
