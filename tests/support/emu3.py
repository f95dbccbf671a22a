"""Tiny Emu3 and Emu3.5 folders, laid out as the releases and as transformers writes them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lantern_accel.families.emu3.family import IBQ
from lantern_accel.nn.vq import VQConfig
from support.chameleon import meta_names
from support.golden import ROOT, golden

RECORDED = ROOT / "emu3"
#: From the official names of the image tokenizer to transformers'.
HF_NAMES = (
    (r"^decoder\.up\.", "decoder.up_block.up."),
    (r"^encoder\.down\.", "encoder.down_block.down."),
    (r"\.mid\.attn_1\.norm\.", ".middle_block.attn_norm."),
    (r"\.mid\.", ".middle_block."),
    (r"\.attn\.(\d+)\.norm\.", r".attn_norms.\1."),
    (r"\.([qkv])\.", r".\1_proj."),
    (r"\.proj_out\.", ".out_proj."),
    (r"^", "vqmodel."),
)


def said(name: str) -> dict[str, Any]:
    """Return a recorded JSON file."""
    found: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text("utf-8"))
    return found


def weights_of(layout: str) -> dict[str, Tensor]:
    """Return the recorded model's tensors: "official", "3.5", or all that "hf" has in one file."""
    if layout != "hf":
        return dict(golden("emu3/model" if layout == "official" else "emu3/model_3p5"))
    out = {f"text_model.{key}": value for key, value in golden("emu3/model").items()}
    for key, value in golden("emu3/vision_tokenizer").items():
        for pattern, name in HF_NAMES:
            key = re.sub(pattern, name, key)
        out[key] = value.flatten(1) if key.endswith("_proj.weight") else value
    return out


def ibq_weights() -> dict[str, Tensor]:
    """Return seeded weights of a plain VQGAN of 64 codes, 2 pixels a token, under Meta's names."""
    config = VQConfig(
        ch=32, ch_mult=(1, 1), num_res_blocks=1, z_channels=32, codebook_size=64, codebook_dim=8,
        l2_norm=False,
    )  # fmt: skip
    torch.manual_seed(7)
    return meta_names(IBQ(config))


def write_emu3(
    folder: Path,
    layout: str = "official",
    *,
    weights: Mapping[str, Tensor] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write the recorded model as it would be published, with its image tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    given = weights_of(layout) if weights is None else weights
    save_file({k: v.contiguous() for k, v in given.items()}, folder / "model.safetensors")
    names = {"official": "config", "hf": "hf_config", "3.5": "config_3p5"}
    (folder / "config.json").write_text(json.dumps(config or said(names[layout])), "utf-8")
    if layout != "hf":
        near = folder / "vision_tokenizer"
        near.mkdir(exist_ok=True)
        own = golden("emu3/vision_tokenizer") if layout == "official" else ibq_weights()
        save_file(own, near / "model.safetensors")
    for name in ("emu3.tiktoken", "emu3_vision_tokens.txt"):
        shutil.copy(RECORDED / name, folder)
    return folder
