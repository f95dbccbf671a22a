"""The device that every test runs on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lantern_accel.device import Backend, open_backend


@pytest.fixture(scope="session")
def backend() -> Iterator[Backend]:
    """Return the opened Abacus."""
    with open_backend("abacus") as opened:
        yield opened
