"""Records whole steps with whatever graph class torch has for the device: capture, replay, release.

torch 2.12 and newer have one class for every device whose maker registers an implementation,
``torch.accelerator.Graph``. Before that, and where nothing is registered, the device's own module may
have a class of the same methods, called after the device (``XPUGraph`` in ``torch.xpu``).
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lantern_accel.device.capture import Replay
from lantern_accel.errors import NotCapturableError
from lantern_accel_torch.accelerator import Accelerator

#: Runs before a recording: the first makes handles and kernels, the rest settle them.
WARMUPS = 3

Maker = Callable[[], Any]


def maker(accelerator: Accelerator) -> Maker | str:
    """Return what makes an empty graph for the kind of device, or why there is none.

    A graph has ``capture_begin``, ``capture_end``, ``replay`` and ``reset``, as torch's classes have.
    """
    own = getattr(accelerator.module, f"{accelerator.type.upper()}Graph", None)
    shared = getattr(torch.accelerator, "Graph", None)
    failed = ""
    for found in (shared, own):
        if found is None:
            continue
        try:
            found()
        except Exception as error:  # torch's class says so where the device registered nothing
            failed = failed or _first_line(error)
        else:
            return found  # type: ignore[no-any-return]  # a class of torch's or the vendor's
    release = f"torch {torch.__version__} records no graphs on {accelerator.type}"
    return f"{release} ({failed})" if failed else release


class GraphReplay(Replay):
    """A recorded step."""

    captured = True
    kind = "recorded"

    def __init__(self, graph: Any) -> None:
        super().__init__(graph.replay)
        self._graph = graph

    def release(self) -> None:
        """Free the graph."""
        super().release()
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.reset()


class Recorder:
    """Makes the recordings of one device."""

    def __init__(self, accelerator: Accelerator, device: torch.device, make: Maker) -> None:
        self._accelerator, self._device, self._make = accelerator, device, make
        self._stream: Any = None
        self._made: weakref.WeakSet[GraphReplay] = weakref.WeakSet()
        self.failure = ""
        """Why a recording failed, in one line; nothing is recorded from then on."""

    def capture(self, step: Callable[[], None], name: str) -> Replay:
        """Run ``step`` to warm up, record it and return the recording.

        Raises NotCapturableError where the device does not record it.
        """
        if self.failure:
            raise NotCapturableError(f"an earlier recording failed ({self.failure})")
        began = time.perf_counter()
        with self._aside():
            for _ in range(WARMUPS):
                step()
            self._accelerator.synchronize(self._device)
            with contextlib.suppress(Exception):  # not every kind has it
                torch.accelerator.empty_cache()
            graph = self._record(step, name)
        self._accelerator.synchronize(self._device)
        replay = GraphReplay(graph)
        replay.seconds = time.perf_counter() - began
        self._made.add(replay)
        return replay

    def _record(self, step: Callable[[], None], name: str) -> Any:
        graph: Any = None
        begun = False
        try:
            graph = self._make()
            graph.capture_begin()
            begun = True
            step()
            begun = False
            graph.capture_end()
        except Exception as error:
            self.failure = _first_line(error)
            if begun:  # what was half recorded must not go on recording
                with contextlib.suppress(Exception):
                    graph.capture_end()
            raise NotCapturableError(
                f"{self._device} does not record the {name} ({self.failure}); --option capture=off "
                "draws without recordings and without this message"
            ) from error
        return graph

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Run the block on a stream of its own: torch records no default stream."""
        before = torch.accelerator.current_stream(self._device)
        if self._stream is None:
            self._stream = torch.Stream(self._device)
        self._stream.wait_stream(before)
        torch.accelerator.set_stream(self._stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            before.wait_stream(self._stream)

    def close(self) -> None:
        """Release every recording."""
        for one in list(self._made):
            one.release()
        self._stream = None


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200]
