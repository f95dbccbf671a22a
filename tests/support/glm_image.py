"""A tiny GLM-Image folder, laid out as the release."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import save_file

from support.golden import ROOT, golden

RECORDED = ROOT / "glm_image"


def write_glm_image(folder: Path) -> Path:
    """Write the recorded prior with its processor; the diffusion half is not there."""
    shutil.copytree(RECORDED / "processor", folder / "processor")
    shutil.copytree(RECORDED / "vision_language_encoder", folder / "vision_language_encoder")
    shutil.copy(RECORDED / "model_index.json", folder)
    save_file(golden("glm_image/model"), folder / "vision_language_encoder/model.safetensors")
    return folder
