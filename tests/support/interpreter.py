"""Marks tests of Triton kernels: interpreted on host memory, or compiled for a card that is not here.

The interpreter must be chosen before Triton is imported, so interpreted tests run in a process of their
own: ``test_interpreted.py`` starts their files again with ``TRITON_INTERPRET=1``. It cannot multiply
bfloat16 (it takes the raw bits), so that dtype is only compiled.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest

TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = TRITON and os.environ.get("TRITON_INTERPRET") == "1"
REASON = "the package triton is not installed"

interpreted = pytest.mark.skipif(
    not INTERPRETED,
    reason="runs in a process of its own with TRITON_INTERPRET=1" if TRITON else REASON,
)
compiles = pytest.mark.skipif(not TRITON or INTERPRETED, reason=REASON)


def _mend() -> None:
    """Let the interpreter of Triton 3.6 work with NumPy 2.4, which gives no number of an array of one."""
    from triton.runtime import interpreter

    patched = interpreter._patch_lang_tensor

    def with_numbers(tensor: Any, scope: Any) -> None:
        patched(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = with_numbers


if INTERPRETED:
    _mend()
