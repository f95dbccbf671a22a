"""The table of what CUDA's kernels take is whole, says that none spills, and its arithmetic is right."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from lantern_accel_cuda.options import NAMES

ROOT = Path(__file__).parents[3]
TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(
    not TRITON or os.environ.get("TRITON_INTERPRET") == "1",
    reason="the package triton is not installed",
)


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location(
        "kernel_table", ROOT / "tools" / "kernel_table.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernel_table"] = module
    spec.loader.exec_module(module)
    return module


@needs_triton
def test_the_committed_table_has_every_kernel_and_no_spill(tool: Any) -> None:
    text = tool.DOCS.read_text(encoding="utf-8")
    lines = text.split(tool.BEGIN)[1].split(tool.END)[0].strip().splitlines()[2:]
    shown = [tuple(cell.strip() for cell in line.split("|")[1:3]) for line in lines]
    assert shown == [(case.kernel, case.shape) for case in tool.cases()], (
        "run python tools/kernel_table.py"
    )
    assert {kernel.partition(",")[0] for kernel, _ in shown} == set(NAMES)
    assert not any("spilled" in line for line in lines)


@needs_triton
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("generation", [86, 90])
def test_the_race_compiles_without_spilling(tool: Any, generation: int) -> None:
    for case in tool.cases():
        if case.kernel.startswith("race"):
            taken = tool.compiled(case, generation)
            assert taken.spilled == 0
            assert taken.registers <= 80


@needs_triton
@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_no_kernel_spills(tool: Any) -> None:
    lines, sound = tool.table()
    assert sound, lines


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "generation", "share"),
    [
        (32, 0, 4, 86, 1.0),  # 12 blocks of 4 warps
        (64, 0, 8, 86, 32 / 48),  # 4 blocks of 8 warps by registers
        (255, 0, 4, 86, 8 / 48),
        (32, 50 * 1024, 8, 86, 8 / 48),  # one block by shared memory, with its reserve
        (32, 0, 1, 90, 0.5),  # 32 blocks at most
    ],
)
def test_occupancy_by_hand(
    tool: Any, registers: int, shared: int, warps: int, generation: int, share: float
) -> None:
    taken = tool.Taken(registers, shared, 0)
    assert tool.occupancy(taken, warps, generation) == pytest.approx(share)
