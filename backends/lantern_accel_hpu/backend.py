"""A Gaudi as a device: its kernels, its three ways to run a step, its clock and its meters.

Written from the API that habana_frameworks documents and, for version 1.19, shows in its source. It has
run on the software HPU and on a recording of that API; it has not run on a Gaudi.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lantern_accel.device.backend import (
    Backend,
    Conformance,
    DeviceFacts,
    MemoryUse,
    Stopwatch,
    Support,
)
from lantern_accel.device.capture import HostCopy, Replay
from lantern_accel.device.kv_cache import KVCache, KVLayout, Pass
from lantern_accel.errors import BackendError, LanternWarning, NotCapturableError
from lantern_accel_hpu import faults, operators, text
from lantern_accel_hpu.bridge import Bridge
from lantern_accel_hpu.copies import EventCopy
from lantern_accel_hpu.graphs import Compiled, Graphed, Warmed, Watch
from lantern_accel_hpu.kernels import HPUOps
from lantern_accel_hpu.layers import Layered, Layers
from lantern_accel_hpu.meters import EnergyMeter, EventStopwatch

SOFTWARE = "software HPU: correctness only, its times are not a Gaudi's"


class DeviceBackend(HPUOps, Backend):
    """One Gaudi that torch drives as ``hpu``, or the software HPU under the same name.

    ``mode``: ``compile``, ``graph`` or ``eager``; see :mod:`lantern_accel_hpu.graphs`.
    """

    name = "hpu"
    version = "0.2.0"

    def __init__(self, bridge: Bridge, mode: str = "eager", module: int | None = None) -> None:
        bridge.acquire()
        if mode == "graph":
            bridge.new_graph()  # so that a mode that this bridge lacks is refused now
        super().__init__(torch.device("hpu", 0))  # whichever card it is
        self.bridge = bridge
        self.simulated = bridge.software
        self.kernels = bridge.kernels
        # The pass that replaces the older ones looks at aliases, and keeps every write.
        self.reinplaces = hasattr(bridge.config, "use_generic_reinplacer")
        most = min(self.preferences.noise_bytes, bridge.memory()["Limit"] // 16)
        self.preferences = replace(self.preferences, noise_bytes=most)
        self.mode = mode
        self.module = module
        self._meter = None if bridge.software else EnergyMeter(module)
        self.watch = Watch(bridge)
        self._layers = Layers(bridge, self)
        self._replays: list[Warmed] = []

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Mark a phase for torch's profiler; a compiled step has no phases."""
        if self.listener is not None or torch.compiler.is_compiling():
            return super().phase(name)
        return torch.profiler.record_function(f"lantern.{name}")

    def host_copy(self, source: Tensor) -> HostCopy:
        """Read ``source`` a step late, by a copy on a stream of its own and an event."""
        return EventCopy(source, self.bridge, self.watch)

    def allocate(self, layout: KVLayout) -> KVCache:
        """Allocate a cache; raises BackendError with the rows that fit where memory is short."""
        memory = self.bridge.memory()
        if layout.nbytes > memory["Limit"] - memory["InUse"]:
            raise faults.cache_too_large(layout, memory)
        return super().allocate(layout)

    def trunk(
        self,
        blocks: nn.ModuleList,
        x: Tensor,
        at: Pass,
        taps: Sequence[int] = (),
        norm: nn.Module | None = None,
    ) -> Tensor:
        """Run a stack of blocks: each as a graph of its own in a function that was refused whole."""
        given: Any = blocks
        if self.region is not None and at.cache is not None:
            given = [self._layers.of(block) for block in blocks]
        return super().trunk(given, x, at, taps, norm)

    def text_encoder(self, encoder: nn.Module) -> nn.Module:
        """Let optimum-habana adapt a text encoder's layers, where it is installed and fits."""
        if not self.simulated:
            text.adapt()
        return encoder

    def facts(self) -> DeviceFacts:
        """Describe the Gaudi and the bridge."""
        fused = self.kernels
        found = {"FusedSDPA": fused.sdpa, "FusedRMSNorm": fused.rms_norm, "RoPE": fused.rotary}
        kernels = ", ".join(name for name, one in found.items() if one is not None) or "none"
        notes = [f"mode: {self.mode}", f"fused kernels: {kernels}"]
        if self.module is not None:
            notes.append(f"module {self.module}")
        if self.simulated:
            notes.insert(0, SOFTWARE)
        else:
            products, quotients = self._arithmetic
            notes.append(f"float32 matmuls: {'IEEE' if products else 'sums of pairs, not IEEE'}")
            notes.append(f"float32 division: {'correctly rounded' if quotients else 'not precise'}")
        return DeviceFacts(
            backend=self.name,
            device=str(self.device),
            name=str(self.bridge.hpu.get_device_name()),
            torch=torch.__version__,
            vendor=None if self.simulated else "Intel",
            memory_bytes=self.memory().limit,
            driver=None if self._meter is None else self._meter.driver,
            sdk=self.bridge.version(),
            notes=tuple(notes),
        )

    @functools.cached_property
    def _arithmetic(self) -> tuple[bool, bool]:
        return arithmetic(self.device)

    def compute_dtypes(self) -> tuple[torch.dtype, ...]:
        """bfloat16 first; float16 is left out, because Gaudi's serving stacks refuse it."""
        return (torch.bfloat16, torch.float32)

    def support(self, capability: str) -> Support:
        """Steps are compiled or captured, except in the mode ``eager``."""
        if capability == "capture":
            if self.mode == "eager":
                return Support(False, "the mode 'eager' runs each step operator by operator")
            return Support(True, how="recorded" if self.mode == "graph" else "compiled")
        if capability == "energy" and self.energy_mj() is None:
            reason = self._meter.reason if self._meter is not None else SOFTWARE
            return Support(False, reason)
        return super().support(capability)

    def conformance(self) -> Conformance:
        """Know of operators, dtypes and indices; check Habana's kernels and this backend's runners."""
        from lantern_accel_hpu.checks import checks

        return Conformance(operators.rules(self.index), checks())

    def capture(self, step: Callable[[], None], name: str = "step") -> Replay:
        """Warm ``step`` up and compile or capture it as the mode says.

        What is refused whole is compiled layer by layer, and runs operator by operator where that is
        refused as well; a mode that was asked for by name is an error then.

        Prefill is not captured as an HPUGraph: it updates parts of buffers in place, which a graph
        cannot, and it runs once an image. What goes from one length to a longer one is a dozen
        operators that run now and then: not worth a graph. Raises BackendError for an operator without a
        kernel, and where memory is short.
        """
        kinds: dict[str, type[Warmed]] = {"compile": Compiled, "graph": Graphed}
        kind = kinds.get(self.mode, Warmed)
        if name.startswith("widen") or (kind is Graphed and name == "prefill"):
            kind = Warmed
        try:
            replay = kind(self.watch, step, name)
        except NotCapturableError as error:
            if self.capture_asked:
                raise
            try:
                if kind is not Compiled:
                    raise
                replay = Layered(self.watch, step, name, self._layers)
            except NotCapturableError:
                # What it costs is what a reader must not miss.
                raise NotCapturableError(
                    f"SLOW: every call of the {name} now launches its operators one by one, where a "
                    f"captured {name} is a single launch, so that the host sets the speed, not the "
                    f"Gaudi; reason: {error}"
                ) from error
            if not any(isinstance(one, Layered) for one in self._replays):  # one line is enough
                warnings.warn(
                    f"SLOWER: the {name} is compiled layer by layer, and every call of it launches "
                    f"several graphs and operators, where a captured {name} is a single launch; "
                    f"reason: {error}",
                    LanternWarning,
                    stacklevel=3,
                )
        self._replays.append(replay)
        return replay

    def synchronize(self) -> None:
        """Wait for all streams of the device; then report what compiled late."""
        self.bridge.flush()
        try:
            self.bridge.synchronize()
        except RuntimeError as error:
            raise self.explain(error) or error from error
        self.watch.settle()

    def stopwatch(self) -> Stopwatch:
        """Measure between two events on the current stream, without the host's share."""
        return EventStopwatch(self.bridge)

    def explain(self, error: Exception) -> BackendError | None:
        """Say what an error of the bridge or its driver means and what to do."""
        # Further errors that are on their way are this one's, not the next request's.
        every = [error, *self.bridge.drain()]
        error = next((one for one in every if faults.kind_of(one) == "lost"), error)
        return faults.explain(error, "decoding", self.bridge.memory())

    def memory(self, new_peak: bool = False) -> MemoryUse:
        """Read the bridge's memory statistics."""
        stats = self.bridge.memory()
        if new_peak:
            self.bridge.hpu.reset_peak_memory_stats()
        return MemoryUse(
            in_use=stats["InUse"],
            peak=stats["MaxInUse"],
            limit=stats["Limit"],
            definition="what the bridge's allocator counts as in use (MaxInUse)",
        )

    def counters(self) -> dict[str, int]:
        """Read the bridge's metrics, and what this backend has warmed up.

        ``buckets.step`` and ``buckets.prefill`` count functions that were warmed up, ``buckets.graphs``
        the graphs that were made for them. ``late.*``: what rose in a step after its warm-up; should be
        absent. ``between.*``: what rose between steps, while requests were loaded and pixels drawn;
        should stand still once a bucket was drawn. Waits for the device, since what it has yet to compile
        is not counted yet.
        """
        self.synchronize()
        buckets = Counter(f"buckets.{replay.name}" for replay in self._replays)
        graphs = {"buckets.graphs": sum(replay.graphs for replay in self._replays)}
        return {**self.bridge.metrics(), **buckets, **graphs, **self.watch.risen}

    def energy_mj(self) -> int | None:
        """Read the card's energy meter, if habana-pyhlml is installed and finds the card."""
        return None if self._meter is None else self._meter.millijoules()

    def close(self) -> None:
        """Free captured graphs that are still held; the card itself is kept until the process ends."""
        for replay in self._replays:
            with contextlib.suppress(RuntimeError):
                replay.release()


def arithmetic(device: torch.device) -> tuple[bool, bool]:
    """Measure whether float32 products are summed, and quotients rounded, as IEEE says.

    A product of 1 and one just above half of its last place round up together. They do not where both are
    aligned to 26 bits before they are added.
    """
    just_above = [[1.0, 2.0**-24 + 2.0**-bit] for bit in range(25, 41)]
    left, ones = torch.tensor(just_above).to(device), torch.ones(2, 1).to(device)
    above = torch.arange(1, 4097, dtype=torch.float32)
    below = above.flip(0) + 0.5
    exact = (above.double() / below.double()).float()
    quotients = torch.div(above.to(device), below.to(device)).cpu()
    sums = torch.matmul(left, ones).cpu()
    return bool((sums == 1.0 + 2.0**-23).all()), bool((quotients == exact).all())
