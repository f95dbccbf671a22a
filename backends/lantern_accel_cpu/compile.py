"""Steps compiled by torch: a third to a half of the time where a step is many small operations.

A compiled step rounds otherwise than the eager one, so in bfloat16 it draws other tokens; it is used
where it was asked for, and where a request is so long that compiling is sure to be faster.
"""

from __future__ import annotations

import functools
import shutil
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lantern_accel.device.capture import Replay
from lantern_accel.errors import BackendError

#: Seconds that compiling a step is taken to cost; 12 to 35 were measured on two cores, 1 to 3 once
#: torch has the code in its cache on disk.
COST = 45.0
#: More operators than any step has: 36 layers and a tree of 58 nodes make 5,000.
MOST_OPERATORS = 20_000


@functools.cache
def compiler() -> str | None:
    """Return the C++ compiler that torch will call; None where there is none. Looked for once."""
    from torch._inductor import config

    names = config.cpp.cxx if isinstance(config.cpp.cxx, tuple) else (config.cpp.cxx,)
    return next((found for n in (*names, "g++", "c++") if n and (found := shutil.which(n))), None)


class CompiledReplay(Replay):
    """A step that runs eagerly until it is compiled; :meth:`expect` says when that is faster."""

    def __init__(self, step: Callable[[], None], name: str, mode: str) -> None:
        super().__init__(step)
        self._eager, self._name, self._mode = step, name, mode
        if mode == "on":
            self._compile()

    def expect(self, calls: int) -> None:
        """Compile where the dispatching that ``calls`` calls would do takes longer than compiling."""
        if self.captured or self._mode != "auto" or self._step is None:
            return
        saved = 0.5 * calls * _seconds_an_operator()
        # To count, and to look for a compiler, torch loads 80 MB of itself: only where it may be faster.
        if saved * MOST_OPERATORS <= COST or compiler() is None:
            return
        with torch.inference_mode():
            operators = _count(self._eager)
        if saved * operators > COST:
            self._compile()

    def _compile(self) -> None:
        if compiler() is None:
            raise BackendError(
                "the option compile=on of backend 'cpu' needs a C++ compiler, and none was found; "
                "install g++ or leave the option out"
            )
        began = time.perf_counter()
        compiled = compile_step(self._eager, self._name)
        with torch.inference_mode(), warnings.catch_warnings():
            # torch's compiler imports parts of torch that torch has deprecated.
            warnings.simplefilter("ignore", DeprecationWarning)
            compiled()
        self._step = compiled
        self.captured = True
        self.kind = "compiled"
        self.seconds = time.perf_counter() - began


def compile_step(step: Callable[[], None], name: str) -> Callable[[], None]:
    """Return ``step`` as one graph of fixed shapes; compiled when it is first called."""

    def run() -> None:
        step()

    # torch keeps graphs with the code object and asks on every call which of them fits. With a code
    # object of its own there is one graph, and with static buffers there is nothing to ask.
    run.__code__ = run.__code__.replace(co_name=name)
    options: dict[str, Any] = {"guard_filter_fn": lambda guards: [False for _ in guards]}
    compiled = torch.compile(run, fullgraph=True, dynamic=False, options=options)

    def replay() -> None:
        with torch.inference_mode():
            compiled()

    return replay


# torch leaves the base class untyped.
class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        return func(*args, **(kwargs or {}))


def _count(step: Callable[[], None]) -> int:
    counter = _Counter()
    with counter:
        step()
    return counter.operators


def _seconds_an_operator(calls: int = 200) -> float:
    """Measure what dispatching one operator on a tiny tensor costs here."""
    one = torch.ones(1)
    with torch.inference_mode():
        began = time.perf_counter()
        for _ in range(calls):
            one.add(1)
        return (time.perf_counter() - began) / calls
