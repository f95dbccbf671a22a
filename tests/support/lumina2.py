"""A tiny Lumina-mGPT 2.0 folder: the recorded model as it would be published, with its decoder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from support.golden import ROOT, golden

RECORDED = ROOT / "lumina2"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def config() -> dict[str, Any]:
    """Return the recorded ``config.json``."""
    found: dict[str, Any] = json.loads((RECORDED / "config.json").read_text("utf-8"))
    return found


def write_lumina2(
    folder: Path,
    *,
    weights: Mapping[str, Tensor] | None = None,
    said: Mapping[str, Any] | None = None,
    tokenizer: tuple[str, ...] = TOKENIZER,
    vq: Mapping[str, Tensor] | None = None,
    ckpt: bool = True,
) -> Path:
    """Write the model with these parts of its tokenizer, and its decoder, as a ``.ckpt`` or not."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(said or config())), encoding="utf-8")
    given = golden("lumina2/model") if weights is None else weights
    save_file({k: v.contiguous() for k, v in given.items()}, folder / "model.safetensors")
    for name in tokenizer:
        shutil.copy(RECORDED / name, folder)
    picture = dict(golden("lumina2/movqgan") if vq is None else vq)
    home = folder / "movqgan" / "270M"
    home.mkdir(parents=True)
    if ckpt:
        torch.save(picture, home / "movqgan_270M.ckpt")
    else:
        save_file(picture, home / "movqgan.safetensors")
    return folder
