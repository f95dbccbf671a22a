"""Two processes through accelerate, where it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from end_to_end.test_train import work

__all__ = ["work"]


def test_two_processes_train_one_target(command, work):
    pytest.importorskip("accelerate")
    assert (
        command(
            "train", "tokenizer", "--work", work, "--config", work / "tokenizer.json"
        ).returncode
        == 0
    )
    words = ["train", "target", "--work", work, "--config", work / "target.json", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2",
         "-m", "lantern_accel.cli", *map(str, words)],
        capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # One report, from the first process; each process had its own examples.
    assert json.loads(done.stdout[: done.stdout.rindex("}") + 1])["images_seen"] == 2 * 4 * 4
