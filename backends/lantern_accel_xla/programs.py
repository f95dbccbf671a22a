"""Two ways to run a step again: as its compiled program, or traced again at each call.

torch_xla is lazy: Python traces the operators of a step, and the traced graph's hash finds the compiled
program. That tracing costs the host more than many a step costs the device. A :class:`Program` traces
once, keeps the program's key and the tensors that it takes, and from then on hands them over: buffers
that the step changes are donated, and what comes back becomes their value.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from lantern_accel.device.capture import Replay, Step
from lantern_accel.errors import BackendError, NotCapturableError
from lantern_accel_xla import faults
from lantern_accel_xla.runtime import Runtime


class Taken(TorchFunctionMode):
    """Notes the tensors from outside that a block takes, each by the memory that it then has.

    A step's operators reach a dispatch mode only after they were made functional, with other tensors
    than ours; here they are seen as they are called.
    """

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self._runtime = runtime
        self.tensors: dict[int, Tensor] = {}
        self._made: dict[int, Tensor] = {}
        self.memory: dict[int, Tensor] = {}
        self._held: list[Tensor] = []

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, *kwargs.values())):
            self.note(tensor)
        out = func(*args, **kwargs)
        for tensor in _tensors(out):
            if id(tensor) not in self.tensors:
                self._made[id(tensor)] = tensor  # kept, so that no later tensor has its id
        return out

    def note(self, tensor: Tensor) -> None:
        """Note one tensor, if it is the device's and new."""
        known = id(tensor) in self.tensors or id(tensor) in self._made
        if known or tensor.device.type != self._runtime.device.type:
            return
        if self._runtime.pending([tensor])[0]:  # a view that was made a moment ago
            self._made[id(tensor)] = tensor
            return
        self.tensors[id(tensor)] = tensor
        self.memory[self._runtime.handles([tensor])[0]] = tensor
        # Held, because a buffer that is written unread would free it, and another take its place.
        self._held += self._runtime.data([tensor])[:1]

    def restore(self) -> None:
        """Drop what was traced, and give every tensor the memory that it had before."""
        tensors = list(self.tensors.values())
        waits = self._runtime.pending(tensors)
        self._runtime.forget()
        for tensor, held, waiting in zip(tensors, self._held, waits, strict=True):
            if waiting:
                self._runtime.replace(tensor, held)


