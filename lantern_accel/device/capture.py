"""How a step runs: in phases, in a device's own calls, or captured as a replay."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Literal, Protocol, get_args

from torch import Tensor

from lantern_accel.device.plan import FusedStep, Refused, StepPlan
from lantern_accel.errors import BackendError

Step = Callable[[], None]
#: Called with a phase's name; the phase runs inside the context that it returns.
PhaseListener = Callable[[str], AbstractContextManager[object]]

CaptureKind = Literal["recorded", "compiled", "traced", "eager"]

KINDS: dict[CaptureKind, str] = {
    "recorded": "the device runs its own recording of the step; no Python runs",
    "compiled": "compiled code runs; Python makes one call per step",
    "traced": "compiled code runs, but Python goes through the step again at each call to find it",
    "eager": "Python gives the device one operator after another",
}
"""The ways to run a step again, and what each costs the host: :attr:`Replay.kind` is one of them."""

assert get_args(CaptureKind) == tuple(KINDS)


class Replay:
    """A step that is ready to run again; the reference calls the Python function.

    ``captured`` says whether the device replays a recording or runs compiled code instead, ``kind``
    which of the two it is (one of :data:`KINDS`; empty where a backend does not say); ``nbytes`` is the
    device memory that it holds, ``seconds`` what making it took.
    """

    captured: bool = False
    kind: CaptureKind | Literal[""] = ""
    nbytes: int = 0
    seconds: float = 0.0

    def __init__(self, step: Step) -> None:
        self._step: Step | None = step

    @property
    def how(self) -> str:
        """The kind, or ``captured`` where the backend says no more than that."""
        return self.kind or ("captured" if self.captured else "eager")

    def __call__(self) -> None:
        """Run the step once on the buffers it was captured with; returns before it has ended."""
        if self._step is None:
            raise BackendError("this replay was released; capture the step again")
        self._step()

    def expect(self, calls: int) -> None:
        """Announce about ``calls`` calls; a backend may now make the step faster.

        It may run the step: the caller loads its request afterwards.
        """

    def time_phases(self) -> dict[str, float] | None:
        """Run the step once; its seconds by phase, None where the recording keeps no phases apart."""
        return None

    def tracing(self) -> float | None:
        """Return the host's seconds per call that tracing the step again took so far.

        None where nothing is traced: only replays of the kind ``traced`` have an answer.
        """
        return None

    def release(self) -> None:
        """Free what the recording holds; calling it twice is harmless."""
        self._step = None


def buffers_of(step: Step) -> dict[str, Tensor]:
    """Return the tensors that ``step`` may change in place, by name; a step changes nothing else.

    For devices that replay a function of inputs and outputs: these are inputs that come back as outputs,
    and what comes back becomes their new value. An engine's steps name them; of any other function the
    answer is empty.
    """
    method = step.func if isinstance(step, functools.partial) else step
    named = getattr(getattr(method, "__self__", None), "changes", None)
    return dict(named) if isinstance(named, dict) else {}


class HostCopy:
    """Copies a small buffer to the host without making the device wait for the host.

    ``post`` starts a copy of what the buffer holds once the work given so far has run; ``read`` waits
    for the oldest posted copy. With ``lag`` steps between the two, a device that runs ahead of the
    host never stands still. The reference copies when it is read, so it has no lag.
    """

    lag: int = 0

    def __init__(self, source: Tensor) -> None:
        self._source = source

    def post(self) -> None:
        """Start a copy."""

    def read(self) -> Tensor:
        """Return the oldest posted copy that was not read yet, on the host."""
        return self._source.cpu()

    def clear(self) -> None:
        """Forget every posted copy that was not read; a new request starts with this.

        A request that was interrupted leaves copies behind, which the next one would read as its own.
        """


class Capture(Protocol):
    """How a device runs a step, from one operator after another to a recording."""

    listener: PhaseListener | None = None
    """What :func:`listening` put in place; None outside its block."""

    region: Callable[..., object] | None = None
    """Runs a part of a step on its arguments: the drafts, or all behind the pass. None: as it is."""

    own_steps: Mapping[str, str] = MappingProxyType({})
    """What :meth:`fused_step` answered last, by what was asked for: why it refused, or nothing."""

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Mark a phase of the step (draft, verify, accept, commit) for the listener, if there is one.

        A backend that marks phases for its own profiler leaves them to this method while
        ``self.listener`` is set.
        """
        return nullcontext() if self.listener is None else self.listener(name)

    def host_copy(self, source: Tensor) -> HostCopy:
        """Return a way to read ``source``, a small static buffer, while steps run."""
        return HostCopy(source)

    def fused_step(self, plan: StepPlan) -> FusedStep | Refused:
        """Return a plan's step, or what follows its pass, in the device's own calls.

        Called when an engine is made, for its whole step first; where that is refused, and drafts need
        no drafter, for the plan without a target. :class:`~.plan.Refused` where the device has no kernel
        for the plan, or knows another :data:`~.plan.PLAN_VERSION`: the step runs operator by operator.
        """
        return Refused("this device has no steps of its own")

    def capture(self, step: Step, name: str = "step") -> Replay:
        """Make ``step``, a function of static buffers without a host read, ready to be replayed.

        A backend may run ``step`` any number of times to warm up and record it: the caller resets
        the buffers that the step writes before the first replay. ``name`` says which function it is
        (``prefill`` or ``step``) in traces and errors. A device that replays functions of inputs and
        outputs asks :func:`buffers_of` which buffers the step changes.

        Raises :class:`~lantern_accel.errors.NotCapturableError` for a step that the device runs but
        cannot capture: it is then used as it is, with a warning that says what that costs. Any other
        error ends the request, or lets ``device="auto"`` go on to the next device.
        """
        return Replay(step)


@contextmanager
def listening(ops: Capture, listener: PhaseListener) -> Iterator[None]:
    """Report every phase of eager steps to ``listener`` inside the block.

    ``listener(name)`` returns the context that the phase runs in. The listener before it is put back
    afterwards. A replay has no phases to report; see ``Replay.time_phases``.
    """
    before, ops.listener = ops.listener, listener
    try:
        yield
    finally:
        ops.listener = before


def own_step(ops: Capture, plan: StepPlan) -> FusedStep | None:
    """Return what :meth:`Capture.fused_step` makes of a plan, None where it refused; note the answer."""
    made = ops.fused_step(plan)
    if isinstance(made, FusedStep):
        ops.own_steps = {**ops.own_steps, plan.title: ""}
        return made
    why = made.why if isinstance(made, Refused) else f"its answer was a {type(made).__name__}"
    ops.own_steps = {**ops.own_steps, plan.title: why}
    return None
