"""Compile every Triton kernel of the CUDA backend for cards that are not here; write what they take.

``python tools/kernel_table.py`` compiles for sm_86 and sm_90 with the package triton, and writes
registers, shared memory and occupancy into dev/backends.md; of a product also the tensor-core
instructions of a warp and the barriers, for each block that its loop multiplies. It ends with 1 where a
register spills, or where warps repeat each other's instructions. With names of kernels it writes nothing,
and compiles these alone. ``PYTHONPATH=folder python tools/kernel_table.py few attend filter`` compiles
by the Triton of a folder. Nothing runs, and nothing is said about time.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "dev" / "backends.md"
BEGIN, END = "<!-- kernels -->", "<!-- /kernels -->"
#: Of a multiprocessor: warps, blocks, registers, bytes of shared memory.
LIMITS = {86: (48, 16, 65536, 100 * 1024), 90: (64, 32, 65536, 228 * 1024)}
#: Bytes of shared memory that the driver takes of every block.
RESERVED = 1024
CODES = 16384
#: Products of which warps repeat a part, and their multiplications over those that are needed. They take
#: 8 warps, as 4 would spill; on sm_90 these are two groups, and in the first of two products both groups
#: make all 64 rows.
REPEATED = {
    ("attend", "60 queries, heads of 100", 90): 1.5,
    ("tiles", "int6, up to 128 rows", 90): 1.75,
    ("tiles", "int4, up to 128 rows", 90): 1.5,
}

FLOATS = (
    "logits scale image_scale penalty temperature weights uniforms probs q_rows rule_param best part peak"
    " bias known seen total bonus_uniform spare quality_loss cos sin c_out s_out table places start mid"
    " head"
)
INTEGERS = (
    "token kind tokens first_child num_children tests group positions address path length bonus place"
    " newest root step steps histogram last_length finite report row_keys row_previous row_tokens"
    " following began window chosen"
)
TYPES = {
    **dict.fromkeys(FLOATS.split(), "*fp32"),
    **dict.fromkeys(INTEGERS.split(), "*i64"),
    **dict.fromkeys(("neighbours", "keys", "codes", "lock"), "*i32"),
    "mask": "*i8",
    **dict.fromkeys(("holds", "prefix_mask"), "*i1"),
}
HALVES = dict.fromkeys(("x", "weight", "out", "qkv", "q", "cache_k", "cache_v", "q_out"), "*bf16")


@dataclass(frozen=True)
class Case:
    """One kernel at one shape: its module and function, constants, types and options of a launch."""

    kernel: str
    shape: str
    module: str
    function: str
    constants: dict[str, Any]
    types: dict[str, str] = field(default_factory=dict)
    warps: int = 4
    options: dict[str, Any] = field(default_factory=dict)
    aligned: frozenset[str] = frozenset()
    """Numbers that are multiples of 16."""
    multiplied: int = 0
    """Multiplications that a program's products take for a block; 0: there is none."""


