"""The most memory that loading a model holds: random weights on disk, loaded in a new process.

Linux only: it reads VmHWM.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from lantern_accel.checkpoints.loading import without_data
from lantern_accel.device.operations import TensorOps
from lantern_accel.families.llamagen.model import LlamaGenConfig
from lantern_accel.families.registry import entry, family
from lantern_accel.nn.vq import VQModel
from support.official import hugging_face, write_shards, write_sizes, write_trained

CHILD = """
import json, os, sys
from pathlib import Path
import torch, PIL.Image, safetensors.torch
from lantern_accel.models.bundle import load_model
from lantern_accel.models.locate import find_model
from lantern_accel.device.plugins import open_backend

def status(name):
    text = Path("/proc/self/status").read_text()
    return int(text.split(name + ":")[1].split()[0]) * 1024

found = find_model(sys.argv[1])
backend = open_backend(sys.argv[2])
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
model = load_model(found, backend, dtype=torch.bfloat16, device=backend.device)
parts = (model.target, model.vq)
size = sum(t.numel() * t.element_size() for m in parts for t in m.state_dict().values())
print(json.dumps({"before": before, "peak": status("VmHWM"), "weights": size}))
"""


def write_checkpoint(folder: Path, name: str, shards: int) -> None:
    """Write random weights of a published LlamaGen in the Hugging Face layout, and its tokenizer."""
    manifest = family("llamagen").from_entry(entry(name))
    config: LlamaGenConfig = manifest.target
    with without_data():
        target = family("llamagen").build(manifest, "target", TensorOps())
    shapes: dict[str, Tensor] = {}
    for key, value in target.state_dict().items():
        parts = value.chunk(2) if ".w13." in key else (value,)
        for one, name in zip(parts, ("w1", "w3"), strict=False):
            shapes[key.replace("w13", name)] = one
    weights = {
        key: torch.empty(value.shape, dtype=torch.bfloat16).uniform_(-0.02, 0.02)
        for key, value in hugging_face(shapes).items()
    }
    model = write_shards(folder / "model", weights, shards)
    sizes = {"num_attention_heads": config.n_head, "block_size": config.num_tokens}
    write_sizes(model / "config.json", **sizes)
    write_trained(folder / "vq_ds16_any.pt", VQModel(manifest.vq).state_dict())


def measure(folder: Path) -> dict[str, int]:
    """Load the checkpoint in a new process; bytes ``before``, at the ``peak``, and of the ``weights``."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder / "model"), "cpu"],
        check=True,
        capture_output=True,
        text=True,
        env=dict(os.environ),
    )
    found: dict[str, int] = json.loads(done.stdout)
    return found
