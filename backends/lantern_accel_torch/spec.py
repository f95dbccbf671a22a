"""torch's accelerator before it is opened."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from lantern_accel.device.spec import BackendSpec, Probe
from lantern_accel_torch.options import Options

if TYPE_CHECKING:
    from lantern_accel.device.backend import Backend
    from lantern_accel_torch.accelerator import Accelerator

#: Vendors' packages that torch loads while it is imported.
AUTOLOAD = "torch.backends"


class Spec(BackendSpec):
    """Whatever device torch has and no other backend claims; users write torch's name for it."""

    name = "torch"
    summary = "any other device that torch knows: Apple mps, Intel xpu, a vendor's own"
    api_version = 1
    scheduled_as = "GPU"
    priority = 5
    aliases = ("gpu", "mps", "xpu")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()

    def answers(self, word: str) -> bool:
        """A vendor's name for its device is known once torch is there; import it where one may be."""
        if word in self.aliases:
            return True
        if "torch" not in sys.modules and not importlib.metadata.entry_points(group=AUTOLOAD):
            return False
        found = _find()
        return not isinstance(found, str) and found.type == word

    def configure(self, options: Mapping[str, Any]) -> Spec:
        """Return the specification with ``check`` set: it changes whether the device may be used."""
        return Spec(Options.read(options)) if options else self

    def prepare(self, environ: MutableMapping[str, str]) -> None:
        """Set nothing: torch and its vendors read what they need."""

    def probe(self) -> Probe:
        """Ask torch for its accelerator; a device that failed its self-check is not available."""
        from lantern_accel_torch import selfcheck

        found = _find()
        if isinstance(found, str):
            return Probe.missing(found, "install a torch build for your device (pytorch.org)")
        if claimed := _own_backend(found.type):
            return Probe.missing(f"torch's accelerator is {found.type}, which {claimed} serves")
        if self.options.check == "on":
            verdict = selfcheck.load_verdict(selfcheck.key_of(found, 0))
            if verdict is not None and not verdict.passed:
                return Probe.missing(
                    f"{found.type} failed its self-check on this machine: {verdict.failed}",
                    "update torch or the driver, repeat it with --option check=again, or see the whole "
                    f"list with `lantern-accel conform {self.name} --option check=off`",
                )
        return Probe.of_devices(*(f"{found.type}: {found.name(i)}" for i in range(found.count)))

    def open(self, index: int, options: Mapping[str, Any]) -> Backend:
        """Open device ``index`` after its self-check, which runs once per machine, torch and driver.

        Raises BackendError with the check that failed; recorded steps that fail are not used. Options:
        see :mod:`lantern_accel_torch.options`.
        """
        from lantern_accel.errors import BackendError
        from lantern_accel_torch import selfcheck
        from lantern_accel_torch.backend import DeviceBackend

        chosen = Options.read(options)
        found = _find()
        if isinstance(found, str):
            raise BackendError(f"device {self.name!r} is not available: {found}")
        backend = DeviceBackend(index, found)
        backend.capture_asked = chosen.capture_asked
        verdict = None
        if chosen.check != "off":
            key = selfcheck.key_of(found, index)
            verdict = selfcheck.load_verdict(key) if chosen.check == "on" else None
            verdict = verdict or selfcheck.examine(backend, key)
        if verdict is not None and not verdict.passed:
            backend.close()
            raise BackendError(
                f"{backend.device} failed its self-check: {verdict.failed}; use another device, or "
                "--option check=off to use it all the same"
            )
        if not chosen.capture:
            backend.record_steps(unless="the option capture=off asks for it")
        elif verdict is not None and verdict.not_recorded:
            failed = f"recorded steps failed the self-check ({verdict.not_recorded})"
            backend.record_steps(unless=failed)
        return backend


def _find() -> Accelerator | str:
    from lantern_accel_torch.accelerator import find

    return find()


def _own_backend(kind: str) -> str:
    """Name the backend that a kind of device has of its own; "" where there is none."""
    from lantern_accel.device.plugins import backend_specs

    others = [one for one in backend_specs().values() if not isinstance(one, Spec)]
    claims = (one.name for one in others if kind == one.name or kind in one.aliases)
    name = next(claims, "")
    return f"the backend {name!r}" if name else ""
