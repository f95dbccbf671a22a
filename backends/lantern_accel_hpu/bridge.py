"""The one place that imports Habana's SDK; everything else gets it as a :class:`Bridge`.

The bridge registers ``hpu`` with torch. The software HPU gives a module of the same names, so that all
other code is the same with and without a card. Names and signatures: habana_frameworks 1.19.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lantern_accel.errors import BackendError
from lantern_accel_hpu import cards, environment, faults

#: Settings of ``hpu_backend`` that must be off for a step that writes its own state.
UNSAFE = ("reassign_copy_", "reassign_full_copy", "use_eager_fallback")
#: Waits that may each raise an error of earlier work; a device that goes on failing is given up.
DRAINED = 5
#: Seconds that a card may stay held after the process that had it has ended.
PATIENCE = 30.0
METRICS = ("graph_compilation", "cpu_fallback", "recipe_cache")


@dataclass(frozen=True)
class Kernels:
    """Habana's fused kernels; None where this SDK does not have one.

    ``sdpa``: FusedSDPA, ``rms_norm``: FusedRMSNorm (autograd functions, run by ``apply``). ``rotary``:
    apply_rotary_pos_emb, with ``pairwise``, its mode that turns adjacent pairs. ``softmax``: FusedSDPA's
    most precise mode for bfloat16.
    """

    sdpa: Any = None
    rms_norm: Any = None
    rotary: Any = None
    pairwise: Any = None
    softmax: str = "None"


@dataclass(frozen=True)
class Bridge:
    """A loaded bridge: ``hpu`` is ``habana_frameworks.torch.hpu`` or a stand-in.

    ``lazy``: operators are collected and run as graphs (the only mode with HPUGraph). ``config``: the
    settings of ``hpu_backend``; None where this SDK has none. ``first_use`` allocates on the device.
    """

    hpu: Any
    software: bool = False
    lazy: bool = False
    kernels: Kernels = Kernels()
    config: Any = None
    first_use: Callable[[], object] = lambda: None

    @classmethod
    def from_sdk(cls, *, fused: bool) -> Bridge:
        """Import Habana's bridge; raises BackendError with the reason where it refuses to load."""
        try:
            import habana_frameworks.torch  # noqa: F401, registers the device
            import habana_frameworks.torch.hpu as hpu
            from habana_frameworks.torch.utils.internal import is_lazy
        # AttributeError: the bridge reads the local part of torch's version, which not each torch has.
        except (ImportError, OSError, AssertionError, AttributeError, RuntimeError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise BackendError(
                f"habana_frameworks does not load: {reason}; use the torch and the "
                "habana-torch-plugin of one Gaudi image, and see docs/backends.md"
            ) from error
        return cls(
            hpu,
            lazy=bool(is_lazy()),
            kernels=_import_fused() if fused else Kernels(),
            config=_config(),
            first_use=_allocate,
        )

    @classmethod
    def from_software(cls) -> Bridge:
        """Build and load the software HPU of a checkout; raises BackendError where it cannot be."""
        from lantern_accel_hpu.software import config
        from lantern_accel_hpu.software.register import register

        return cls(register(), software=True, config=config, first_use=_allocate)

    # --- device --------------------------------------------------------------------------------

    def acquire(self) -> None:
        """Take the card, allocate on it and wait for it; raises BackendError where that fails.

        The driver gives a card at its first use, so that a busy one would otherwise be noticed only
        when a model is loaded.
        """
        until = time.monotonic() + PATIENCE
        try:
            # After a process has ended the driver holds its card for some seconds more.
            while True:
                try:
                    self.hpu.current_device()
                    break
                except RuntimeError as error:
                    if faults.kind_of(error) != "held" or time.monotonic() >= until:
                        raise
                    if faults.holders(cards.module(os.environ)):
                        raise
                    time.sleep(1.0)
            self.first_use()
            self.hpu.synchronize()
        except (RuntimeError, AssertionError) as error:
            raise faults.explain(error, "being opened") or BackendError(
                f"the Gaudi cannot be opened: {faults.first_line(error)}; check with hl-smi that it is "
                "listed and that no other process holds it, and see docs/backends.md"
            ) from error

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        self.hpu.synchronize()

    def drain(self) -> list[Exception]:
        """Wait until no error is left to come; return those that came, at most :data:`DRAINED`."""
        found: list[Exception] = []
        while len(found) < DRAINED:
            try:
                self.synchronize()
                break
            except Exception as error:
                error.__context__ = None  # of its own, not of the error that is being handled
                found.append(error)
        return found

    @functools.cached_property
    def copy_stream(self) -> Any:
        """The one stream on which copies go to the host."""
        return self.hpu.Stream()

    def allocate_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Return host memory that the device writes to by itself; None where this bridge has none."""
        try:
            with warnings.catch_warnings():
                # Torch advises against naming the device, and does not take this one for its accelerator.
                warnings.simplefilter("ignore", DeprecationWarning)
                made = torch.empty(shape, dtype=dtype).pin_memory("hpu")
                return made if made.is_pinned("hpu") else None
        except (RuntimeError, NotImplementedError, AssertionError):
            return None

    def flush(self) -> None:
        """Send what lazy mode has collected; in eager mode everything was sent already."""
        if self.lazy and not self.software:
            import habana_frameworks.torch.core as htcore

            htcore.mark_step()

    def memory(self) -> dict[str, int]:
        """Read the allocator's figures in bytes: Limit, InUse, MaxInUse."""
        return dict(self.hpu.memory_stats())

    def version(self) -> str | None:
        """Return the SDK's version; None without one."""
        found = None if self.software else environment.sdk_version()
        return f"habana-torch-plugin {found}" if found else None

    # --- metrics -------------------------------------------------------------------------------

    def metrics(self) -> dict[str, int]:
        """Read what should stand still after warm-up as ``metric.name``; fallen operators by name.

        ``recipe_cache`` needs PT_HPU_ENABLE_CACHE_METRICS=1 when the bridge is loaded.
        """
        found: dict[str, int] = {}
        for name in METRICS:
            metric = self.hpu.metrics.metric_global(name)
            if metric is None:  # this bridge does not count it, or was not asked to
                continue
            for key, value in metric.stats():
                if isinstance(value, int) and key != "TotalHit":  # every run finds its recipes
                    found[f"{name}.{key}"] = value
                elif key == "FallbackOps":
                    found.update({f"{name}.{operator}": n for operator, n in value.items()})
        return found

    # --- compiling and capturing ---------------------------------------------------------------

    def compile_options(self) -> dict[str, bool] | None:
        """Return the options of ``hpu_backend`` that keep a step correct; None where it has none.

        ``reassign_copy_`` and ``reassign_full_copy`` move writes of state to an earlier part of a graph
        that was left, past readers of the old value. ``use_eager_fallback`` leaves graphs without a
        word; it stays where the user set PT_HPU_USE_EAGER_FALLBACK. ``use_inplace_index_copy`` stays on:
        it writes a cache in place and drops the copy at the end of the graph, which is right for a cache
        that one graph writes once, and :meth:`.HPUOps.write` uses no ``index_copy_`` for another.
        """
        wanted = [name for name in UNSAFE if hasattr(self.config, name)]
        if environment.keeps_fallback(os.environ):
            wanted = [name for name in wanted if name != "use_eager_fallback"]
        return dict.fromkeys(wanted, False) or None

    def new_graph(self) -> Any:
        """Return an empty HPUGraph; raises BackendError where the bridge has none (eager mode)."""
        try:
            return self.hpu.HPUGraph()
        except (AttributeError, RuntimeError) as error:  # 1.24 has the name in every mode
            raise BackendError(
                "this bridge has no HPUGraph, which only lazy mode has; use the mode 'compile', or set "
                "PT_HPU_LAZY_MODE=1 before Python starts"
            ) from error

    @contextlib.contextmanager
    def capturing(self, graph: Any) -> Iterator[None]:
        """Record the block into ``graph``, on the stream on which everything else runs.

        A process can capture one graph at a time; a second one waits. The block is executed as well.
        """
        with _CAPTURE, self.hpu.graph(graph, stream=self.hpu.default_stream()):
            yield


_CAPTURE = threading.Lock()


def _allocate() -> None:
    """Use the device once: the driver then gives this process its card."""
    torch.zeros(1, device="hpu:0").add_(1)


def _config() -> Any:
    """Return the settings of ``hpu_backend``, a module; None where this SDK has none."""
    with contextlib.suppress(ImportError):
        from habana_frameworks.torch.dynamo.compile_backend import config

        return config
    return None


def _import_fused() -> Kernels:
    """Import the fused kernels, each by itself: an SDK may lack one."""
    found = Kernels()
    with contextlib.suppress(ImportError):
        from habana_frameworks.torch.hpex.kernels import FusedSDPA

        found = replace(found, sdpa=FusedSDPA, softmax=softmax_of(FusedSDPA))
    with contextlib.suppress(ImportError):
        from habana_frameworks.torch.hpex.normalization import FusedRMSNorm

        found = replace(found, rms_norm=FusedRMSNorm)
    with contextlib.suppress(ImportError):
        from habana_frameworks.torch.hpex.kernels import RotaryPosEmbeddingMode as Mode
        from habana_frameworks.torch.hpex.kernels import apply_rotary_pos_emb

        found = replace(found, rotary=apply_rotary_pos_emb, pairwise=Mode.PAIRWISE)
    return found


def softmax_of(sdpa: Any) -> str:
    """Return ``fp32`` where a wrapper of FusedSDPA is known to have that mode, else ``None``.

    It came between releases 1.19, which takes any word but ``fast`` for ``None``, and 1.24, whose wrapper
    takes a window as well: that distinguishes them.
    """
    return "fp32" if "window_size" in inspect.signature(sdpa.forward).parameters else "None"
