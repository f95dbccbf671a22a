"""The device's own instruments: its clock and its meters."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from lantern_accel.device.backend import Backend
from lantern_accel.testing.result import Failed, Measured, NotApplicable, on_card, within

MIB = 2**20


def _work(backend: Backend, seconds: float) -> Callable[[], None]:
    """Return matrix products that take the device at least ``seconds``."""
    side = torch.full((512, 512), 1 / 512, dtype=backend.dtypes().compute, device=backend.device)

    def repeat(times: int) -> None:
        product = side
        for _ in range(times):
            product = product @ side

    times = 1
    while times < 2**20:
        backend.synchronize()
        began = time.perf_counter()
        repeat(times)
        backend.synchronize()
        if time.perf_counter() - began >= seconds:
            break
        times *= 2
    return lambda: repeat(times)


def stopwatch(backend: Backend) -> Measured:
    """Time work that the device does behind the host's back: the stopwatch sees all of it."""
    on_card(backend, "its clock is the host's")
    work = _work(backend, 0.05)
    best = 1.0
    for _ in range(3):  # other processes may take the host away in between
        backend.synchronize()
        began = time.perf_counter()
        with backend.stopwatch() as watch:
            work()
        backend.synchronize()
        wall = time.perf_counter() - began
        best = min(best, abs(1 - watch.seconds / wall))
    return within(best, 0.25, "share of the device's time that the stopwatch does not see")


def memory(backend: Backend) -> Measured:
    """Hold 64 MiB more: the memory in use and its peak show them."""
    if not (able := backend.support("memory")):
        raise NotApplicable(able.reason)
    before = backend.memory().in_use or 0
    held = torch.ones(64 * MIB // 4, dtype=torch.float32, device=backend.device)
    backend.synchronize()
    now = backend.memory()
    del held
    grown = ((now.in_use or 0) - before) / MIB
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
    work = _work(backend, 0.5)
    first, began = backend.energy_mj() or 0, time.perf_counter()
    work()
    backend.synchronize()
    joules = ((backend.energy_mj() or 0) - first) / 1000
    watts = joules / (time.perf_counter() - began)
    if not 0 < watts < 3000:
        raise Failed(f"the meter shows {watts:.1f} W while the device works")
    return Measured(f"{watts:.0f} W under load")
