"""Captures whole steps as CUDA graphs: warm-up on a side stream, capture, replay without the host.

All captures of a backend share one stream and one memory pool. A pool may be shared because the
captured functions leave nothing in it: what outlives a step lies in static buffers that were there
before, and replays run one after another.

A capture that cannot be ended is the last of its process: torch then never ends the pool's allocation,
and the next ``empty_cache`` stops at that. What follows runs operator by operator, and the cache is left
alone.
"""

from __future__ import annotations

import gc
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lantern_accel.device.capture import Replay
from lantern_accel.errors import LanternError, NotCapturableError
from lantern_accel_cuda import faults
from lantern_accel_cuda.handles import event
from lantern_accel_cuda.handles import stream as stream_of
from lantern_accel_cuda.kernels.counters import Counters, recording

#: Runs before a capture: the first makes handles, workspaces and kernels, the rest settle them.
WARMUPS = 3
#: More memory than this outside torch's pool is not a graph's: another process took it meanwhile.
MAX_SIDE_BYTES = 64 * 2**20


#: Name of what is recorded for a measurement.
TRIAL = "measurement"


class GraphReplay(Replay):
    """A recorded step: one graph, or one a phase, replayed in order."""

    captured = True
    kind = "recorded"

    def __init__(
        self, name: str, device: torch.device, graphs: list[tuple[str, torch.cuda.CUDAGraph]]
    ) -> None:
        super().__init__(self._run)
        self._name, self._device, self._graphs = name, device, graphs

    def __call__(self) -> None:
        """Give the recording to the GPU; returns before it has run."""
        with faults.explain_errors(self._device, f"replaying the {self._name}"):
            super().__call__()

    def _run(self) -> None:
        if len(self._graphs) == 1:
            self._graphs[0][1].replay()
            return
        for phase, graph in self._graphs:
            with torch.cuda.nvtx.range(phase):
                graph.replay()

    def time_phases(self) -> dict[str, float] | None:
        """Replay once; seconds of each phase by events, None where all phases are one graph."""
        if len(self._graphs) < 2:
            return None
        stream = torch.cuda.current_stream(self._device)
        marks = [event(timing=True) for _ in range(len(self._graphs) + 1)]
        marks[0].record(stream)
        for (_, graph), mark in zip(self._graphs, marks[1:], strict=True):
            graph.replay()
            mark.record(stream)
        marks[-1].synchronize()
        seconds: dict[str, float] = {}
        for (phase, _), begin, end in zip(self._graphs, marks, marks[1:], strict=False):
            seconds[phase] = seconds.get(phase, 0.0) + begin.elapsed_time(end) / 1000
        return seconds

    def release(self) -> None:
        """Free the graphs; their pool is freed with the last one."""
        super().release()
        graphs, self._graphs = self._graphs, []
        for _, graph in graphs:
            graph.reset()


class _Take:
    """One capture under way; :meth:`cut` ends a graph and begins the next."""

    def __init__(self, device: torch.device, pool: Any, first: str) -> None:
        self._pool = pool
        self._device = device
        self.graphs: list[tuple[str, torch.cuda.CUDAGraph]] = []
        self.bookkeeping = 0
        """Bytes that beginning the graphs allocated: older torch keeps a seed and an offset for each."""
        self._begin(first)

    def _begin(self, phase: str) -> None:
        before = torch.cuda.memory_allocated(self._device)
        graph = torch.cuda.CUDAGraph()
        # Work that another thread of this process gives to the GPU does not concern this capture.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self.bookkeeping += max(torch.cuda.memory_allocated(self._device) - before, 0)
        self.graphs.append((phase, graph))

    def cut(self, phase: str) -> None:
        """Begin a graph for ``phase``."""
        self.end()
        self._begin(phase)

    def end(self) -> None:
        """End the last graph."""
        with warnings.catch_warnings():
            # A phase may have nothing to do, as drafting without a tree.
            warnings.filterwarnings("ignore", message=".*[Gg]raph is empty")
            self.graphs[-1][1].capture_end()


