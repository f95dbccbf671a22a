"""What is measured on a Gaudi: time between events, energy, and the memory that is left."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from lantern_accel.device.backend import Stopwatch
from lantern_accel.device.operations import KVLayout
from lantern_accel.errors import BackendError
from lantern_accel_hpu.bridge import Bridge


class EventStopwatch(Stopwatch):
    """Time between two events on the current stream: the device's, without the host's share."""

    name = "HPU events on the current stream"

    def __init__(self, bridge: Bridge) -> None:
        super().__init__(bridge.synchronize)
        self._bridge = bridge
        self._from = bridge.hpu.Event(enable_timing=True)
        self._to = bridge.hpu.Event(enable_timing=True)

    def __enter__(self) -> Stopwatch:
        self._bridge.flush()
        self._synchronize()
        self._from.record()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bridge.flush()
        self._to.record()
        self._to.synchronize()
        self.seconds = float(self._from.elapsed_time(self._to)) / 1000


class EnergyMeter:
    """The card's energy counter through habana-pyhlml; ``reason`` says why there is none.

    The library counts all cards of the machine and knows nothing of the process's choice, so the card
    is found by its module number: HABANA_VISIBLE_MODULES or HLS_MODULE_ID, else the only card there is.
    """

    def __init__(self, index: int, environ: Mapping[str, str] = os.environ) -> None:
        self.reason = ""
        self.driver: str | None = None
        self._read: Callable[[], int] | None = None
        try:
            import pyhlml
        except ImportError:
            self.reason = "no energy meter: habana-pyhlml is not installed"
            return
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # it prints where its driver is missing
                pyhlml.hlmlInit()
            self.driver = _text(pyhlml.hlmlGetDriverVersion())
            handle = _card(pyhlml, index, environ)
        except Exception as error:  # the library raises classes that it makes when it loads
            self.reason = f"no energy meter: habana-pyhlml says {error}"
            return
        if handle is None:
            self.reason = (
                "no energy meter: the machine has several Gaudis; set HABANA_VISIBLE_MODULES to the "
                "number of this one"
            )
            return
        self._read = lambda: int(pyhlml.hlmlDeviceGetTotalEnergyConsumption(handle))

    def millijoules(self) -> int | None:
        """Read the counter, which started when the driver was loaded; None without a meter."""
        if self._read is None:
            return None
        try:
            return self._read()
        except Exception as error:
            self._read, self.reason = None, f"no energy meter: habana-pyhlml says {error}"
            return None


def _card(pyhlml: Any, index: int, environ: Mapping[str, str]) -> Any | None:
    """Return the library's handle of the process's card ``index``; None where that is not told."""
    count = int(pyhlml.hlmlDeviceGetCount())
    handles = [pyhlml.hlmlDeviceGetHandleByIndex(i) for i in range(count)]
    visible = environ.get("HABANA_VISIBLE_MODULES") or environ.get("HLS_MODULE_ID") or ""
    modules = [int(word) for word in re.findall(r"\d+", visible)]
    if index < len(modules):
        for handle in handles:
            if int(pyhlml.hlmlDeviceGetModuleID(handle)) == modules[index]:
                return handle
        return None
    return handles[index] if count == 1 else None


def _text(value: Any) -> str | None:
    text = value.decode() if isinstance(value, bytes) else str(value)
    return text.strip() or None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is the bridge's refusal to allocate."""
    return bool(re.search(r"(?i)allocation failed|out of memory|\boom\b", str(error)))


def out_of_memory(
    what: str, memory: Mapping[str, int], error: BaseException | None = None
) -> BackendError:
    """Return the error for work that found no memory: what was asked and what was free."""
    found = re.search(r"size::\s*(\d+)", str(error)) if error is not None else None
    asked = f" when it asked for {_gib(int(found[1]))}" if found else ""
    return BackendError(
        f"the device ran out of memory {what}{asked}: {_free(memory)}; decode fewer images together "
        "(batch_size) or use a smaller tree"
    )


def cache_too_large(layout: KVLayout, memory: Mapping[str, int]) -> BackendError:
    """Return the error for a cache that does not fit, with the most rows that would."""
    row = layout.nbytes // max(layout.rows, 1)
    fits = min(max(memory["Limit"] - memory["InUse"], 0) // max(row, 1), layout.rows)
    return BackendError(
        f"the device has no room for a key-value cache of {_gib(layout.nbytes)}: {_free(memory)}; at "
        f"most {fits} of its {layout.rows} rows fit (a guided image takes two), so decode fewer "
        "images together (batch_size)"
    )


def _free(memory: Mapping[str, int]) -> str:
    if "Limit" not in memory or "InUse" not in memory:
        return "the bridge does not say how much is free"
    return f"{_gib(memory['Limit'] - memory['InUse'])} of {_gib(memory['Limit'])} are free"


def _gib(size: int) -> str:
    return f"{max(size, 0) / 2**30:.2f} GiB"
