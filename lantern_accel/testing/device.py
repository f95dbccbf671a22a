"""The device's own instruments: its clock, its meters, and whether replay stays compiled."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from lantern_accel.device.backend import Backend, recorded
from lantern_accel.device.capture import KINDS
from lantern_accel.testing import tiny
from lantern_accel.testing.result import Failed, Measured, NotApplicable, doing, on_card, within

#: Replays after warm-up, each of another content, that may compile nothing.
STEPS = 200
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


def stable(backend: Backend) -> Measured:
    """Replay steps of different content and prompts: no counter of the device rises."""
    if not backend.counters():
        raise NotApplicable(f"backend {backend.name!r} has no counters")
    most: dict[str, int] = {}
    for family, strategy in tiny.cases(("lantern++", "lantern", "scd")):
        doing(f"{family}, {strategy}")
        engine = tiny.tiny_engine(backend, strategy, family=family)
        tiny.start(engine, 0)
        prefill = recorded(backend, engine.prefill, "prefill")
        step = recorded(backend, engine.step, "step")
        try:
            tiny.start(engine, 1, prefill)
            step()
            before = backend.counters()
            for index in range(STEPS):
                if index % 10 == 0:
                    tiny.start(engine, 2 + index, prefill)
                step()
            backend.synchronize()
            for name, count in backend.counters().items():
                most[name] = max(most.get(name, 0), count - before.get(name, 0))
        finally:
            prefill.release()
            step.release()
    risen = [f"{name} by {count}" for name, count in most.items() if count]
    if risen:
        raise Failed(f"after warm-up rose: {', '.join(risen)}")
    return Measured(f"{STEPS} steps, nothing rose: {', '.join(most)}")


class _Entered:
    """Counts how often Python enters one of some functions inside a block, compiled callers or not."""

    def __init__(self, *functions: Any) -> None:
        self._codes = {one.__code__ for one in functions if hasattr(one, "__code__")}
        self.times = 0

    def __enter__(self) -> _Entered:
        self._before = sys.getprofile()
        sys.setprofile(self._see)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(self._before)

    def _see(self, frame: FrameType, event: str, argument: object) -> None:
        self.times += event == "call" and frame.f_code in self._codes


#: Calls of a replay in which Python is watched.
CALLS = 3


def kind(backend: Backend) -> Measured:
    """Watch Python while a captured step runs again: it does what the replay's kind says.

    In a recording and in compiled code Python enters no part of the step; where it traces the step at
    each call, a report must be able to say what that costs.
    """
    able = backend.support("capture")
    engine = tiny.tiny_engine(backend, "lantern++")
    tiny.start(engine, 0)
    replay = backend.capture(engine.step, "step")
    try:
        replay()
        backend.synchronize()
        # A device that has a step of its own passes by what is Python's.
        whole = engine.fused.whole
        called = getattr(type(whole), "__call__", None)  # noqa: B004, the function is wanted
        with _Entered(type(engine.verifying).verify, whole, called) as entered:
            for _ in range(CALLS):
                replay()
        backend.synchronize()
        how, tracing = replay.how, replay.tracing()
    finally:
        replay.release()
    if able and not replay.captured:
        raise Failed(
            "the backend says that it captures steps, and this replay says that it is not one"
        )
    if how in ("recorded", "compiled", "captured") and entered.times:
        raise Failed(
            f"the replay says that it is {how}, and Python ran the step in {entered.times} of {CALLS} "
            "calls; say 'traced' or 'eager' in Replay.kind"
        )
    if how in ("traced", "eager") and entered.times != CALLS:
        raise Failed(
            f"the replay says that it is {how}, and Python ran the step in {entered.times} of {CALLS} "
            "calls"
        )
    if how == "traced" and not tracing:
        raise Failed(
            "the step is traced at each call, and Replay.tracing does not say what that takes"
        )
    if able.how and able.how != how:
        raise Failed(f"support('capture') says {able.how!r}, and the replay is {how!r}")
    if how == "captured":
        return Measured("captured, without a word on how: set Replay.kind")
    cost = f", {1e3 * tracing:.1f} ms of Python per call" if tracing else ""
    return Measured(f"{how}: {KINDS[replay.kind or 'eager']}{cost}")


CHECKS: dict[str, Callable[[Backend], Measured]] = {
    "replay.kind": kind,
    "replay.stable": stable,
    "device.stopwatch": stopwatch,
    "device.memory": memory,
    "device.energy": energy,
}
