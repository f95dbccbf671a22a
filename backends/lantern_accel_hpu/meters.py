"""Measures time between events, and energy, on a Gaudi."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

from lantern_accel.device.backend import Stopwatch
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
    is found by its ``module`` number (see :mod:`lantern_accel_hpu.cards`), else it is the only one.
    """

    def __init__(self, module: int | None = None) -> None:
        self.reason = ""
        self.driver: str | None = None
        self._read: Callable[[], int] | None = None
        try:
            import pyhlml

            with contextlib.redirect_stdout(io.StringIO()):  # it prints where its driver is missing
                pyhlml.hlmlInit()
            driver = pyhlml.hlmlGetDriverVersion()
            text = driver.decode() if isinstance(driver, bytes) else str(driver)
            self.driver = text.strip() or None
            handle = _card(pyhlml, module)
            self._read = lambda: int(pyhlml.hlmlDeviceGetTotalEnergyConsumption(handle))
        except ImportError:
            self.reason = "no energy meter: habana-pyhlml is not installed"
        except Exception as error:  # the library raises classes that it makes when it loads
            self.reason = f"no energy meter: habana-pyhlml says {error}"

    def millijoules(self) -> int | None:
        """Read the counter, which started when the driver was loaded; None without a meter."""
        if self._read is None:
            return None
        try:
            return self._read()
        except Exception as error:
            self._read, self.reason = None, f"no energy meter: habana-pyhlml says {error}"
            return None


def _card(pyhlml: Any, module: int | None) -> object:
    """Return the library's handle of the card ``module``; raises LookupError where it is not known."""
    count = int(pyhlml.hlmlDeviceGetCount())
    handles = [pyhlml.hlmlDeviceGetHandleByIndex(i) for i in range(count)]
    numbers = [int(pyhlml.hlmlDeviceGetModuleID(handle)) for handle in handles]
    fits = [one for one, number in zip(handles, numbers, strict=True) if module in (None, number)]
    if len(fits) == 1:
        return fits[0]
    raise LookupError(
        f"that it has {len(fits)} such Gaudis; set HABANA_VISIBLE_MODULES to the number of this one"
    )
