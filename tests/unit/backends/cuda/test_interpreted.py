"""Runs the tests of Triton kernels under Triton's interpreter, in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.interpreter import compiles

HERE = Path(__file__).parent
#: The files, and how many tests pass in each tier, at least: none may be skipped unseen.
FILES = {
    "test_agreement.py": (10, 26),
    "test_few.py": (8, 8),
    "test_kernels.py": (7, 8),
    "test_race.py": (3, 3),
    "test_rounded.py": (5, 22),
    "test_sampling_kernels.py": (12, 12),
    "test_tiles.py": (5, 11),
    "test_steps.py": (0, 4),
}
#: A process takes seconds before its first test, so that files share one; two processes serve two cores.
SHARES = [list(FILES)[::2], list(FILES)[1::2]]


def run(files: list[str], tier: str) -> Counter[str]:
    """Run files' tests of a tier; return how many passed, by file."""
    command = [sys.executable, "-m", "pytest", "-v", "-m", tier, "-p", "no:cacheprovider"]
    done = subprocess.run(
        [
            *command,
            *("-o", "addopts=--strict-markers --import-mode=importlib"),
            *(str(HERE / file) for file in files),
        ],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=HERE.parents[3],
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return Counter(re.findall(r"(test_\w+\.py)::.* PASSED", done.stdout))


@compiles
@pytest.mark.parametrize("files", SHARES, ids=" ".join)
def test_kernels_compute_what_the_reference_does(files: list[str]) -> None:
    passed = run(files, "not long")
    assert all(passed[file] >= FILES[file][0] for file in files), passed


@compiles
@pytest.mark.long
@pytest.mark.parametrize("files", SHARES, ids=" ".join)
def test_further_cases_do_as_well(files: list[str]) -> None:
    passed = run(files, "long")
    assert all(passed[file] >= FILES[file][1] for file in files), passed
