"""Two processes through accelerate, where it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from end_to_end.test_train import TINY, write_captioned

from lantern_accel.files import write_json


def launched(*words):
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2",
         "-m", "lantern_accel.cli", *map(str, words)],
        capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.long
def test_two_processes_share_the_drawing_of_a_drafters_images(undrafted_model, tmp_path):
    pytest.importorskip("accelerate")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("red heart\ndog face\n")
    write_json(tmp_path / "drafter.json", {**TINY["drafter"], "batch_size": 2})
    done = launched(
        "train", "drafter", "--model", undrafted_model, "--config", tmp_path / "drafter.json",
        "--prompts", prompts, "--samples", 5, "--work", tmp_path / "work", "--device", "cpu",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    files = [tmp_path / f"work/drafter/{rank}-of-2-codes.pt" for rank in range(2)]
    shares = [torch.load(path, weights_only=True)["codes"] for path in files]
    assert [len(share) for share in shares] == [3, 2]
    assert not torch.equal(shares[0][0], shares[1][0])
    assert (tmp_path / "work/drafter/drafter.safetensors").is_file()


@pytest.mark.long
def test_two_processes_train_one_target(undrafted_model, tmp_path):
    pytest.importorskip("accelerate")
    write_captioned(tmp_path / "images", 8)
    values = {k: v for k, v in TINY["target"].items() if k not in ("scenes", "concept_weights")}
    write_json(tmp_path / "target.json", values)
    words = ["train", "target", "--images", tmp_path / "images", "--model", undrafted_model,
             "--work", tmp_path, "--config", tmp_path / "target.json", "--device", "cpu"]  # fmt: skip
    done = launched(*words)
    assert done.returncode == 0, done.stderr
    # One report, from the first process; each process had its own examples.
    assert json.loads(done.stdout[: done.stdout.rindex("}") + 1])["images_seen"] == 2 * 4 * 4
