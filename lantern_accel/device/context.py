"""What a request enters: torch without the caller's autocast, default device and default dtype.

Settings of determinism are the caller's, and stay. The default dtype is of all threads: it is float32
while any request runs.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from lantern_accel.device import forks

if TYPE_CHECKING:
    from lantern_accel.device.backend import Device

overrides: Any = torch.overrides
Called = TypeVar("Called", bound=Callable[..., object])

#: The types of devices that may be under autocast.
_TYPES: Sequence[str] = torch._C._autocast_supported_devices()


class _UsualDtype:
    """Makes float32 the default dtype until the last of the blocks that entered this has ended."""

    lock, inside, before = threading.Lock(), 0, torch.float32

    def __enter__(self) -> None:
        with self.lock:
            if not self.inside and (found := torch.get_default_dtype()) != torch.float32:
                torch.set_default_dtype(torch.float32)
                self.before = found
            self.inside += 1

    def __exit__(self, *exc: object) -> None:
        with self.lock:
            self.inside = max(self.inside - 1, 0)
            if self.inside <= 0 and self.before != torch.float32:
                torch.set_default_dtype(self.before)
                self.before = torch.float32

    def after_fork(self) -> None:
        """Leave the blocks of the parent's other threads, which are not here."""
        self.lock, self.inside = threading.Lock(), 1
        self.__exit__()


_usual_dtype = _UsualDtype()
forks.report_in_children(_usual_dtype)


def _now() -> tuple[list[str], list[TorchFunctionMode]]:
    """Return the types under autocast, and torch's function modes, the outermost first."""
    on = [one for one in _TYPES if torch.is_autocast_enabled(one)]
    return on, overrides._get_current_function_mode_stack()


def _become(on: Sequence[str], modes: Sequence[TorchFunctionMode]) -> None:
    """Let just these types be under autocast, and these modes be active."""
    for one in _TYPES:
        if torch.is_autocast_enabled(one) != (one in on):
            torch.set_autocast_enabled(one, one in on)
    if (old := overrides._get_current_function_mode_stack()) != modes:
        for _ in old:
            overrides._pop_mode()
        for mode in modes:
            overrides._push_mode(mode)


@contextmanager
def own_context() -> Iterator[None]:
    """Leave the caller's autocast, default device and default dtype until the block ends."""
    on, modes = _now()
    with _usual_dtype:
        try:
            _become([], [one for one in modes if not isinstance(one, DeviceContext)])
            yield
        finally:
            _become(on, modes)


@contextmanager
def inference(backend: Device) -> Iterator[None]:
    """Let a block infer on a device, whatever the caller has set."""
    with own_context(), backend.inference():
        yield


@contextmanager
def with_gradients() -> Iterator[None]:
    """Load or train in a block: torch as it is where nobody has set anything."""
    with own_context(), torch.inference_mode(False), torch.enable_grad():
        yield


def inferring(function: Called) -> Called:
    """Run a function in the inference mode of its first argument, a backend or what has one."""

    @functools.wraps(function)
    def run(first: Any, *args: object, **kwargs: object) -> object:
        with inference(getattr(first, "backend", first)):
            return function(first, *args, **kwargs)

    return run  # type: ignore[return-value]  # of the same signature


def callers(function: Callable[..., None]) -> Callable[..., None]:
    """Return a caller's function that runs in what is set now, the default dtype apart."""
    known, inferred, gradients = _now(), torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def run(*given: object) -> None:
        ours = _now()
        try:
            _become(*known)
            with torch.inference_mode(inferred), torch.set_grad_enabled(gradients):
                function(*given)
        finally:
            _become(*ours)

    return run
