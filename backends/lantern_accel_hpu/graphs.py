"""Three ways to run a step again and again: compiled, as a captured HPUGraph, operator by operator.

A fourth, between the first and the last, is in :mod:`lantern_accel_hpu.layers`.

Each warms up when it is made: whatever can be compiled is compiled then, and what the bridge's metrics
count after that is reported. Steps are functions of static buffers without arguments, so nothing is
hashed or copied a call.
"""

from __future__ import annotations

import contextlib
import re
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from lantern_accel.device.capture import Replay
from lantern_accel.errors import BackendError, LanternError, LanternWarning, NotCapturableError
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
    (:meth:`settle`). What rises in between, while a request is loaded and its pixels are drawn, is
    counted in ``between``, and reported as well where a bucket has been drawn before.

    In eager mode the bridge counts no compilation at all; there recipes that were not found tell of them.
    """

    def __init__(self, bridge: Bridge) -> None:
        self.bridge = bridge
        self.between: dict[str, int] = {}
        self._ran: dict[Warmed, None] = {}
        self._before: dict[str, int] = {}
        self._settled: dict[str, int] = {}
        #: The requests that the present one's bucket has had, it included.
        self._drawn = 0
        self._told: set[str] = set()

    def counts(self) -> dict[str, int]:
        """Read the counters of the bridge and of torch.compile."""
        made = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        return {**self.bridge.metrics(), "graphs": int(made)}

    def runs(self, replay: Warmed) -> None:
        """Note that a warmed function is about to run."""
        replay.runs += 1
        if not self._ran:
            self.bridge.flush()  # what was collected before is not its own
            self._before = self.counts()
            self._gap(replay)
        self._ran[replay] = None

    def _gap(self, replay: Warmed) -> None:
        """Count what rose since the last window; report it once what was done there had been done before.

        A bucket's first request compiles what loads it and what draws its pixels; its second nothing.
        """
        rise = _rise(self._settled, self._before) if self._settled else {}
        for name, count in rise.items():
            self.between[name] = self.between.get(name, 0) + count
        known = self._drawn > 1 and replay.runs > 1
        if replay.name == "prefill":
            self._drawn = replay.runs
        if new := [name for name in rise if known and name not in self._told]:
            self._told.update(new)
            names = ", ".join(f"{name} by {rise[name]}" for name in new)
            warnings.warn(
                f"loading a request or drawing its pixels raised {names}, although this batch size has "
                "been drawn before: it takes longer than it should, please report it",
                LanternWarning,
                stacklevel=4,
            )

    def new(self) -> None:
        """Forget where the last window ended: what comes now, such as a capture, may compile."""
        self.settle()
        self._settled = {}

    def settle(self) -> None:
        """Report what rose since the first run that was not yet settled; the device was waited for."""
        if not self._ran:
            return
        after, ran = self.counts(), list(self._ran)
        self._ran.clear()
        self._settled = after
        rise = _rise(self._before, after)
        if not rise:
            return
        last = ran[-1]
        new = [name for name in rise if not any(name in one.late for one in ran)]
        for name, count in rise.items():
            last.late[name] = last.late.get(name, 0) + count
        if new:
            names = " and the ".join(one.name for one in ran)
            rises = ", ".join(f"{name} by {rise[name]}" for name in new)
            fell = ", ".join(fallen(self._before, after))
            warnings.warn(
                f"the {names} was warmed up, and yet this run raised {rises}"
                f"{f' ({fell} ran on the CPU)' if fell else ''}: it takes longer than a step should, "
                "please report it",
                LanternWarning,
                stacklevel=3,
            )


class Warmed(Replay):
    """A step that was warmed up on this bridge; subclasses say how it runs.

    ``compiled``: what warming up added to each counter. ``late``: what calls after it added, which
    should stay empty. ``retreats``: where it cannot be warmed up there is a simpler way to run the step,
    so that only an error of the card itself is raised as such; any other is a NotCapturableError.
    """

    retreats = False

    def __init__(self, watch: Watch, step: Step, name: str) -> None:
        super().__init__(step)
        self.name = name
        self.late: dict[str, int] = {}
        self.runs = 0
        self._watch = watch
        self._bridge = bridge = watch.bridge
        before, began, held = dict[str, int](), 0.0, 0
        try:
            bridge.synchronize()  # an error that comes here is of earlier work, which it lost
            watch.new()
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
        self.compiled = _rise(before, watch.counts())

    def _as_warm_up_error(self, error: Exception, ours: bool) -> Exception:
        """Return what to raise for an error of warming up, once no further one is to come.

        Threads that lower, compile and launch keep an error each until the next wait or launch: all are
        taken here, so that none is met by what serves in this one's place. ``ours``: the step had begun.
        """
        every = [error, *self._bridge.drain()]
        error = next((one for one in every if faults.of_the_card(one)), error)
        if isinstance(error, LanternError):
            return error
        known = faults.explain(error, f"running the {self.name}", self._bridge.memory())
        if self.retreats and ours and not faults.of_the_card(error):
            if faults.is_refusal(error):
                return NotCapturableError(str(known))
            return faults.not_lowered(self.name, error)
        return known or error

    @property
    def graphs(self) -> int:
        """Graphs that stand for the step, as torch.compile counts them; more than one of a whole step is
        a mistake, and 0 is a step operator by operator.
        """
        return self.compiled.get("graphs", 0)

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
        self._watch.runs(self)
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
        try:
            self._compiled()
        except torch._dynamo.exc.TorchDynamoException as error:
            if operators := faults.fallback_nodes(error):
                raise faults.left_the_graph(self.name, operators) from error
            if faults.of_the_card(error) or faults.is_refusal(error):
                raise
            raise NotCapturableError(
                f"torch.compile cannot make one graph of the {self.name}: "
                f"{' '.join(str(error).splitlines()[:2])}; use the mode 'eager', and report it"
            ) from error
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

    @property
    def graphs(self) -> int:
        """One."""
        return 1

    def _prepare(self) -> None:
        # Once outside: a fall-back would abort the process's capture, and here it can be named.
        before = self._watch.counts()
        super()._run()
        self._bridge.synchronize()
        fell = fallen(before, self._watch.counts())
        if fell:
            raise NotCapturableError(
                f"the {self.name} cannot be captured: {', '.join(fell)} has no HPU kernel in this SDK "
                "and would run on the CPU; use the mode 'compile' or 'eager', which allow it, and report "
                "the operator"
            )
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
            names = fallen(before, self._watch.counts())
            if not names and "fallback" in str(error):
                found = re.search(r"\b(aten|hpu)::\w+(\.\w+)?", str(error))
                names = [found[0] if found else "an operator that the bridge does not name"]
            raise faults.not_recorded(self.name, ", ".join(names), error) from error

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
