"""The table of what CUDA's kernels take is whole and its arithmetic right; kernels stay within bounds."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from typing import Any

import kernel_table as tool
import pytest

from lantern_accel_cuda.agreement import KERNELS

TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(
    not TRITON or os.environ.get("TRITON_INTERPRET") == "1",
    reason="the package triton is not installed",
)


@needs_triton
def test_the_committed_table_has_every_kernel_and_no_spill() -> None:
    text = tool.DOCS.read_text(encoding="utf-8")
    lines = text.split(tool.BEGIN)[1].split(tool.END)[0].strip().splitlines()[2:]
    shown = [tuple(cell.strip() for cell in line.split("|")[1:3]) for line in lines]
    assert shown == [(case.kernel, case.shape) for case in tool.cases()], (
        "run python tools/kernel_table.py"
    )
    assert {kernel.partition(",")[0] for kernel, _ in shown} == set(KERNELS)
    assert not any("spilled" in line for line in lines)
    assert sum("times what is needed" in line for line in lines) == len(tool.REPEATED)


#: The most registers on sm_86 and sm_90, and barriers a block, of kernels and what their shapes end with.
BOUNDS = {
    ("few", "shape 0, up to 16 rows"): (96, 96, 2),
    ("few", "shape 0, up to 32 rows"): (138, 166, 2),
    ("few", "gate, shape 1, up to 16 rows"): (64, 64, 2),
    ("few", "rotation, shape 1, up to 16 rows"): (56, 64, 2),
    ("few", "shape 1, up to 16 rows"): (80, 64, 2),
    ("few", "shape 1, up to 32 rows"): (92, 92, 2),
    ("attend", "1 queries, heads of 64"): (80, 102, 10),
    ("attend", "16 queries, heads of 64"): (80, 102, 10),
    ("attend", "32 queries, heads of 64"): (111, 114, 10),
    ("attend", "60 queries, heads of 64"): (190, 148, 2),
    ("attend", "60 queries, heads of 100"): (197, 235, 8),
    ("race", ""): (80, 80, 0),
    ("race, joining", ""): (80, 80, 0),
}


def within(case: Any, generation: int) -> None:
    """Check that a kernel spills nothing, repeats nothing, runs on the card and stays within bounds."""
    taken = tool.compile_case(case, generation)
    assert tool.sound(case, generation, taken), (case.shape, taken)
    assert tool.occupancy(taken, case.warps, generation) > 0
    for (kernel, shape), (ampere, hopper, barriers) in BOUNDS.items():
        if case.kernel == kernel and case.shape.endswith(shape):
            assert taken.registers <= (ampere if generation == 86 else hopper), (case.shape, taken)
            assert taken.barriers <= barriers, (case.shape, taken)


#: Every kernel's function, of which the first shape is compiled in the quick tier.
FUNCTIONS = (
    "rms_norm swiglu rotate_write attend enter guide few filter sample_kernel race_pieces race_join walk"
    " choose advance fresh best_drafts logits weigh settle product tiles together"
)


@needs_triton
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("function", FUNCTIONS.split())
def test_each_kernel_stays_within_its_bounds(function: str) -> None:
    within(next(one for one in tool.cases() if one.function == f"_{function}"), 86)


@needs_triton
@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("generation", [86, 90])
def test_every_shape_stays_within_its_bounds(generation: int) -> None:
    """As the table has it; a quantized product also where one program has all inputs, with a bias."""
    assert {case.function for case in tool.cases()} == {f"_{one}" for one in FUNCTIONS.split()}
    whole = {"WHOLE": True, "BIAS": True}
    for case in tool.cases():
        within(case, generation)
        if whole.keys() <= case.constants.keys() and generation == 86:
            within(replace(case, constants=case.constants | whole), generation)


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
    registers: int, shared: int, warps: int, generation: int, share: float
) -> None:
    taken = tool.Taken(registers, shared, 0)
    assert tool.occupancy(taken, warps, generation) == pytest.approx(share)
