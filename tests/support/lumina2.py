"""A tiny Lumina-mGPT 2.0 folder: the recorded model as it would be published, with its decoder."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from support.golden import ROOT, golden

RECORDED = ROOT / "lumina2"


def write_lumina2(folder: Path, *, ckpt: bool = True) -> Path:
    """Write the model with its tokenizer, and its decoder, as a ``.ckpt`` or not."""
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(RECORDED / name, folder)
    save_file(golden("lumina2/model"), folder / "model.safetensors")
    home = folder / "movqgan" / "270M"
    home.mkdir(parents=True)
    if ckpt:
        torch.save(golden("lumina2/movqgan"), home / "movqgan_270M.ckpt")
    else:
        save_file(golden("lumina2/movqgan"), home / "movqgan.safetensors")
    return folder
