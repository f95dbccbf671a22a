"""Scratch memory of the native kernels: a call below takes none of its caller's."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lantern_accel_cpu.native import build

PROGRAM = r"""
#include "native.h"
#include <stdio.h>
#include <string.h>

// Takes more at every depth, writes all of it, and looks whether the callers' bytes are still theirs.
static bool nested(int depth, size_t size) {
    Scratch scratch;
    unsigned char *one = scratch.take<unsigned char>(size), *two = scratch.take<unsigned char>(size);
    if ((size_t)one % 64 || (size_t)two % 64) return false;
    memset(one, depth, size);
    memset(two, depth + 100, size);
    if (depth && !nested(depth - 1, size * 2)) return false;
    for (size_t i = 0; i < size; ++i)
        if (one[i] != depth || two[i] != depth + 100) return false;
    return true;
}

static void work(void* self, int, int chunk) {
    if (!nested(6, 100 + size_t(chunk) * 1000)) *(bool*)self = false;
}
static int chunks(void*, int) { return 64; }

int main() {
    bool right = nested(8, 1000);
    void* first;
    {
        Scratch scratch;
        first = scratch.take<char>(1 << 20);
    }
    Scratch scratch;
    bool kept = scratch.take<char>(1 << 20) == first;
    pool_resize(3);
    pool_run(Job{&right, work, nullptr, chunks, 2}, false);
    pool_resize(2);  // ends the threads of before, and what they hold
    pool_run(Job{&right, work, nullptr, chunks, 2}, false);
    printf("%d %d\n", right, kept);
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = build.compiler()
    if compiler is None or build.family() is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("scratch")
    (folder / "main.cpp").write_text(PROGRAM)
    sources = [str(folder / "main.cpp"), str(build.HERE / "pool.cpp")]
    made = folder / "main"
    call = [compiler, "-std=c++17", "-O1", f"-I{build.HERE}", *sources, "-pthread", "-o", str(made)]
    subprocess.run(call, check=True, capture_output=True, text=True)
    return made


def test_nested_calls_keep_their_callers_memory(program: Path) -> None:
    """What is asked for below, more at every depth, overwrites and frees nothing above it."""
    right, kept = subprocess.run(
        [program], check=True, capture_output=True, text=True, timeout=60
    ).stdout.split()
    assert right == "1"
    assert kept == "1"  # given back, and taken again
