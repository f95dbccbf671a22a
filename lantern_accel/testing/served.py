"""Who serves each operation of the interface: a kernel of the backend's, its override, or the reference.

An override may hand over to the reference for some arguments, for a dtype, or because its kernel did not
agree with the reference on this card; which code ran is seen only while it runs.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from pydantic import Field
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from lantern_accel.device.backend import Backend, dtype_policy, methods
from lantern_accel.device.capture import Capture
from lantern_accel.device.launches import computes
from lantern_accel.device.operations import Ops
from lantern_accel.device.plan import Refused
from lantern_accel.device.sampling import SamplingOps
from lantern_accel.records import Record
from lantern_accel.testing import tiny
from lantern_accel.testing.result import is_overridden

#: Members that compute nothing, or only once.
NO_OPERATIONS = ("phase", "host_copy", "kv_layout", "allocate", "capture", "tables")
#: Operations whose result is None because they write; of others None leaves the work to tensor code.
WRITES = ("write", "put")
#: Operators of torch; any other is a kernel that somebody registered.
TORCH = ("aten", "prim", "prims", "profiler")


class Served(Record):
    """One operation, its calls in the steps that were watched, and who served them."""

    operation: str
    by: str = Field(
        description="native (an override that ran no operator of torch: a kernel called by address or "
        "registered apart), override, reference, or two of them where calls differ"
    )
    calls: int
    to_reference: int = Field(description="calls that the reference served")


@dataclass
class _Count:
    calls: int = 0
    reference: int = 0
    operators: int = 0


@dataclass
class _Call:
    """A call that is running; ``reference``: the reference serves it, or a part of it."""

    name: str
    reference: bool


class _OpCounter(TorchDispatchMode):
    """Counts torch's operators under the operation that is running; kernels by address are not seen."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as is its __init__
        self.counts: dict[str, _Count] = defaultdict(_Count)
        self.running: list[_Call] = []

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if self.running and func.namespace in TORCH and computes(func):
            self.counts[self.running[-1].name].operators += 1
        return func(*args, **(kwargs or {}))


def operations() -> dict[str, type]:
    """Return the operations by name, with the part of the interface that has the reference of each."""
    found = methods(Capture, SamplingOps, Ops)
    return {name: home for name, home in found.items() if name not in NO_OPERATIONS}


@contextmanager
def watching(backend: Backend) -> Iterator[_OpCounter]:
    """Count the calls of every operation of a backend in the block, and who serves them."""
    seen = _OpCounter()

    def count_calls(name: str, call: Callable[..., object], own: bool) -> Callable[..., object]:
        @functools.wraps(call)
        def run(*args: object, **kwargs: object) -> object:
            seen.running.append(now := _Call(name, reference=not own))
            try:
                made = call(*args, **kwargs)
            finally:
                seen.running.pop()
            found = seen.counts[name]
            found.calls += 1
            nothing = isinstance(made, Refused) or (made is None and name not in WRITES)
            found.reference += now.reference or nothing
            return made

        return run

    def note_calls(name: str, call: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(call)
        def run(*args: object, **kwargs: object) -> object:
            if seen.running and seen.running[-1].name == name:
                seen.running[-1].reference = True
            return call(*args, **kwargs)

        return run

    with ExitStack() as stack:
        for name, home in operations().items():
            own = is_overridden(backend, name)
            mine = count_calls(name, getattr(backend, name), own)
            reference = note_calls(name, getattr(home, name))
            stack.enter_context(patch.object(backend, name, mine))
            stack.enter_context(patch.object(home, name, reference))
        yield stack.enter_context(seen)


def who_serves(backend: Backend, strategies: Sequence[str]) -> list[Served]:
    """Watch the prefill and two eager steps of the first family's tiny model, in the best dtype."""
    best = dtype_policy(backend).compute
    every = tiny.cases(tuple(strategies))
    with watching(backend) as seen:
        for family, strategy in (one for one in every if one[0] == every[0][0]):
            engine = tiny.tiny_engine(backend, strategy, dtype=best, family=family)
            tiny.start(engine, seed=3)
            for _ in range(2):
                engine.step()
        backend.synchronize()
    return [
        _describe(name, seen.counts[name], is_overridden(backend, name))
        for name in sorted(operations())
    ]


def _describe(name: str, found: _Count, own: bool) -> Served:
    mine = "override" if found.operators else "native"
    if not found.calls:
        by = "not called: " + ("another operation does its work" if own else "nothing needs it")
    elif found.reference == found.calls:
        by = "reference, to which the override hands over" if own else "reference"
    else:
        by = f"{mine}, reference" if found.reference else mine
    return Served(operation=name, by=by, calls=found.calls, to_reference=found.reference)
