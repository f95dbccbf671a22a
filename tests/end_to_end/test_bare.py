"""README's first command where there is hardly anything: no compiler, no home, no cache of before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from lantern_accel_cpu.native import build


@pytest.mark.long
@pytest.mark.skipif(build.PREBUILT.is_file(), reason="the kernels are installed, compiled")
def test_the_first_command_draws_in_a_bare_environment(tmp_path):
    nothing = tmp_path / "bin"
    nothing.mkdir()
    environment = {
        "PATH": str(nothing),
        "LANTERN_ACCEL_CACHE": "/proc/none",
        "OMP_NUM_THREADS": "1",
    }
    code = "import sys; from lantern_accel.cli import main; sys.exit(main(sys.argv[1:]))"
    words = ["generate", "red heart", "--seed", "7", "-o", "heart.png"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no C++ compiler was found") == 1
    assert done.stderr.count("LANTERN_ACCEL_CACHE") == 1 and "requires_grad" not in done.stderr
    with Image.open(Path(tmp_path, "heart.png")) as picture:
        assert picture.text["seed"] == "7"
