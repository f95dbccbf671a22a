"""The backend interface: what a device must provide to decode on it, with a reference for most of it.

It is six protocols (:data:`SEAM`) of at most 50 methods and one record of
:class:`~.preferences.Preferences`. A backend inherits :class:`Backend` and writes :meth:`~Device.facts`
and :meth:`~Meters.synchronize`. Everything else has a reference implementation that is correct on any
device torch knows; override what the device does better. Hooks choose a backend once a call; inside a
step there are only these methods and tensors.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch._ops import OpOverload

from lantern_accel.device import forks
from lantern_accel.device.capture import Capture, Replay
from lantern_accel.device.operations import Ops, TensorOps
from lantern_accel.device.sampling import SamplingOps
from lantern_accel.device.timeouts import close_in_time
from lantern_accel.errors import BackendError, DeviceRequestError, NotCapturableError, did_you_mean
from lantern_accel.records import Frozen

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

CAPABILITIES = {
    "capture": "a step is captured once and replayed; the answer says how",
    "energy": "energy_mj() reads a meter",
    "memory": "memory() reads the memory in use",
    **{name: f"computes in {name}" for name in DTYPES},
}
"""What may be asked of :meth:`Device.support`, and what 'yes' means."""


OperatorRule = Callable[[OpOverload, tuple[object, ...], Mapping[str, object]], str]
"""A rule of :class:`Conformance`: of an operator and its
arguments, empty where the device takes them, else why it does not."""


class DeviceFacts(Frozen):
    """What is known about one opened device; what is not known stays None."""

    backend: str
    device: str
    name: str
    torch: str
    vendor: str | None = None
    architecture: str | None = None
    memory_bytes: int | None = None
    generation: str | None = None
    """The maker's name of the design, such as Zen 3."""
    virtual: bool | None = None
    """Whether it is a guest's share of a machine."""
    cores: int | None = None
    threads: int | None = None
    driver: str | None = None
    sdk: str | None = None
    notes: tuple[str, ...] = ()
    """What is set on this device and changes its speed, such as a mode or an instruction set."""
    readings: tuple[str, ...] = ()
    """What it reads now and may read otherwise in a moment, such as its temperature."""


@dataclass(frozen=True)
class Support:
    """Answer to 'can this backend ...?'; true or false in an ``if``, with the reason for a no.

    ``how`` says more about a yes: for ``capture``, one of :data:`~.capture.KINDS`.
    """

    yes: bool
    reason: str = ""
    how: str = ""

    def __bool__(self) -> bool:
        return self.yes


@dataclass(frozen=True)
class DTypePolicy:
    """Which dtype each kind of number has on a device; logits are float32 everywhere.

    ``compute``: weights, activations and the cache. ``operators``: what torch's own compute best in,
    such as text encoders and training; None: ``compute``.
    """

    compute: torch.dtype
    operators: torch.dtype | None = None


@dataclass(frozen=True)
class MemoryUse:
    """Memory of one device as seen from this process, in bytes; None where it is not known.

    ``free`` is what this process may still allocate, other programs' share taken off. ``definition``
    says what is counted, as the end of the sentence 'peak memory is ...'.
    """

    in_use: int | None = None
    peak: int | None = None
    limit: int | None = None
    free: int | None = None
    definition: str = ""

    @property
    def left(self) -> int | None:
        """What may still be allocated; None where the device does not say."""
        if self.free is not None or self.limit is None:
            return self.free
        return self.limit - (self.in_use or 0)


@dataclass(frozen=True)
class DeviceConditions:
    """What a device's speed depends on at this moment; None where the backend cannot read it."""

    clock_mhz: float | None = None
    clock_limit_mhz: float | None = None
    memory_clock_mhz: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    other_processes: int | None = None


@dataclass(frozen=True)
class Conformance:
    """What the kit holds a device to, in addition to its results.

    ``rules``: what every traced operator is held to, by the kit's check: ``"operators"`` (is there a
    kernel?), ``"dtypes"`` (for these dtypes?), ``"indices"`` (are integers as wide as the device likes
    them?). ``checks``: the device's own, by name (``"group.name"``), functions as in
    :mod:`lantern_accel.testing`. ``apart``: groups whose checks take a process each, of a device that
    keeps more than one process may hold.
    """

    rules: Mapping[str, OperatorRule] = field(default_factory=dict)
    checks: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    apart: frozenset[str] = frozenset()


class Stopwatch:
    """Wall time of a ``with`` block in ``seconds``, the device's pending work waited for.

    The device is synchronised before the start, so that earlier work is not counted, and before
    the end, so that the block's own work is. ``name`` tells readers of a report what was read.
    """

    name: str = "host clock, the device waited for at both ends"

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self._start = 0.0
        self.seconds = 0.0

    def __enter__(self) -> Stopwatch:
        self._synchronize()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        self._synchronize()
        self.seconds = time.perf_counter() - self._start


class Meters(Protocol):
    """What a device measures of itself, once its work is waited for."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done all the work given to it."""

    def stopwatch(self) -> Stopwatch:
        """Return a new stopwatch that measures this device's time: ``with ... as watch:``."""
        return Stopwatch(self.synchronize)

    def memory(self, new_peak: bool = False) -> MemoryUse:
        """Read the memory in use, its peak and limit; ``new_peak``: then start a new one, if it can."""
        return MemoryUse()

    def trim_memory(self) -> AbstractContextManager[None]:
        """Run the block, which makes large tensors that soon go again, in little more than they take."""
        return nullcontext()

    def conditions(self) -> DeviceConditions:
        """Read clocks, power limit, temperature and the other processes on the device."""
        return DeviceConditions()

    def counters(self) -> dict[str, int]:
        """Read the device's own counters, such as graph compilations and CPU fall-backs."""
        return {}

    def energy_mj(self) -> int | None:
        """Read the energy meter in millijoules since some fixed time; None without a meter."""
        return None