class Program(Replay):
    """A step as one compiled program of donated buffers; Python makes one call per step.

    ``named``: buffers that the step may change; others are found. ``kept``: buffers that are not donated,
    because a copy of them may be under way to the host. ``changed``: the buffers that the step does
    change; ``donors``: which of them, by ``id``, are written where they lie. Raises BackendError where
    the step reads a value on the host, or is another program when it is traced again.
    """

    captured = True
    kind = "compiled"
    _key: bytes = b""

    def __init__(
        self,
        runtime: Runtime,
        step: Step,
        name: str,
        named: Iterable[Tensor] = (),
        kept: Iterable[Tensor] = (),
    ) -> None:
        super().__init__(step)
        self._named = list(named)
        self.name = name
        self._runtime = runtime
        self._kept = {id(one) for one in kept}
        began = time.perf_counter()
        held = runtime.memory().get("bytes_used", 0)
        first = self._trace(compiling=True)
        if self._trace(compiling=False) != first:
            raise NotCapturableError(
                f"the {name} is another program when it is traced again, so it cannot be replayed: "
                "something in it changes outside of its buffers; run `lantern-accel conform xla "
                "--only static.one_graph --only static.views`, which names the line"
            )
        runtime.wait()
        self.nbytes = max(runtime.memory().get("bytes_used", 0) - held, 0)
        self.seconds = time.perf_counter() - began

    def _trace(self, *, compiling: bool) -> bytes:
        """Trace the step, run the program once, and return its key."""
        assert self._step is not None
        runtime = self._runtime
        runtime.sync(wait=True)
        runtime.wait()  # memory is known by its handle only once its program has run
        seen = Taken(runtime)
        for tensor in self._named:
            seen.note(tensor)
        try:
            with runtime.tracing(self.name), seen:
                self._step()
        except RuntimeError as error:
            seen.restore()
            raise faults.explain(error, f"tracing the {self.name}") or error from error
        given = list(seen.tensors.values())
        waits = runtime.pending(given)
        changed = [tensor for tensor, waiting in zip(given, waits, strict=True) if waiting]
        data = runtime.data(changed)
        owners = [seen.memory.get(handle) for handle in runtime.handles(data)]
        ids = {id(one) for one in changed} - self._kept
        self.donors = {id(owner) for owner in owners if id(owner) in ids}
        for one, owner in zip(data, owners, strict=True):
            if id(owner) in ids:
                runtime.donate(one, True)
        key = runtime.program(changed)
        constants = [one for one, owner in zip(data, owners, strict=True) if owner is None]
        if compiling:
            runtime.compile(changed, self.name)
            self._constants = constants
        elif key == self._key and not self._alike(constants):
            key = b""  # the same program of other numbers, which a replay would not see
        for one, owner in zip(data, owners, strict=True):
            if id(owner) in ids:  # compiled in; left set, any other program might take the memory
                runtime.donate(one, False)
        self.changed = changed
        self.inputs = [
            one if owner is None else owner for one, owner in zip(data, owners, strict=True)
        ]
        if compiling:
            self._key = key
        seen.restore()
        if key == self._key:
            self._give(runtime.run(key, data))
        return key

    def _alike(self, constants: list[Tensor]) -> bool:
        """Return whether the numbers that Python put into the step are those of the first trace."""
        if self._runtime.handles(constants) == self._runtime.handles(self._constants):
            return True
        pairs = zip(constants, self._constants, strict=True)
        return all(one.equal(other) for one, other in ((a.cpu(), b.cpu()) for a, b in pairs))

    def _give(self, results: list[Tensor]) -> None:
        for buffer, value in zip(self.changed, results, strict=True):
            self._runtime.replace(buffer, value)

    def __call__(self) -> None:
        """Launch the program; returns before it has run."""
        if self._step is None:
            raise BackendError("this replay was released; capture the step again")
        if any(self._runtime.pending(self.inputs)):  # a request was loaded, lazily
            self._runtime.sync()
        self._give(self._runtime.run(self._key, self.inputs))

    def release(self) -> None:
        """Forget the buffers; the program stays in the runtime's cache."""
        super().release()
        self.inputs, self.changed = [], []


class Traced(Replay):
    """A step that Python traces again at each call; the runtime finds the program by its hash.

    The runtime itself raises where the step reads a value on the host or becomes another program.
    """

    captured = True
    kind = "traced"

    def __init__(self, runtime: Runtime, step: Step, name: str) -> None:
        super().__init__(step)
        self.name = name
        self._runtime = runtime
        self._spent, self._calls = 0.0, 0

        def run() -> None:
            began = time.perf_counter()
            step()
            self._spent += time.perf_counter() - began

        self._run: Callable[[], None] | None = runtime.strict(run, name)
        self._run_once = run  # the runtime knows it by its id, which must stay its own
        began = time.perf_counter()
        self()
        runtime.sync(wait=True)
        runtime.wait()
        self.seconds = time.perf_counter() - began
        self._spent, self._calls = 0.0, 0

    def __call__(self) -> None:
        """Trace the step and launch its program; returns before it has run."""
        if self._run is None:
            raise BackendError("this replay was released; capture the step again")
        try:
            self._run()
        except RuntimeError as error:
            raise faults.explain(error, f"tracing the {self.name}") or error from error
        self._calls += 1

    def tracing(self) -> float | None:
        """Return the host's seconds per call in the Python step."""
        return self._spent / self._calls if self._calls else None

    def release(self) -> None:
        """Forget the step; its program stays in the runtime's cache."""
        super().release()
        self._run = None


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
