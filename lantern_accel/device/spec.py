"""Describes a backend before its device is opened; imports neither torch nor an SDK.

A plug-in's first module needs only this one. Some vendors load their SDK while torch is imported
and read the environment then, so a backend must be able to speak before torch is there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING

from pydantic import model_validator

from lantern_accel.errors import DeviceRequestError
from lantern_accel.records import Frozen

if TYPE_CHECKING:
    from lantern_accel.device.backend import Backend

API_VERSION = 1
"""Version of the backend interface; a backend written for another version is reported, not loaded."""


class Probe(Frozen):
    """The result of a backend's search for its device."""

    available: bool
    count: int = 0
    devices: tuple[str, ...] = ()
    """A short description of each device, such as its model name and memory."""
    reason: str = ""
    """Why the device is not available, as the end of the sentence 'not available: ...'."""
    install: str = ""
    """An instruction that makes the device available, without a final stop."""
    unusable: bool = False
    """True for a device that is present but unusable: ``auto`` warns before it takes the next one."""

    @model_validator(mode="after")
    def _check_count(self) -> Probe:
        if self.available and not self.count == len(self.devices) > 0:
            raise ValueError(f"an available device needs a description each, got {self.devices}")
        return self

    @classmethod
    def of_devices(cls, *devices: str) -> Probe:
        """Return a report of the present devices, in index order."""
        return cls(available=True, count=len(devices), devices=devices)

    @classmethod
    def missing(cls, reason: str, install: str = "") -> Probe:
        """Return a report that there is no device, why, and what to install."""
        return cls(available=False, reason=reason, install=install)

    @classmethod
    def broken(cls, reason: str, install: str = "") -> Probe:
        """Return a report of an unusable device, why, and what to do."""
        return cls(available=False, reason=reason, install=install, unusable=True)


class BackendSpec(ABC):
    """A backend before it is opened: its name, the search for its device, and how to open it.

    Subclasses set ``name`` (a lower-case identifier, what the user writes as the device),
    ``summary`` (one line) and ``api_version`` (the number this backend was written for, written
    out, so that a change of the backend interface is noticed).
    """

    name: str
    summary: str
    api_version: int

    priority: int = 0
    """``device="auto"`` opens the available backend with the highest priority; negative: never."""

    aliases: tuple[str, ...] = ()
    """Words for such a device, such as ``("gpu",)``; each opens the best available backend with it."""

    also_known_as: tuple[str, ...] = ()
    """Words, such as a vendor's name, that an error answers with this backend's name."""

    variants: tuple[Mapping[str, object], ...] = ({},)
    """Sets of options worth comparing on this device, the default first (``tools/on_device.py``)."""

    scheduled_as: str = "CPU"
    """The device's name in cluster schedulers."""

    seconds_to_probe: float = 10.0
    """Time limit of :meth:`probe` in seconds. A device without an answer in time is skipped."""

    def answers(self, word: str) -> bool:
        """Optional: return whether ``word``, which is not a backend's name, means this one's device.

        Asked only where no backend has that name. The reference looks into :attr:`aliases`.
        """
        return word in self.aliases

    def configure(self, options: Mapping[str, object]) -> BackendSpec:
        """Optional: return the specification for these options of :meth:`open`.

        Called before :meth:`prepare` where the device is asked for by name, so that an option can
        change the environment or what is looked for. Raises
        :class:`~lantern_accel.errors.BackendError` for an option it does not know.
        """
        return self

    def prepare(self, environ: MutableMapping[str, str]) -> None:  # noqa: B027, optional
        """Optional: set environment defaults that must be there before torch or the SDK is.

        Called before :meth:`probe`. Leave what the user set: use ``environ.setdefault``.
        """

    def processes(self, index: int) -> Sequence[Mapping[str, str]] | None:
        """Optional: return the environment of each process that may hold device ``index`` at one time.

        Asked after :meth:`probe`, by what starts several. None, the reference: any number of processes.
        """
        return None

    @abstractmethod
    def probe(self) -> Probe:
        """Look for the device without allocating anything on it; never raises."""

    @abstractmethod
    def open(self, index: int, options: Mapping[str, object]) -> Backend:
        """Open device ``index``, ``0 <= index < probe().count``; import the SDK here.

        Raises :class:`~lantern_accel.errors.BackendError` for an option it does not know.
        """


def check_options(backend: str, options: Mapping[str, object], known: Mapping[str, str]) -> None:
    """Raise DeviceRequestError for an option that ``known`` (name to meaning) does not list."""
    for name in options:
        if name not in known:
            listing = "; ".join(f"{key}: {meaning}" for key, meaning in known.items())
            raise DeviceRequestError(
                f"backend {backend!r} has no option {name!r}; it takes {listing or 'none'}"
            )
