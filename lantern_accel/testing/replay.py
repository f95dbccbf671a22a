"""Replay: captured steps draw what eager ones draw, in buckets too, and nothing is compiled again."""

from __future__ import annotations

import sys
from types import FrameType

from lantern_accel.device.backend import Backend, record_replay
from lantern_accel.device.capture import KINDS, Replay
from lantern_accel.testing import tiny
from lantern_accel.testing.result import Failed, Measured, NotApplicable, doing

#: Replays after warm-up, each of another content, that may compile nothing.
STEPS = 200
#: Strategies whose steps differ in what they look at: one token, a tree, a window.
LOOKS = ("vanilla", "lantern++", "scd")
#: Relaxation so great that nearly every draft is kept: steps of full depth.
DEEP = 1e6


def eager(backend: Backend) -> Measured:
    """Compare the captured step with the eager one, for two prompts: a stale replay shows."""
    for family, strategy in tiny.cases(tiny.FORMS, tiny.COMPILED, turn=0):
        doing(f"{family}, {strategy}: capture")
        engine = tiny.tiny_engine(backend, strategy, batch=2, family=family)
        with tiny.capture_engine(backend, engine) as replays:
            doing(f"{family}, {strategy}: replay")
            results = [
                (tiny.decode_tokens(engine, seed, *replays), tiny.decode_tokens(engine, seed))
                for seed in (0, 1)
            ]
        for seed, (got, want) in enumerate(results):
            if not got.equal(want):
                raise Failed(
                    f"{family}, {strategy}: the replayed step differs from the eager one (prompt "
                    f"{seed})"
                )
    return Measured("replay equals eager for two prompts of each case")


def sizes_of(engine: tiny.TinyEngine) -> list[int]:
    """Return buckets that part an image in three, multiples of 8 slots."""
    g = engine.geometry
    least = g.prefix + g.ahead
    third = (g.target_slots - least) // 3
    sizes = (-(-(least + part * third) // 8) * 8 for part in (1, 2))
    return [size for size in sizes if size < g.target_slots]


class Watched:
    """A replay that looks at the first ``slots`` slots, and first at whether they are enough."""

    def __init__(self, engine: tiny.TinyEngine, slots: int, replay: Replay, where: str) -> None:
        self.engine, self.slots, self.replay, self.where = engine, slots, replay, where
        self.calls = 0

    def __call__(self) -> None:
        g = self.engine.geometry
        lengths = self.engine.state.length.tolist()
        needs = g.prefix + g.ahead + max((n for n in lengths if n + 1 < g.tokens), default=0)
        if self.slots < min(needs, g.target_slots):
            raise Failed(
                f"{self.where}: a step looked at {self.slots} slots where it needs {needs}; the bucket "
                "was left too late"
            )
        self.calls += 1
        self.replay()


def _case(backend: Backend, family: str, strategy: str) -> list[Watched]:
    """Decode prompts of one family with one strategy, in buckets and without; return the steps."""
    where = f"{family}, {strategy}"
    doing(f"{where}: capture")
    engine = tiny.tiny_engine(backend, strategy, batch=2, family=family)
    engine.divide(sizes_of(engine))
    tiny.start(engine, 9)
    before, steps = dict(engine.functions), {}
    for slots in engine.sizes:
        whole = slots == engine.sizes[-1]
        name = engine.step_name(engine.now, None if whole else slots)
        replay = record_replay(backend, engine.functions[name], name)
        steps[name] = Watched(engine, slots, replay, where)
    try:
        for seed, lam in enumerate((None, DEEP) if strategy == "lantern++" else (None,)):
            doing(f"{where}, prompt {seed}: replay")
            if lam is not None:
                engine.configure(engine.strategy.override(lam=lam), engine.sampling)
            engine.functions.update(steps)
            got = tiny.decode_tokens(engine, seed)
            engine.functions.update(before)
            if not got.equal(tiny.decode_tokens(engine, seed, step=engine.step)):
                raise Failed(f"{where}: steps over a part of the cache draw other tokens")
    finally:
        for one in steps.values():
            one.replay.release()
    return list(steps.values())


def buckets(backend: Backend) -> Measured:
    """Decode with one captured step a bucket: no token changes, and each is left in time."""
    graphs = replays = 0
    for family, strategy in tiny.cases(LOOKS, ()):
        steps = _case(backend, family, strategy)
        unused = [one.slots for one in steps if not one.calls]
        if len(steps) - len(unused) < 2 or (unused and strategy == "vanilla"):
            raise Failed(f"{family}, {strategy}: no step looked at {unused} slots")
        graphs += len(steps)
        replays += sum(one.calls for one in steps)
    return Measured(f"{graphs} steps captured, one a bucket; {replays} replays change no token")


def stable(backend: Backend) -> Measured:
    """Replay steps of different content and prompts: no counter of the device rises."""
    if not backend.counters():
        raise NotApplicable(f"backend {backend.name!r} has no counters")
    most: dict[str, int] = {}
    for family, strategy in tiny.cases(("lantern++", "lantern", "scd"), ()):
        doing(f"{family}, {strategy}")
        engine = tiny.tiny_engine(backend, strategy, batch=2, family=family)
        with tiny.capture_engine(backend, engine, 0) as (prefill, step):
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
    risen = [f"{name} by {count}" for name, count in most.items() if count]
    if risen:
        raise Failed(f"after warm-up rose: {', '.join(risen)}")
    return Measured(f"{STEPS} steps, nothing rose: {', '.join(most)}")


class _Entered:
    """Counts how often Python enters one of some functions inside a block, compiled callers or not."""

    def __init__(self, *functions: object) -> None:
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
        whole = engine.longest.fused
        run = None if whole is None else whole.run
        called = getattr(type(run), "__call__", None)  # noqa: B004, the function is wanted
        with _Entered(type(engine.source).verify, run, called) as entered:
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
    if entered.times != (CALLS if how in ("traced", "eager") else 0):
        raise Failed(
            f"the replay says that it is {how}, and Python ran the step in {entered.times} of {CALLS} "
            "calls; say 'traced' or 'eager' in Replay.kind where it does in each, and 'recorded' or "
            "'compiled' where it does in none"
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
