"""These tests run the libraries' own classes, where they are installed in a release that is supported."""

from __future__ import annotations

import importlib.util
import sys
import types
import warnings

import pytest

if importlib.util.find_spec("torchvision") is not None:
    try:
        import torchvision  # noqa: F401  # only whether it can be imported is asked
    except RuntimeError:  # built for another torch: these two files register what is not there
        for name in ("torchvision._meta_registrations", "torchvision._autograd_registrations"):
            sys.modules[name] = types.ModuleType(name)


@pytest.fixture(autouse=True)
def _their_own_warnings(recwarn: pytest.WarningsRecorder) -> None:
    """Let the libraries deprecate what they like; ours stay errors."""
    warnings.filterwarnings("ignore", module=r"(transformers|diffusers|torch|torchao)\b")
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
