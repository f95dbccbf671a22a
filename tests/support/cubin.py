"""Kernels that Triton compiles for a card that is not here, and what NVIDIA's own tool says of them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def compiled(
    kernel: Any,
    constants: dict[str, Any],
    types: dict[str, str],
    whole: Iterable[str] = (),
    generation: int = 86,
    **options: int,
) -> Any:
    """Compile a kernel; arguments that ``types`` leaves out are integers.

    Tensors begin at multiples of 16 bytes, and ``whole`` are multiples of 16, as a launch finds out: what
    is compiled is what runs.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    aligned = [n for n in names if n not in constants and types.get(n, "").startswith("*")]
    source = ASTSource(
        fn=kernel,
        signature={n: "constexpr" if n in constants else types.get(n, "i32") for n in names},
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in (*aligned, *whole)},
    )
    return triton.compile(source, target=GPUTarget("cuda", generation, 32), options=options)


def assert_nothing_spills(made: Any, folder: Path) -> None:
    """Check that no register of a compiled kernel spills, where Triton brings the tool that tells."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.is_file():
        return
    file = folder / "kernel.cubin"
    file.write_bytes(made.asm["cubin"])
    command = [str(tool), "--dump-resource-usage", str(file)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "STACK:0 " in said, f"registers spill: {said}"
