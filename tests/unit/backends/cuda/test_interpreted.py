"""Runs the tests of Triton kernels under Triton's interpreter, a file in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.interpreter import compiles

HERE = Path(__file__).parent
#: The files, and how many tests pass in each tier, at least: none may be skipped unseen.
FILES = {
    "test_advance.py": (2, 4),
    "test_enter.py": (5, 2),
    "test_few.py": (12, 3),
    "test_kernels.py": (11, 6),
    "test_race.py": (6, 4),
    "test_rounded.py": (25, 8),
    "test_tiles.py": (11, 6),
    "test_sampling_kernels.py": (25, 9),
}


def run(file: str, tier: str) -> int:
    """Run a file's tests of a tier; return how many passed."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        tier,
        "-p",
        "no:cacheprovider",
        str(HERE / file),
    ]
    done = subprocess.run(
        [*command, "-o", "addopts=--strict-markers --import-mode=importlib"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=HERE.parents[3],
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    return int(passed.group(1)) if passed else 0


@compiles
@pytest.mark.parametrize("file", FILES)
def test_kernels_compute_what_the_reference_does(file: str) -> None:
    assert run(file, "not long") >= FILES[file][0]


@compiles
@pytest.mark.long
@pytest.mark.parametrize("file", FILES)
def test_further_cases_do_as_well(file: str) -> None:
    assert run(file, "long") >= FILES[file][1]
