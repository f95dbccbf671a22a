"""How much there is to read for whoever wants to understand a step."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import lantern_accel

#: The most lines of this package that the engine's import may bring.
MOST = 5000
#: The most lines that the files have together which docs/architecture.md names to explain a step.
MOST_READ = 2300


def test_the_engine_s_import_brings_few_lines() -> None:
    show = "import sys, lantern_accel.decoding.engine\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    own = [name for name in done.stdout.split() if name.partition(".")[0] == "lantern_accel"]
    assert "lantern_accel.decoding.step" in own
    lines = 0
    for name in own:
        path = Path(lantern_accel.__file__).parents[1] / name.replace(".", "/")
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        lines += len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MOST


def test_the_files_that_explain_a_step_are_few() -> None:
    package = Path(lantern_accel.__file__).parent
    page = (package.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.split("## A step, file by file")[1].split("The rest are rules")[0]
    listed = re.findall(r"`([a-z_/]+\.py)`[,:]", section)
    assert len(listed) > 10
    texts = [(package / "decoding" / name).read_text(encoding="utf-8") for name in listed]
    assert sum(len(text.splitlines()) for text in texts) <= MOST_READ
