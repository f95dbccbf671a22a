"""The published sizes have the published numbers of parameters."""

from __future__ import annotations

import pytest
import torch

from lantern_accel.families.llamagen.model import LlamaGenConfig, LlamaGenGPT
from lantern_accel.families.llamagen.official import published_manifest
from lantern_accel.families.registry import entry


def config_of(name: str) -> LlamaGenConfig:
    return published_manifest(entry(name)).target


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("llamagen-b-256", 110.888448),
        ("llamagen-l-384", 342.9),
        ("llamagen-xl-384", 774.7),
        ("llamagen-t2i-stage1", 777.7),
        ("llamagen-xxl-384", 1411.0),
        ("llamagen-3b-384", 3097.0),
    ],
)
def test_parameters(name: str, millions: float) -> None:
    with torch.device("meta"):
        count = sum(p.numel() for p in LlamaGenGPT(config_of(name)).parameters())
    assert count / 1e6 == pytest.approx(millions, abs=0.5)
