"""Gaudi before it is opened."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_accel.spec import BackendSpec, Probe

if TYPE_CHECKING:
    from lantern_accel.backend import Backend

PCI_VENDOR = "0x1da3"
"""Habana Labs; /sys/class/accel also lists other makers' accelerators."""


class Spec(BackendSpec):
    """Intel Gaudi, which torch drives as ``hpu`` through Habana's bridge."""

    name = "hpu"
    summary = "Intel Gaudi accelerators"
    api_version = 1
    priority = 30

    def prepare(self, environ: MutableMapping[str, str]) -> None:
        """Choose eager mode with torch.compile: lazy mode is no longer developed.

        The bridge reads the variable when it is loaded, which may be while torch is imported.
        """
        environ.setdefault("PT_HPU_LAZY_MODE", "0")

    def probe(self) -> Probe:
        """Look for the bridge and the driver's devices without importing the bridge."""
        if importlib.util.find_spec("habana_frameworks") is None:
            return Probe.missing(
                "habana_frameworks is not installed",
                "install it by working in Intel's Gaudi PyTorch Docker image, which brings "
                "torch and habana-torch-plugin",
            )
        devices = _devices()
        if not devices:
            return Probe.missing(
                "habana_frameworks is installed but the driver shows no Gaudi",
                "check that hl-smi lists one and that the container was started with "
                "--runtime=habana and HABANA_VISIBLE_DEVICES=all",
            )
        return Probe.found(*devices)

    def open(self, index: int, options: Mapping[str, Any]) -> Backend:
        """Import Habana's bridge and open Gaudi ``index``; there are no options."""
        from lantern_accel.backend import check_options
        from lantern_accel_hpu.backend import DeviceBackend

        check_options(self.name, options, {})
        return DeviceBackend(index)


def _devices(root: Path = Path("/")) -> list[str]:
    """List the Gaudis the driver shows: /dev/accel/accelN, or /dev/hlN before driver 1.13."""
    found = []
    for node in sorted((root / "dev/accel").glob("accel[0-9]*")):
        vendor = root / "sys/class/accel" / node.name / "device/vendor"
        with contextlib.suppress(OSError):
            if vendor.read_text().strip() != PCI_VENDOR:
                continue
        found.append(f"Gaudi at /dev/accel/{node.name}")
    if found:
        return found
    return [f"Gaudi at /dev/{node.name}" for node in sorted((root / "dev").glob("hl[0-9]*"))]