class Recorder:
    """Makes the recordings of one GPU and keeps account of them."""

    def __init__(self, device: torch.device, mode: str) -> None:
        self.device = device
        self._mode = mode
        self._pool: Any = None
        self._take: _Take | None = None
        self._made: weakref.WeakSet[GraphReplay] = weakref.WeakSet()
        self.bytes_kept = 0
        """Bytes that captured functions left allocated in the pool; should stay 0."""
        self.failure = ""
        """Why a capture failed, in one line; nothing is captured from then on."""
        self._failed_takes: list[_Take] = []
        #: Of the recordings' own: other streams may run kernels while these are replayed.
        self._counters = Counters()

    @property
    def live(self) -> int:
        """Recordings that are not released."""
        return sum(bool(one._graphs) for one in self._made)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark a phase; where graphs are kept apart, begin its own."""
        if self._take is not None and self._mode == "phases":
            self._take.cut(name)
        with torch.cuda.nvtx.range(name):
            yield

    def capture(self, step: Callable[[], None], name: str) -> Replay:
        """Warm up, record and return ``step``; raises BackendError where it cannot be recorded."""
        began = time.perf_counter()
        records = self._mode != "off"
        replay = self._made_of(step, name, stream_of(self.device, "capture"), WARMUPS, records)
        replay.seconds = time.perf_counter() - began
        return replay

    def trial(self, run: Callable[[], None]) -> Replay:
        """Run once, record and return ``run``, whatever the mode, for whoever times and releases it.

        Raises BackendError as :meth:`capture` does. ``run`` makes no cycle that holds memory of the GPU.
        """
        return self._made_of(run, TRIAL, stream_of(self.device, "measure"), 1)

    def _made_of(
        self,
        run: Callable[[], None],
        name: str,
        stream: torch.cuda.Stream,
        warmups: int,
        records: bool = True,
    ) -> Replay:
        """Run a function ``warmups`` times on a side stream, and record it where ``records``."""
        if records and self.failure:
            raise NotCapturableError(
                f"an earlier capture failed ({self.failure}), after which torch's allocator records "
                "no more in this process"
            )
        current = torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        try:
            # The first run makes as many counters as are needed, so that none is made while recording.
            with recording(self._counters):
                with torch.cuda.stream(stream):
                    for _ in range(warmups):
                        run()
                current.wait_stream(stream)
                return self._record(run, name, stream) if records else Replay(run)
        except Exception as error:
            raise self._as_capture_error(error, run, name) from error

    def _record(self, run: Callable[[], None], name: str, stream: torch.cuda.Stream) -> GraphReplay:
        torch.cuda.synchronize(self.device)
        if name == "prefill" or not (self.live or name == TRIAL):
            # Once an engine, whose first function is prefill: it takes milliseconds.
            gc.collect()  # a cycle that holds GPU memory must not be freed during the capture
            torch.cuda.empty_cache()
        if self._pool is None or not self.live:
            self._pool = torch.cuda.graph_pool_handle()
        reserved = torch.cuda.memory_reserved(self.device)
        allocated = torch.cuda.memory_allocated(self.device)
        free = torch.cuda.mem_get_info(self.device)[0]
        with torch.cuda.stream(stream):
            take = _Take(self.device, self._pool, name)
            self._take = take
            try:
                run()
            finally:
                self._take = None
                self._end(take)
        replay = GraphReplay(name, self.device, take.graphs)
        grown = max(torch.cuda.memory_reserved(self.device) - reserved, 0)
        # What the driver keeps of a graph lies next to torch's pool. What others take meanwhile does not
        # count.
        beside = free - torch.cuda.mem_get_info(self.device)[0] - grown
        replay.nbytes = grown + (beside if 0 < beside <= MAX_SIDE_BYTES else 0)
        kept = torch.cuda.memory_allocated(self.device) - allocated - take.bookkeeping
        self.bytes_kept += max(kept, 0)
        self._made.add(replay)
        return replay

    def _end(self, take: _Take) -> None:
        try:
            take.end()
        except RuntimeError as error:
            self.failure = faults._first_line(error)
            # Kept until the process ends: freeing what was half made may fail too.
            self._failed_takes.append(take)
            raise

    def _as_capture_error(self, error: Exception, step: Callable[[], None], name: str) -> Exception:
        # Whatever the capture left in the pool is not used again.
        self._pool = None
        doing = f"capturing the {name}"
        known = faults.explain(error, self.device, doing)
        if known is not None:
            return known
        if isinstance(error, RuntimeError) and not isinstance(error, LanternError):
            holds = not faults.not_capturable(error)
            found = "" if holds else faults.illegal_operator(step, self.device)
            return NotCapturableError(
                f"the {name} cannot be captured as a CUDA graph on {self.device}: "
                f"{found or faults._first_line(error)}; a step may not wait for the host, which "
                "'lantern-accel conform cuda --only static' shows, and the GPU must work (nvidia-smi); "
                "--option graph=off draws without captured steps"
            )
        return error

    def close(self) -> None:
        """Release every recording."""
        for one in list(self._made):
            one.release()
        self._pool = None
        self._counters = Counters()
