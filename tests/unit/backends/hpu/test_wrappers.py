"""The vendor's wrappers of fused kernels, on files of the vendor's form."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lantern_accel_hpu.software import wrappers

ROOT = Path(__file__).parents[4]

#: As the vendor's wrapper: who leaves out the mode of recomputing has it asked for.
SDPA = """
import habana_frameworks.torch.hpu as ht
import torch

class FusedSDPA(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask=None, dropout=0.0, causal=False, scale=None, softmax="None",
                recompute=None):
        if recompute is None:
            recompute = ht.recompute_sdp_enabled()
        return torch.ops.hpu.sdpa_recomp_fwd(
            q, k, v, mask, dropout, scale, causal, False, softmax.lower(), None, "left")[0]
"""
NORM = """
import torch

class FusedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gamma, eps):
        return torch.ops.hpu.rms_norm(x, gamma, eps)[0]
"""
ROTARY = """
from enum import Enum
import torch

class RotaryPosEmbeddingMode(Enum):
    BLOCKWISE = 0
    PAIRWISE = 1

def apply_rotary_pos_emb(p, cos, sin, ids=None, offset=0, mode=RotaryPosEmbeddingMode.BLOCKWISE):
    return torch.ops.hpu.rotary_pos_embedding(p.float(), sin, cos, ids, offset, mode.value)
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for path, text in (
        ("kernels/FusedSDPA", SDPA),
        ("kernels/RotaryPosEmbeddingHelper", ROTARY),
        ("normalization/FusedRMSNorm", NORM),
    ):
        file = tmp_path / "python_packages/habana_frameworks/torch/hpex" / f"{path}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def run(*words: object, before: str = "pass") -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.argv = sys.argv[1:]; {before}; import runpy; "
    code += "runpy.run_module('lantern_accel_hpu.software.wrappers', run_name='__main__')"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
    return subprocess.run(
        [sys.executable, "-c", code, "wrappers", *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )


@pytest.mark.long
def test_the_wrappers_are_called_as_they_want_to_be(clone: Path) -> None:
    done = run(clone)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("attention", "norm", "rotary", "traced"):
        assert f"passed: kernels.{name}" in done.stdout
    left_out = "import lantern_accel_hpu.kernels as k; k.recomputes = lambda queries: None"
    done = run(clone, before=left_out)
    assert done.returncode == 2
    assert "failed: kernels.traced" in done.stdout


def test_a_folder_that_is_no_clone_is_told(tmp_path: Path) -> None:
    assert wrappers.main([str(tmp_path)]) == 2
