"""What NVIDIA's own tool says of a kernel that Triton compiled for a card."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any


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
