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
from safetensors.torch import save_file

from lantern_accel.checkpoints.loading import without_data
from lantern_accel.device.operations import TensorOps
from lantern_accel.families.llamagen.model import LlamaGenConfig
from lantern_accel.families.registry import entry, family
from lantern_accel.nn.vq import VQModel

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
    names = {
        "attention.wo": "self_attn.o_proj",
        "feed_forward.w2": "mlp.down_proj",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "tok_embeddings": "embed_tokens",
    }
    shapes: dict[str, torch.Size] = {}
    for key, value in target.state_dict().items():
        split = {"wqkv": ("q_proj", "k_proj", "v_proj"), "w13": ("gate_proj", "up_proj")}
        for ours, theirs in names.items():
            key = key.replace(ours, theirs)
        key = "lm_head.weight" if key == "output.weight" else f"model.{key}"
        for whole, parts in split.items():
            if whole in key:
                stem = key.replace(f"attention.{whole}", "self_attn.{}")
                stem = stem.replace(f"feed_forward.{whole}", "mlp.{}")
                rows = value.shape[0] // len(parts)
                shapes.update({stem.format(p): torch.Size((rows, value.shape[1])) for p in parts})
                break
        else:
            shapes[key] = value.shape
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    said = {"num_attention_heads": config.n_head, "block_size": config.num_tokens}
    (model / "config.json").write_text(json.dumps(said))
    keys, where = sorted(shapes), {}
    per = -(-len(keys) // shards)
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        tensors = {
            key: torch.empty(shapes[key], dtype=torch.bfloat16).uniform_(-0.02, 0.02)
            for key in keys[number * per : (number + 1) * per]
        }
        save_file(tensors, model / file)
        where.update(dict.fromkeys(tensors, file))
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    vq = VQModel(manifest.vq)
    torch.save({"model": vq.state_dict()}, folder / "vq_ds16_any.pt")


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
