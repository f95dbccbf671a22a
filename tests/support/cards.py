"""Doubles of a card that fails: at open, at its first allocation, at capture, or altogether in use.

One that ``captures nothing`` works otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lantern_accel.device import plugins
from lantern_accel.device.backend import Backend, DeviceFacts
from lantern_accel.device.capture import Replay
from lantern_accel.device.entry_points import Offers
from lantern_accel.device.spec import BackendSpec, Probe
from lantern_accel.errors import BackendError, NotCapturableError

GONE = "card: operation not supported on this generation"


class Card(Backend):
    """A card that computes as the reference does, until it fails at ``fails``.

    It explains its errors, except those of ``any step``.
    """

    name, version = "card", "1.0"

    def __init__(self, fails: str) -> None:
        super().__init__(torch.device("cpu"))
        self.fails, self.closed = fails, 0

    def facts(self) -> DeviceFacts:
        return DeviceFacts(backend="card", device="card:0", name="Card", torch=torch.__version__)

    def synchronize(self) -> None:
        if self.fails == "first allocation":
            raise RuntimeError(GONE)

    def capture(self, step: Callable[[], None], name: str = "step") -> Replay:
        if self.fails == "capture":
            raise RuntimeError(GONE)
        if self.fails == "captures nothing":
            raise NotCapturableError(f"the {name} waits for the host")
        if self.fails == "use":

            def fail() -> None:
                raise RuntimeError(GONE)

            return Replay(fail)
        return super().capture(step, name)

    def linear(self, *given: Any, **more: Any) -> Any:
        if self.fails == "any step":
            raise RuntimeError(GONE)
        return super().linear(*given, **more)

    def explain(self, error: Exception) -> BackendError | None:
        if GONE in str(error) and self.fails != "any step":
            return BackendError(f"the card is too old ({error}); use another")
        return None

    def close(self) -> None:
        self.closed += 1


class CardSpec(BackendSpec):
    """The card, preferred to every other device."""

    name, summary, api_version, priority = "card", "a double", 1, 99

    def __init__(self, fails: str) -> None:
        self.fails = fails
        self.opened: list[Card] = []

    def probe(self) -> Probe:
        return Probe.of_devices("Card")

    def open(self, index: int, options: Any) -> Backend:
        if self.fails == "open":
            raise RuntimeError(GONE)
        self.opened.append(Card(self.fails))
        return self.opened[-1]


def install(monkeypatch: pytest.MonkeyPatch, fails: str) -> CardSpec:
    """Put the card next to the CPU for the length of a test."""
    spec = CardSpec(fails)
    found = Offers({"card": spec, "cpu": plugins.backend_specs()["cpu"]})
    monkeypatch.setattr(plugins, "load_plugins", lambda: found)
    return spec
