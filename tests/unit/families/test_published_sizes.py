"""The published models have the published numbers of parameters, before anything is fetched."""

from __future__ import annotations

import pytest
import torch

from lantern_accel.memory.footprint import weight_bytes
from lantern_accel.models.locate import known_manifest

#: Of LlamaGen and Janus, and of the two MoVQ tokenizers; Emu3's has 64 statistics next to its parameters.
VQ, LUMINAS, EMU3S = 71.9e6, 270_669_103, 270_740_287 + 64
#: The head of Lumina-mGPT 2.0 has the rows of codes and of the row end alone.
LUMINA2 = 7_880_273_920 - (171_385 - 16_384 - 1) * 4096


@pytest.mark.parametrize(
    ("name", "target", "within", "vq"),
    [
        ("llamagen-b-256", 110.888448e6, 5e5, VQ),
        ("llamagen-l-384", 342.9e6, 5e5, VQ),
        ("llamagen-xl-384", 774.7e6, 5e5, VQ),
        ("llamagen-t2i-stage1", 777.7e6, 5e5, VQ),
        ("llamagen-xxl-384", 1411.0e6, 5e5, VQ),
        ("llamagen-3b-384", 3097.0e6, 5e5, VQ),
        ("janus-pro-1b", 1.52e9, 1.5e8, VQ),
        ("janus-1.3b", 1.52e9, 1.5e8, VQ),
        ("janus-pro-7b", 6.7e9, 6.7e8, VQ),
        ("lumina-mgpt-2", LUMINA2, 2**22, LUMINAS),
        ("emu3-gen", 8.49e9, 8.5e8, EMU3S),
    ],
)
def test_parameters(name: str, target: float, within: float, vq: float) -> None:
    manifest = known_manifest(name)
    assert manifest is not None
    counted = weight_bytes(manifest, torch.bfloat16)
    assert counted["target"] / 2 == pytest.approx(target, abs=within)
    assert counted["vq"] / 4 == pytest.approx(vq, rel=1e-2 if vq == VQ else 0)
