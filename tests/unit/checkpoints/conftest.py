"""A folder of official files."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.official import text_folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder as the authors publish it: text to image, without a drafter."""
    return text_folder(tmp_path / "pretrained_models")
