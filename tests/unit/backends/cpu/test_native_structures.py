"""What ctypes reads from the header is what the compiler makes of it."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
from support import native

from lantern_accel_cpu.native import build, structures

NAMES = sorted(structures.STRUCTURES)


@native.needs_native
def test_sizes_and_offsets_are_the_compilers(tmp_path: Path) -> None:
    compiler = build.compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    lines = ['#include "native.h"', "#include <stdio.h>", "int main() {"]
    want = []
    for name in NAMES:
        made = structures.STRUCTURES[name]
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        want.append(f"{name} {ctypes.sizeof(made)}")
        for field in made._fields_:
            lines.append(f'printf("{name}.{field[0]} %zu\\n", offsetof({name}, {field[0]}));')
            want.append(f"{name}.{field[0]} {getattr(made, field[0]).offset}")
    source, program = tmp_path / "sizes.cpp", tmp_path / "sizes"
    source.write_text("\n".join([*lines, "}"]))
    given = [compiler, "-std=c++17", "-Wno-invalid-offsetof", f"-I{build.HERE}", str(source)]
    subprocess.run([*given, "-o", str(program)], check=True, timeout=120)
    found = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    assert found.splitlines() == want
