"""What a check returns or raises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lantern_accel.device.backend import Backend


@dataclass(frozen=True)
class Measured:
    """A check that passed: what it looked at, and its largest error where it compared numbers."""

    detail: str = ""
    error: float | None = None
    tolerance: float | None = None


class Failed(Exception):
    """A check that failed, with the reason a backend author needs."""

    def __init__(self, message: str, **figures: float) -> None:
        super().__init__(message)
        self.figures = figures


class NotApplicable(Exception):
    """A check that says nothing about this backend, with the reason."""


class NeedsCard(NotApplicable):
    """A check that a simulated device cannot answer."""

    def __init__(self, what: str) -> None:
        super().__init__(f"needs a card: {what}")


class _Now:
    """What is being checked at this moment, in words."""

    words = ""


def doing(what: str) -> None:
    """Say what a check does now: told where it takes long, is stopped, or raises."""
    _Now.words = what


def doing_now() -> str:
    """Return what was said last."""
    return _Now.words


def on_card(backend: Backend, what: str) -> None:
    """Raise :class:`NeedsCard` on a simulated device, which cannot show ``what``."""
    if backend.simulated:
        raise NeedsCard(what)


def within(error: float, tolerance: float, what: str) -> Measured:
    """Pass where ``error <= tolerance``; a NaN fails."""
    if not error <= tolerance:
        raise Failed(f"{what} is off", error=error, tolerance=tolerance)
    return Measured(what, error, tolerance)
