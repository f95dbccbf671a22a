"""Three ways to run a step again and again: compiled, as a captured HPUGraph, operator by operator.

A fourth, between the first and the last, is in :mod:`lantern_accel_hpu.layers`.

Each warms up when it is made: whatever can be compiled is compiled then, and what the bridge's metrics
count after that is reported. Steps are functions of static buffers without arguments, so nothing is
hashed or copied a call.
"""

from __future__ import annotations

import contextlib
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from lantern_accel.device.capture import Replay
from lantern_accel.errors import BackendError, LanternError, LanternWarning
from lantern_accel_hpu import faults
from lantern_accel_hpu.bridge import Bridge

Step = Callable[[], None]

#: Runs that a step gets to stop compiling; the first compiles, the second shows that it is done.
WARM_UPS = 3
#: Counters that must stand still after warm-up. A recipe that was found is not a fault, so hits rise.
WATCHED = ("graph_compilation.TotalNumber", "cpu_fallback.TotalNumber", "recipe_cache.TotalMiss")


class Watch:
    """Watches the bridge's counters while warmed functions run; nothing may rise then.

    A device compiles and falls back behind the host's back, so a reading right after a launch sees
    nothing of it: counters are read before the first run, and again only when the device was waited for
    (:meth:`settle`). ``risen``: what rose then, as ``late.*``, and in between, while a request is loaded
    and its pixels are drawn, as ``between.*``.

    In eager mode the bridge counts no compilation at all; there recipes that were not found tell of them.
    """

    def __init__(self, bridge: Bridge) -> None:
        self.bridge = bridge
        self.risen = Counter[str]()
        self._ran: dict[str, None] = {}
        self._before: dict[str, int] = {}
        self._settled: dict[str, int] = {}

    def counts(self) -> dict[str, int]:
        """Read the counters of the bridge and of torch.compile."""
        made = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        return {**self.bridge.metrics(), "graphs": int(made)}

    def runs(self, name: str) -> None:
        """Note that a warmed function is about to run."""
        if not self._ran:
            self.bridge.flush()  # what was collected before is not its own
            self._before = self.counts()
            self._add("between", _rise(self._settled or self._before, self._before))
        self._ran[name] = None

    def _add(self, when: str, rise: dict[str, int]) -> None:
        self.risen.update({f"{when}.{name}": count for name, count in rise.items()})

    def forget(self) -> None:
        """Forget where the last window ended: what comes now, such as a capture, may compile."""
        self.settle()
        self._settled = {}

    def settle(self) -> None:
        """Report what rose since the first run that was not yet settled; the device was waited for."""
        if not self._ran:
            return
        self._settled, names = self.counts(), " and the ".join(self._ran)
        self._ran.clear()
        rise = _rise(self._before, self._settled)
        new = [f"{name} by {n}" for name, n in rise.items() if f"late.{name}" not in self.risen]
        self._add("late", rise)
        if new:
            fell = ", ".join(fallen(self._before, self._settled))
            warnings.warn(
                f"the {names} was warmed up, and yet this run raised {', '.join(new)}"
                f"{f' ({fell} ran on the CPU)' if fell else ''}: it takes longer than a step should, "
                "please report it",
                LanternWarning,
                stacklevel=3,
            )


class Warmed(Replay):
    """A step that was warmed up on this bridge; subclasses say how it runs.

    ``graphs``: those that stand for the step, as torch.compile counts them; more than one of a whole step
    is a mistake, and 0 is a step operator by operator. ``retreats``: where it cannot be warmed up there
    is a simpler way to run the step, so that only an error of the card itself is raised as such; any
    other is a NotCapturableError.
    """

    retreats = False

    def __init__(self, watch: Watch, step: Step, name: str) -> None:
        super().__init__(step)
        self.name = name
        self._watch = watch
        self._bridge = bridge = watch.bridge
        began = 0.0
        try:
            bridge.synchronize()  # an error that comes here is of earlier work, which it lost
            watch.forget()
            before, began = watch.counts(), time.perf_counter()
            held = bridge.memory()["InUse"]
            self._prepare()
        except Exception as error:  # what a compiler does not like, it says as it likes
            self._step = None
            told = self._as_warm_up_error(error, ours=began > 0)
            if told is error:
                raise
            raise told from error
        self.seconds = time.perf_counter() - began
        self.nbytes = max(bridge.memory()["InUse"] - held, 0)
        self.graphs = _rise(before, watch.counts()).get("graphs", 0)

    def _as_warm_up_error(self, error: Exception, ours: bool) -> Exception:
        """Return what to raise for an error of warming up, once no further one is to come.

        Threads that lower, compile and launch keep an error each until the next wait or launch: all are
        taken here, so that none is met by what serves in this one's place. ``ours``: the step had begun.
        """
        every = [error, *self._bridge.drain()]
        error = next((one for one in every if faults.of_the_card(one)), error)
        if isinstance(error, LanternError):
            return error
        if self.retreats and ours and not faults.of_the_card(error):
            return faults.not_capturable(self.name, error)
        memory = self._bridge.memory()
        return faults.explain(error, f"running the {self.name}", memory) or error

    def _prepare(self) -> None:
        """Run until a run compiles nothing; each run is waited for, since errors come late."""
        for _ in range(WARM_UPS):
            before = self._watch.counts()
            self._run()
            self._bridge.synchronize()
            if not _rise(before, self._watch.counts()):
                break

    def _run(self) -> None:
        assert self._step is not None
        self._step()
        self._bridge.flush()

    def __call__(self) -> None:
        """Run the step once; the watch reports what it compiles or lets fall back, when it is known."""
        if self._step is None:
            raise BackendError("this replay was released; capture the step again")
        self._watch.runs(self.name)
        self._run()


