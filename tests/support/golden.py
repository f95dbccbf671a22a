"""Golden tensors: safetensors files with their bytes shuffled by significance, then lzma."""

from __future__ import annotations

import functools
import json
import lzma
from pathlib import Path

import numpy as np
from safetensors.torch import load as parse
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent / "golden"


def _payload(name: str) -> bytes:
    packed = lzma.decompress((ROOT / f"{name}.safetensors.xz").read_bytes())
    return np.frombuffer(packed, dtype=np.uint8).reshape(4, -1).T.tobytes()


@functools.cache
def golden(name: str) -> dict[str, Tensor]:
    """Return the tensors of ``tests/golden/<name>.safetensors.xz``; do not write to them."""
    return parse(_payload(name))


def golden_metadata(name: str) -> dict[str, str]:
    """Return the strings that were stored with the tensors."""
    raw = _payload(name)
    size = int.from_bytes(raw[:8], "little")
    found: dict[str, str] = json.loads(raw[8 : 8 + size]).get("__metadata__", {})
    return found