class Device(Meters, Protocol):
    """What is opened: what it is, what it can do, and its errors.

    Subclasses set ``name`` (the spec's) and ``version`` (their own) and give ``device``.
    """

    name: str
    version: str
    device: torch.device

    slowed: str = ""
    """Why this device decodes slower than it could here, and what to install; commands say it."""

    capture_asked: bool = False
    """True where the user's options ask for captured steps: then one that cannot be is an error."""

    simulated: bool = False
    """True for a device in software that stands for another: right results, and no speed to speak of."""

    unusable: str = ""
    """Why this device cannot be used in this process any more, as a sentence; empty where it can."""

    @abstractmethod
    def facts(self) -> DeviceFacts:
        """Describe the device, its driver and its software."""

    def compute_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes the device computes in, the best one for decoding first."""
        return (torch.float32,)

    def support(self, capability: str) -> Support:
        """Answer for one of :data:`CAPABILITIES`; raises BackendError for any other name."""
        if capability not in CAPABILITIES:
            raise DeviceRequestError(
                f"no capability is named {capability!r}{did_you_mean(capability, CAPABILITIES)}"
            )
        yes, no = False, f"backend {self.name!r} runs each step eagerly"
        if capability in DTYPES:
            yes = DTYPES[capability] in self.compute_dtypes()
            no = f"{self.device} does not compute in {capability}"
        elif capability == "energy":
            yes, no = self.energy_mj() is not None, f"backend {self.name!r} reads no energy meter"
        elif capability == "memory":
            yes, no = self.memory().in_use is not None, f"backend {self.name!r} reads no memory use"
        return Support(yes, "" if yes else no)

    def conformance(self) -> Conformance:
        """Return what the kit needs to know of the device, and its checks of its own."""
        return Conformance()

    def inference(self) -> AbstractContextManager[object]:
        """Return the mode in which models run without gradients; everything but training runs in it.

        The reference is ``torch.inference_mode()``. A device that cannot make views of tensors from
        outside that mode returns ``torch.no_grad()``.
        """
        return torch.inference_mode()

    def explain(self, error: Exception) -> BackendError | None:
        """Turn an error that the device raised while decoding into one that says what to do.

        None for an error that is not the device's.
        """
        return None

    def after_fork(self) -> None:
        """Get ready in a child of ``fork``, or set :attr:`unusable`; must not compute, and never raises.

        A child has none of its parent's threads, and hardly a driver can be used in one.
        """
        self.unusable = (
            f"this process was forked from one that had opened {self.device}, which cannot be used "
            "after a fork; load the model in the child alone, or start children with the method 'spawn'"
        )

    def close(self) -> None:
        """Give back what the backend holds; calling it twice is harmless."""
        return


class Training(Protocol):
    """What training needs of a device in addition to its operations."""

    training_ops: TensorOps = TensorOps()
    """The operations of a model in training: gradients flow through them."""

    def flush(self) -> None:
        """Run what the device has gathered; training calls it after gradients and after the update.

        A lazy device marks a step here; any other does nothing.
        """
        return


class Backend(Device, TensorOps, Training):
    """One opened device; a context manager that closes itself."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        forks.report_in_children(self)

    def __enter__(self) -> Backend:
        return self

    def __exit__(self, *raised: object) -> None:
        close_in_time(self.name, self.close)


#: The interface: whatever a backend may write is a method of one of these, or a preference.
SEAM: tuple[type, ...] = (Device, Meters, Ops, SamplingOps, Capture, Training)


def methods(*protocols: type) -> dict[str, type]:
    """Return the methods of parts of the interface, all of it by default, and whose each is."""
    return {
        name: kind
        for kind in protocols or SEAM
        for name, one in vars(kind).items()
        if callable(one) and not name.startswith("_")
    }


def dtype_policy(backend: Backend, requested: str = "auto") -> DTypePolicy:
    """Choose the dtypes for ``"auto"``, ``"float32"``, ``"bfloat16"`` or ``"float16"``.

    Raises BackendError for another name and for a dtype the device does not compute in.
    """
    able = backend.compute_dtypes()
    if requested == "auto":
        return DTypePolicy(able[0], backend.preferences.operators)
    if requested not in DTYPES:
        near = did_you_mean(requested, ["auto", *DTYPES])
        raise DeviceRequestError(f"no dtype is named {requested!r}{near}")
    dtype = DTYPES[requested]
    if dtype not in able:
        names = ", ".join(str(one).removeprefix("torch.") for one in able)
        raise DeviceRequestError(
            f"device {backend.device} does not compute in {requested}; use auto or one of: {names}"
        )
    return DTypePolicy(dtype)


def record_replay(backend: Backend, function: Callable[[], None], name: str) -> Replay:
    """Return what :meth:`Backend.capture` makes of ``function``.

    Raises NotCapturableError where that is not a :class:`Replay`.
    """
    made = backend.capture(function, name)
    if not isinstance(made, Replay):
        raise NotCapturableError(
            f"backend {backend.name!r} failed in capture: it returned a {type(made).__name__}, not a "
            "Replay; report it to the plug-in's author"
        )
    return made
