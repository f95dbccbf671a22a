"""These tests run the libraries' own classes, where they are installed in a release that is supported."""

from __future__ import annotations

import warnings

import pytest


@pytest.fixture(autouse=True)
def _their_own_warnings(recwarn: pytest.WarningsRecorder) -> None:
    """Let the libraries deprecate what they like; ours stay errors."""
    warnings.filterwarnings("ignore", module=r"(transformers|diffusers|torch|torchao)\b")
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
