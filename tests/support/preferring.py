"""Lets every device of a class be used otherwise for a test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lantern_accel.device.backend import Backend


def prefer(monkeypatch: pytest.MonkeyPatch, kind: type[Backend], **changes: Any) -> None:
    """Open devices of ``kind`` with these preferences changed."""
    sound = kind.__init__

    def init(self: Backend, *args: Any, **kwargs: Any) -> None:
        sound(self, *args, **kwargs)
        self.preferences = replace(self.preferences, **changes)

    monkeypatch.setattr(kind, "__init__", init)
