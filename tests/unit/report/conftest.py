"""Published sizes are projected in one test only: making their shapes takes seconds."""

from __future__ import annotations

import pytest

from lantern_accel.report import projection


@pytest.fixture(autouse=True)
def _no_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projection, "SIZES", ())
