"""Golden tensors: safetensors files with their bytes shuffled by significance, then lzma.

Random weights are not stored where a seed draws them again to the last bit.
"""

from __future__ import annotations

import functools
import json
import lzma
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as parse
from torch import Tensor, nn

from lantern_accel.checkpoints.loading import fill
from lantern_accel.checkpoints.weights import Checkpoint, HeldFile
from lantern_accel.families.keys import Rule, recipes_of, rename_keys

ROOT = Path(__file__).resolve().parent.parent / "golden"


def _payload(name: str) -> bytes:
    packed = lzma.decompress((ROOT / f"{name}.safetensors.xz").read_bytes())
    return np.frombuffer(packed, dtype=np.uint8).reshape(4, -1).T.tobytes()


def _drawn(recipe: dict[str, Any]) -> dict[str, Tensor]:
    """Draw random weights again, as the recording drew them: ``mean + randn * gain / sqrt(fan)``."""
    generator = torch.Generator().manual_seed(recipe["seed"])
    made = {}
    for name, shape, mean, gain, fan in recipe["tensors"]:
        value = torch.randn(shape, generator=generator) * gain / fan**0.5
        made[name] = value + mean if mean else value
    return made


@functools.cache
def golden(name: str) -> dict[str, Tensor]:
    """Return the tensors of ``tests/golden/<name>.safetensors.xz``; do not write to them."""
    stored = parse(_payload(name))
    recipe = golden_metadata(name).get("drawn")
    if recipe is None:
        return stored
    given = json.loads(recipe)
    drawn = {k: v for k, v in _drawn(given).items() if k not in stored}
    total = sum(float(v.double().abs().sum()) for v in drawn.values())
    # A torch that draws other numbers from this seed would fail every comparison for no fault of ours.
    assert abs(total - given["sum"]) < 1e-6 * given["sum"], f"this torch draws {name} otherwise"
    return {**drawn, **stored}


def golden_metadata(name: str) -> dict[str, str]:
    """Return the strings that were stored with the tensors."""
    raw = _payload(name)
    size = int.from_bytes(raw[:8], "little")
    found: dict[str, str] = json.loads(raw[8 : 8 + size]).get("__metadata__", {})
    return found


def load_into(
    module: nn.Module, tensors: Mapping[str, Tensor], what: str, rules: Iterable[Rule] = ()
) -> None:
    """Fill a module from tensors as from a file of them, in float32."""
    held = HeldFile(Path(what), tensors)
    recipes = recipes_of(rename_keys(tensors, rules))
    cpu = torch.device("cpu")
    fill(module, Checkpoint(held.path, [held]), recipes, dtype=torch.float32, device=cpu, what=what)


def check_pixels(found: torch.Tensor, want: torch.Tensor, value: torch.Tensor) -> None:
    """Compare uint8 pixels with recorded ones; ``value``: the recorded ones before they were rounded.

    Exact, but where a value is so near the next integer's that the tolerance of pixels decides it.
    """
    near = (value - value.round()).abs() < 1e-4 * 127.5
    assert torch.equal(found[~near], want[~near]) and near.float().mean() < 0.05
    assert (found.int() - want.int()).abs().max() <= 1
