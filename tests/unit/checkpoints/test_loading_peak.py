"""Loading float32 files as bfloat16 holds little more than the model does: measured in a process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.growth import growth, measurable

SETUP = """
import sys, torch, safetensors.torch
from lantern_accel.checkpoints.loading import fill
from lantern_accel.checkpoints.weights import open_checkpoint
from lantern_accel.device.operations import TensorOps
from lantern_accel.families.emu3.official import manifest_of
from lantern_accel.families.registry import family
from lantern_accel.checkpoints.layouts import folder_json
from lantern_accel.checkpoints.loading import without_data
folder = Path({folder!r})
checkpoint = open_checkpoint(folder)
kind, manifest = family("emu3"), manifest_of(checkpoint, folder_json(folder))
with without_data():
    target = kind.build(manifest, "target", TensorOps())
recipes = kind.recipes("target", checkpoint, manifest)
torch.aminmax(torch.ones(99, 99).to(torch.bfloat16)[torch.tensor([1, 2])])
"""
BODY = """
fill(target, checkpoint, recipes, dtype=torch.bfloat16, device=torch.device("cpu"), what="it")
"""


@measurable
@pytest.mark.long
def test_a_head_and_a_table_of_words_are_read_in_blocks(tmp_path: Path) -> None:
    """Emu3's head is a tenth of its file, and most of its rows are not kept."""
    dim, wide, layers, words, codes = 512, 2048, 14, 64000, 8000
    shapes = {"model.embed_tokens.weight": (words, dim), "model.norm.weight": (dim,)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {f"{at}self_attn.{part}_proj.weight": (dim, dim) for part in "qkvo"}
        shapes |= {f"{at}mlp.{part}_proj.weight": (wide, dim) for part in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj.weight": (dim, wide)}
        shapes |= {f"{at}{n}_layernorm.weight": (dim,) for n in ("input", "post_attention")}
    shapes["lm_head.weight"] = (words, dim)
    save_file({k: torch.full(s, 0.5) for k, s in shapes.items()}, tmp_path / "model.safetensors")
    said = {"model_type": "Emu3", "num_attention_heads": 8, "eoi_token_id": words - codes - 1}
    (tmp_path / "config.json").write_text(json.dumps(said), "utf-8")
    kept = sum(torch.Size(s).numel() for s in shapes.values()) - (words - codes - 1) * dim
    # Below a threshold that moves up to 32 MiB, malloc keeps tensors in a heap with gaps. A matrix of
    # the real model is larger; these are 2 MiB.
    alone = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
    peak = growth(SETUP.format(folder=str(tmp_path)), BODY, alone)
    paged_in = 16 * 2**20  # of torch's code, on first use
    assert 2 * kept < peak < 1.05 * 2 * kept + paged_in