def _attention(nodes: int, width: int, single: bool = False) -> Case:
    """Attend in bfloat16, or in single precision, whose products no tensor core makes."""
    from lantern_accel_cuda.kernels import tree_attention

    plan = tree_attention.plan(nodes, 704, width, 40, 4 if single else 2, 82)
    constants = {
        "WIDTH": width, "STORED": -(-width // 8) * 8, "BLOCK_T": plan.block_t,
        "BLOCK_L": plan.block_l, "BLOCK_D": plan.block_d,
    }  # fmt: skip
    types = {**(dict.fromkeys(HALVES, "*fp32") if single else HALVES), "scale": "fp32"}
    shape = f"{nodes} queries, heads of {width}" + (", float32" if single else "")
    made = "attend", shape, "tree_attention", "_attend", constants, types
    aligned = frozenset({"q_row", "q_node", "q_head", "reach", "capacity", "mask_row", "mask_node"})
    block = 0 if single else 2 * plan.block_t * plan.block_l * plan.block_d
    return Case(*made, plan.warps, {"num_stages": tree_attention.STAGES}, aligned, block)


def _few(name: str, after: int, number: int, rows: int) -> Case:
    from lantern_accel_cuda.kernels import few

    chosen = few.SHAPES[number]
    constants = {
        "NORM": after >= 2, "AFTER": after, "WHOLE": False, "WIDTH": 64, "STORED": 64,
        "BLOCK_M": rows, "BLOCK_N": chosen.outputs, "BLOCK_K": chosen.inputs,
    }  # fmt: skip
    types = HALVES | {"gain": "*bf16", "squares": "*fp32", "eps": "fp32"}
    if after == 0:
        types["out"] = "*fp32"
    options = {"num_stages": chosen.stages}
    shape = f"{name}, shape {number}, up to {rows} rows"
    made = "few", shape, "few", "_few", constants, types, chosen.warps, options
    return Case(*made, frozenset({"inputs"}), rows * chosen.outputs * chosen.inputs)


def _filter(size: int, cut: bool) -> Case:
    from lantern_accel_cuda.kernels import rows

    block, warps = rows.filter_shape(size, cut)
    asked = {"TOP_K": True, "TOP_P": cut, "P_FIRST": cut, "HELD_T": True, "HELD_P": False}
    shape = f"{size:,} codes, top-k" + (" and top-p" if cut else "")
    constants = {"SIZE": size, "BLOCK": block, **asked}
    types = {"top_p": "fp32", "out": "*fp32"}
    return Case("filter", shape, "sampling", "_filter", constants, types, warps)


def _rounded_case(name: str, bits: int, rows: int) -> Case:
    from lantern_accel_cuda.kernels import rounded, tiles

    number = "*fp32" if bits == 8 else "*bf16"
    types = HALVES | {"codes": "*i8" if bits == 8 else "*u8", "step": number, "offset": number}
    types |= {"bias": "*bf16", "out": "*fp32", "part": "*fp32"}
    constants = {"BITS": bits, "BIAS": False, "WHOLE": False, "BLOCK_M": rows}
    shape, aligned = f"{name}, up to {rows} rows", frozenset({"ld", "ld_x", "inputs", "outputs"})
    if rows <= rounded.ROWS:
        constants["BLOCK_N"], options = rounded.OUTPUTS, {"num_stages": rounded.STAGES}
        made = "rounded", shape, "rounded", "_product", constants, types, rounded.WARPS
    else:
        constants["BLOCK_N"], options = tiles.OUTPUTS, {"num_stages": tiles.STAGES}
        types["out"] = "*bf16"  # as in a layer
        made = "tiles", shape, "tiles", "_tiles", constants, types, tiles.warps_of(rows)
    return Case(*made, options, aligned, 64 * rows * constants["BLOCK_N"])


def cases() -> list[Case]:
    """Return every kernel at the shapes of LlamaGen-XL and 3B, or with all that it can do."""
    walk = {"KIND": 2, "AGGREGATE": True, "DRAWN": True, "NEAR": 16}
    from lantern_accel_cuda.kernels.fused import HEADS, WARPS

    rotate = {"HEADS": 20, "WIDTH": 64, "STORED": 64, "BLOCK_H": HEADS, "BLOCK_P": 32}
    wide = {"HEADS": 32, "WIDTH": 100, "STORED": 104, "BLOCK_H": HEADS, "BLOCK_P": 64}
    guide = {"BRANCHES": 3, "PENALTIES": True, "WHOLE": False, "HELD": True}
    fused, codes = ("fused", {**HALVES, "eps": "fp32"}), f"{CODES:,} codes"
    plain = {"enable_fp_fusion": False}
    begun = {
        "WIDTH": 1280, "HALF": 32, "HEADS": 20, "BLOCK_D": 2048, "BLOCK_P": 32, "BLOCK_H": 32,
        "BLOCK_L": 1024,
    }  # fmt: skip
    settled = {"RECALL": True, "BLOCK_P": 16, "BLOCK_W": 16}
    floats = {"q": "*fp32", "out": "*fp32", "least": "fp32"}
    window = {"WINDOW": True, "BLOCK_L": 16} | settled
    return [
        Case("rms_norm", "1,280 wide", fused[0], "_rms_norm", {"WIDTH": 1280, "BLOCK": 2048}, fused[1]),
        Case("swiglu", "3,456 wide", fused[0], "_swiglu", {"WIDTH": 3456, "BLOCK": 1024}, fused[1]),
        Case("rotate_write", "20 heads of 64", fused[0], "_rotate_write", rotate, fused[1], WARPS),
        Case("rotate_write", "32 heads of 100", fused[0], "_rotate_write", wide, fused[1], WARPS),
        *(_attention(n, width) for n, width in ((1, 64), (16, 64), (32, 64), (60, 64), (60, 100))),
        _attention(60, 100, single=True),
        Case("enter", "20 heads of 64", "enter", "_enter", begun, {**HALVES, "table": "*bf16"}),
        Case(
            "guide", codes, "sampling", "_guide", {"SIZE": CODES, "BLOCK": 1024} | guide,
            {"out": "*fp32"},
        ),
        *(
            _few(name, after, number, rows)
            for name, after in (
                ("product", 0), ("product, residual", 1), ("norm, product, gate", 2),
                ("norm, product, rotation", 3),
            )
            for number in (0, 1)
            for rows in (16, 32)
        ),
        *(_filter(size, cut) for size in (8192, CODES, 65536) for cut in (False, True)),
        Case(
            "draw", f"{codes}, 16 of them", "sampling", "_sample_kernel",
            {"SIZE": CODES, "COUNT": 16, "BLOCK": 512}, {"out": "*i64"},
        ),
        *(
            Case(
                "race", f"{codes}, {count} of them", "race", "_race_pieces",
                {"SIZE": CODES, "COUNT": count, "HALF": 512}, {}, 4, plain,
            )
            for count in (1, 10)
        ),
        *(
            Case(
                "race, joining", f"{codes}, {count} of them", "race", "_race_join",
                {"SIZE": CODES, "COUNT": count, "BLOCK": 16 * count if count == 1 else 256},
                {"out": "*i64"}, 1,
            )
            for count in (1, 10)
        ),
        Case("accept", codes, "accept", "_walk", {"SIZE": CODES, "BLOCK": 2048} | walk, {}, 8),
        *(
            Case(name, shape, name, function, {"SIZE": CODES} | constants, floats, warps, options)
            for name, shape, function, constants, warps, options in (
                ("advance", f"{codes}, choosing", "_choose", {"HALF": 512, "KEEP": True}, 4, plain),
                ("advance", f"{codes}, a window of 16", "_advance", window, 4, plain),
                ("advance", f"{codes}, drafting", "_fresh", {"HALF": 512}, 4, plain),
                ("advance", f"{codes}, drafted", "_best_drafts", {"BLOCK_L": 16, "BLOCK_P": 16}, 4,
                 plain),
                ("guess", "rank 64", "_logits", {"BLOCK_V": 64, "BLOCK_R": 64, "BLOCK_H": 32}, 4, {}),
                ("guess", f"{codes}, weighing", "_weigh", {"HALF": 512, "BLOCK_P": 256}, 4, plain),
                ("guess", f"{codes}, a window of 16", "_settle", settled, 1, {}),
            )
        ),
        *(
            _rounded_case(name, bits, rows)
            for name, bits in (("int8", 8), ("int6", 6), ("int4", 4)) for rows in (16, 32, 64, 128)
        ),
        Case(
            "rounded, joining", "a bfloat16 result", "rounded", "_together",
            {"BIAS": False, "BLOCK": 1024}, {"out": "*bf16", "bias": "*bf16", "parts": "*fp32"},
        ),
    ]  # fmt: skip


@dataclass(frozen=True)
class Taken:
    """What a compiled kernel takes: registers a thread, bytes of shared memory, of spilled registers.

    Of each block that the loop of a product multiplies: instructions of the tensor cores of a warp, the
    multiplications that those of all warps make over those that are needed, and barriers.
    """

    registers: int
    shared: int
    spilled: int
    products: int = 0
    repeated: float = 0.0
    barriers: int = 0


#: An instruction of the machine code, with its address.
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")


def product(code: str, case: Case) -> tuple[int, float, int]:
    """Return what :class:`Taken` has of a product, from machine code as cuobjdump writes it."""
    lines = [(int(at, 16), text) for at, text in INSTRUCTION.findall(code)]
    loops = list[tuple[int, int, int, int]]()
    for end, text in lines:
        found = re.search(r"\bBRA\b.*\b0x([0-9a-f]+)", text)
        if found is None or (begin := int(found[1], 16)) >= end:
            continue
        body = [text for at, text in lines if begin <= at <= end]
        done = [each for each in map(_count_products, body) if each]
        loops.append((sum(done), -len(body), len(done), sum("BAR.SYNC" in text for text in body)))
    if not case.multiplied or not loops:
        return 0, 0.0, 0
    # What the compiler laid behind a loop jumps back into it: the loop has most of the products.
    warp, _, count, barriers = max(loops)
    return count, case.warps * warp / case.multiplied, barriers


def _count_products(text: str) -> int:
    """Return the multiplications of an instruction of the tensor cores, of one warp; 0 of another."""
    if found := re.search(r"\bHMMA\.168(16|8)\.", text):
        return 16 * 8 * int(found[1])
    if found := re.search(r"\bHGMMA\.64x(\d+)x(\d+)\.", text):
        return 16 * int(found[1]) * int(found[2])  # four warps make the 64 rows
    return 0


def compile_case(case: Case, generation: int) -> Taken:
    """Compile a kernel for a generation of cards (86, 90) and read what it takes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module = importlib.import_module(f"lantern_accel_cuda.kernels.{case.module}")
    kernel = getattr(module, case.function)
    types, names = TYPES | case.types, kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={n: "constexpr" if n in case.constants else types.get(n, "i32") for n in names},
        constexprs={(names.index(n),): value for n, value in case.constants.items()},
        # Tensors begin at multiples of 16 bytes; a launch finds that out by itself.
        attrs={
            (names.index(n),): [["tt.divisibility", 16]]
            for n in names
            if n in case.aligned or (types.get(n, "").startswith("*") and n not in case.constants)
        },
    )
    made = triton.compile(
        source,
        target=GPUTarget("cuda", generation, 32),
        options={"num_warps": case.warps, **case.options},
    )
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(made.asm["cubin"])
        said, code = (
            subprocess.run(
                [str(tool), asked, str(file)], capture_output=True, text=True, check=True
            ).stdout
            for asked in ("--dump-resource-usage", "-sass")
        )
    found = {
        name: int(re.findall(rf"\b{name}:(\d+)", said)[-1]) for name in ("REG", "STACK", "LOCAL")
    }
    spilled = found["STACK"] + found["LOCAL"]
    return Taken(found["REG"], made.metadata.shared, spilled, *product(code, case))


def sound(case: Case, generation: int, taken: Taken) -> bool:
    """Return whether a kernel spills no register and its warps repeat no product."""
    most = REPEATED.get((case.kernel, case.shape, generation), 1.0)
    return not taken.spilled and (not case.multiplied or 1.0 <= taken.repeated <= most)


def occupancy(taken: Taken, warps: int, generation: int) -> float:
    """Return the share of a multiprocessor's warps that a kernel keeps there."""
    most, blocks, registers, shared = LIMITS[generation]
    # Registers are given out 256 at a time, to a warp.
    each = -(-32 * taken.registers // 256) * 256 * warps
    fits = min(blocks, most // warps, registers // each, shared // (taken.shared + RESERVED))
    return fits * warps / most


def table(kernels: Collection[str] = ()) -> tuple[list[str], bool]:
    """Return the lines of the table, of some kernels or all, and whether they are :func:`sound`."""
    names = [f"sm_{generation}" for generation in LIMITS]
    head = " | ".join(f"{name}: registers, shared, occupancy; products, barriers" for name in names)
    lines = [f"| kernel | shape | warps | {head} |", "|---|---|---|" + "---|" * len(names)]
    well = True
    for case in cases():
        if kernels and case.kernel not in kernels:
            continue
        cells = []
        for generation in LIMITS:
            taken = compile_case(case, generation)
            well = well and sound(case, generation, taken)
            share = f"{occupancy(taken, case.warps, generation):.0%}".replace("%", " %")
            kilo = f"{taken.shared / 1024:.1f}".removesuffix(".0")
            cell = f"{taken.registers}, {kilo} KB, {share}"
            if case.multiplied:
                cell += f"; {taken.products}, {taken.barriers}"
            if case.multiplied and taken.repeated != 1:
                cell += f", **{taken.repeated:.1f} times what is needed**"
            cells.append(cell + (f", **{taken.spilled} bytes spilled**" if taken.spilled else ""))
        lines.append(f"| {case.kernel} | {case.shape} | {case.warps} | {' | '.join(cells)} |")
    return lines, well


def main(kernels: Collection[str]) -> int:
    """Write the table into its page, or what is asked for to the terminal."""
    lines, well = table(kernels)
    if kernels:
        print("\n".join(lines))
        return 0 if well else 1
    text = DOCS.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    DOCS.write_text(before + "\n".join([BEGIN, *lines, END]) + after, encoding="utf-8")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