class Compiled(Warmed):
    """The step as one graph of ``torch.compile(backend="hpu_backend")``, with static shapes."""

    captured = True
    kind = "compiled"
    retreats = True

    def __init__(self, watch: Watch, step: Step, name: str) -> None:
        self._compiled: Any = compile_step(watch.bridge, step, name)
        super().__init__(watch, step, name)

    def _prepare(self) -> None:
        self._compiled()
        self._bridge.synchronize()
        super()._prepare()

    def _run(self) -> None:
        # The buffers are static and this code object has one graph, so that there is nothing for
        # guards to tell apart; evaluating them costs a step as much as launching it.
        try:
            with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
                self._compiled()
        except RuntimeError as error:
            if "Recompilation triggered" not in str(error):
                raise
            self._compiled()  # rather late than not at all: it is counted, and reported

    def release(self) -> None:
        """Forget the compiled graph."""
        super().release()
        self._compiled = None


class Graphed(Warmed):
    """The step as one HPUGraph: captured once, replayed without Python (lazy mode)."""

    captured = True
    kind = "recorded"
    retreats = True

    def __init__(self, watch: Watch, step: Step, name: str) -> None:
        self._graph: Any = watch.bridge.new_graph()
        super().__init__(watch, step, name)
        self.graphs = 1

    def _prepare(self) -> None:
        # Once outside: a fall-back would abort the process's capture, and here it can be named.
        before = self._watch.counts()
        super()._run()
        self._bridge.synchronize()
        if fell := fallen(before, self._watch.counts()):
            raise faults.not_capturable(self.name, f"{', '.join(fell)} has no HPU kernel")
        assert self._step is not None
        try:
            with self._bridge.capturing(self._graph):
                self._step()  # executes as well: on this device a capture is a run
            self._bridge.synchronize()
        except Exception as error:
            if faults.of_the_card(error):
                raise
            with contextlib.suppress(RuntimeError):
                self._graph.reset()
            fell = fallen(before, self._watch.counts())
            said = f"{', '.join(fell)} has no HPU kernel" if fell else faults.first_line(error)
            raise faults.not_recorded(self.name, said) from error

    def __call__(self) -> None:
        """Replay; a captured graph can neither compile nor fall back, so nothing is watched."""
        if self._step is None:
            raise BackendError("this replay was released; capture the step again")
        self._graph.replay()

    def release(self) -> None:
        """Free the graph's memory."""
        if self._graph is not None:
            self._graph.reset()
        super().release()
        self._graph = None


def compile_step(bridge: Bridge, step: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function as one graph with static shapes, which is made when it is first called.

    The function gets a code object of its own, by which torch.compile keeps its graphs. All engines share
    the code of one method, so that their graphs would count as recompilations of each other, and at the
    eighth it would stop.
    """

    def run(*given: Any) -> Any:
        return step(*given)

    code = run.__code__.replace(co_name=f"lantern_{name}")
    own = types.FunctionType(code, run.__globals__, code.co_name, closure=run.__closure__)
    options: Any = bridge.compile_options()
    made: Callable[..., Any] = torch.compile(
        own, backend="hpu_backend", fullgraph=True, dynamic=False, options=options
    )
    return made


def fallen(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Return the operators that fell back to the CPU between two readings."""
    return [
        name.partition(".")[2]
        for name, count in after.items()
        if name.startswith("cpu_fallback.aten::") and count > before.get(name, 0)
    ]


def _rise(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """Return by how much each watched counter rose, those that did."""
    rises = {name: after.get(name, 0) - before.get(name, 0) for name in (*WATCHED, "graphs")}
    return {name: count for name, count in rises.items() if count > 0}
