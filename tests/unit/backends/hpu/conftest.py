"""A process in which nobody chose anything of a Gaudi, and no card was opened."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from unittest import mock

import pytest

from lantern_accel_hpu import cards, environment

CHOSEN = re.compile("PT_|GC_|HABANA_|HLS_|LANTERN_HPU_|GAUDI2_|ENABLE_EXP|TORCH_DEVICE_BACKEND")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin with no choice of a user's, and leave none of the test's behind."""
    monkeypatch.setattr(environment, "_ours", {})
    monkeypatch.setattr(environment, "_settled", [])
    monkeypatch.setattr(cards, "_taken", [])
    monkeypatch.setattr(cards, "_before", {})
    kept = {name: value for name, value in os.environ.items() if not CHOSEN.match(name)}
    with mock.patch.dict(os.environ, kept, clear=True):
        yield
