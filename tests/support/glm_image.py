"""A tiny GLM-Image folder, laid out as the release."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from support.golden import ROOT, golden

RECORDED = ROOT / "glm_image"


def write_glm_image(
    folder: Path,
    *,
    weights: Mapping[str, Tensor] | None = None,
    text_config: Mapping[str, Any] | None = None,
    processor: bool = True,
) -> Path:
    """Write the recorded prior with its processor; the diffusion half is not there."""
    prior = folder / "vision_language_encoder"
    prior.mkdir(parents=True)
    shutil.copy(RECORDED / "model_index.json", folder)
    said = json.loads((RECORDED / prior.name / "config.json").read_text("utf-8"))
    said["text_config"] |= dict(text_config or {})
    (prior / "config.json").write_text(json.dumps(said), encoding="utf-8")
    shutil.copy(RECORDED / prior.name / "generation_config.json", prior)
    given = golden("glm_image/model") if weights is None else weights
    save_file({k: v.contiguous() for k, v in given.items()}, prior / "model.safetensors")
    if processor:
        shutil.copytree(RECORDED / "processor", folder / "processor")
    return folder
