"""The null device before it is opened."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from lantern_accel.device.spec import BackendSpec, Probe

if TYPE_CHECKING:
    from lantern_accel.device.backend import Backend


class Spec(BackendSpec):
    """Tensors that have a shape and no data: for shape checks, and to copy a plug-in from."""

    name = "null"
    summary = "shapes and no data, for plug-in authors and shape checks"
    api_version = 1
    priority = -1

    def prepare(self, environ: MutableMapping[str, str]) -> None:
        """Set nothing: there is no device."""

    def probe(self) -> Probe:
        """Always available."""
        return Probe.of_devices("shapes and no data")

    def open(self, index: int, options: Mapping[str, Any]) -> Backend:
        """Open it; there are no options."""
        from lantern_accel.device.spec import check_options
        from lantern_accel_null.backend import DeviceBackend

        check_options(self.name, options, {})
        return DeviceBackend(index)
