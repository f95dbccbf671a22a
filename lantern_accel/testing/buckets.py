"""Steps over a part of the cache: they draw what steps over the whole draw, and are left in time."""

from __future__ import annotations

from collections.abc import Callable

from lantern_accel.device.backend import Backend, Replay, recorded
from lantern_accel.testing import tiny
from lantern_accel.testing.result import Failed, Measured, doing

#: Strategies whose steps differ in what they look at: one token, a tree, a window with siblings.
LOOKS = ("vanilla", "lantern++", "sjd-pac")
#: Relaxation so great that nearly every draft is kept: steps of full depth.
DEEP = 1e6


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
    steps = {
        slots: Watched(engine, slots, recorded(backend, step, f"step {slots}"), where)
        for slots, step in engine.steps.items()
    }
    try:
        for seed, lam in enumerate((None, DEEP) if strategy == "lantern++" else (None,)):
            doing(f"{where}, prompt {seed}: replay")
            if lam is not None:
                engine.configure(engine.strategy.override(lam=lam), engine.sampling)
            tiny.start(engine, seed)
            got = engine.run(steps).tokens
            tiny.start(engine, seed)
            if not got.equal(engine.run(engine.step).tokens):
                raise Failed(f"{where}: steps over a part of the cache draw other tokens")
    finally:
        for one in steps.values():
            one.replay.release()
    return list(steps.values())


def buckets(backend: Backend) -> Measured:
    """Decode with one captured step a bucket: no token changes, and each is left in time."""
    first = tiny.cases(("vanilla",))[0][0]
    graphs = replays = 0
    for family, strategy in tiny.cases(LOOKS):
        if strategy == "vanilla" and family != first:
            continue
        steps = _case(backend, family, strategy)
        unused = [one.slots for one in steps if not one.calls]
        if len(steps) - len(unused) < 2 or (unused and strategy == "vanilla"):
            raise Failed(f"{family}, {strategy}: no step looked at {unused} slots")
        graphs += len(steps)
        replays += sum(one.calls for one in steps)
    return Measured(f"{graphs} steps captured, one a bucket; {replays} replays change no token")


CHECKS: dict[str, Callable[[Backend], Measured]] = {"replay.buckets": buckets}
