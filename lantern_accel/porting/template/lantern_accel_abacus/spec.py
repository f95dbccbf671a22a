"""The Abacus before it is opened: is it there?"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING

from lantern_accel.device import BackendSpec, Probe

if TYPE_CHECKING:
    from lantern_accel.device import Backend


class Spec(BackendSpec):
    """What `lantern-accel devices` lists; nothing here imports torch or a vendor SDK."""

    name = "abacus"
    summary = "the Abacus"
    api_version = 1
    # Opened only when it is named; above 0, `--device auto` prefers it to the CPU.
    priority = -1

    def prepare(self, environ: MutableMapping[str, str]) -> None:
        """Set what an SDK reads while torch is imported: ``environ.setdefault(...)``."""

    def probe(self) -> Probe:
        """Look for the device without allocating anything on it."""
        # Where there is none: Probe.missing("the driver is not loaded", "install the driver from ...")
        return Probe.of_devices("Abacus, torch's CPU in its place")

    def open(self, index: int, options: Mapping[str, object]) -> Backend:
        """Open device ``index``; it takes no options yet."""
        from lantern_accel.device import check_options
        from lantern_accel_abacus.backend import DeviceBackend

        check_options(
            self.name, options, {}
        )  # {"graph": "off runs every step eagerly"}, for example
        return DeviceBackend(index)
