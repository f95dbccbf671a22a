"""The Triton kernels of filters, draws and the walk down a tree, compiled for a card that is not here."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from support.cubin import assert_nothing_spills, compiled
from support.interpreter import compiles

ROWS = {"SIZE": 16384, "BLOCK": 4096}
#: What a filter of such rows with top-p runs with (``rows.filter_shape``).
FILTER = {"SIZE": 16384, "BLOCK": 8192}
WARPS = {
    **dict.fromkeys(("draw", "choose", "advance", "fresh", "drafted", "logits", "weigh"), 4),
    "settle": 1,
    "filter": 16,
}
FLOATS = "logits scale image_scale penalty out temperature top_p weights uniforms probs q_rows rule_param"
COUNTERS = (
    "place newest root step steps histogram last_length finite report row_keys row_previous"
    " row_tokens"
)
INTEGERS = "token kind tokens first_child num_children tests group"
TYPES = {
    **dict.fromkeys((*FLOATS.split(), "bonus_uniform", "spare", "price"), "*fp32"),
    **dict.fromkeys(INTEGERS.split(), "*i64"),
    **dict.fromkeys(("path", "length", "bonus"), "*i64"),
    **dict.fromkeys(("neighbours", "keys", "codes", "lock"), "*i32"),
    **dict.fromkeys(("best", "q"), "*fp32"),
    **dict.fromkeys(COUNTERS.split(), "*i64"),
    "holds": "*i1",
}
HEAD = {
    **dict.fromkeys(("table", "places", "start", "mid", "head", "bias"), "*fp32"),
    **dict.fromkeys(("known", "seen", "out", "peak", "weights"), "*fp32"),
    **dict.fromkeys(("began", "window", "chosen", "tokens"), "*i64"),
    "least": "fp32",
}
KERNELS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "guide": (
        "sampling",
        {"BRANCHES": 3, "PENALTIES": True, "WHOLE": False, "HELD": True, "BLOCK": 1024},
        {},
    ),
    "filter": (
        "sampling",
        {"TOP_K": True, "TOP_P": True, "P_FIRST": True, "HELD_T": True, "HELD_P": False},
        {"top_p": "fp32"},
    ),
    "draw": ("sampling", {"COUNT": 16, "BLOCK": 512}, {"out": "*i64"}),
    "walk": (
        "accept",
        {"KIND": 2, "AGGREGATE": True, "DRAWN": True, "NEAR": 16, "BLOCK": 2048},
        {},
    ),
    "choose": ("advance", {"HALF": 512, "KEEP": True}, {}),
    "advance": (
        "advance",
        {"WINDOW": True, "RECALL": True, "BLOCK_L": 16, "BLOCK_P": 16, "BLOCK_W": 16},
        {},
    ),
    "fresh": ("advance", {"HALF": 512}, {}),
    "drafted": ("advance", {"BLOCK_L": 16, "BLOCK_P": 16}, {}),
    "logits": ("guess", {"BLOCK_V": 64, "BLOCK_R": 64, "BLOCK_H": 32}, HEAD),
    "weigh": ("guess", {"HALF": 512, "BLOCK_P": 256}, HEAD),
    "settle": ("guess", {"RECALL": True, "BLOCK_P": 16, "BLOCK_W": 16}, HEAD),
}


@compiles
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", KERNELS)
def test_they_compile_for_sm_86_without_spilling(name: str, tmp_path: Path) -> None:
    module, constants, types = KERNELS[name]
    kernel = getattr(importlib.import_module(f"lantern_accel_cuda.kernels.{module}"), f"_{name}")
    rows = FILTER if name == "filter" else ROWS
    whole = {n: v for n, v in rows.items() if n in kernel.arg_names}
    made = compiled(kernel, whole | constants, TYPES | types, num_warps=WARPS.get(name, 8))
    assert made.metadata.shared <= 48 * 1024
    assert_nothing_spills(made, tmp_path)


@compiles
@pytest.mark.parametrize(("warp", "warps"), [(32, 32), (64, 16)])
def test_a_filter_s_program_has_no_more_threads_than_a_device_allows(warp: int, warps: int) -> None:
    from lantern_accel_cuda.kernels.rows import filter_shape

    assert filter_shape(16384, False, warp) == (16384, warps)
    assert all(
        filter_shape(size, cut, warp)[1] * warp <= 1024
        for size in (100, 8192, 65536)
        for cut in (0, 1)
    )
