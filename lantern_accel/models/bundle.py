"""A model folder: ``model.json`` and safetensors beside it; the bundled model is one."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import nn

from lantern_accel.decoding.trees import EAGLE2_TREE, NAIVE_EXTEND_57
from lantern_accel.errors import CheckpointError, ModelError, did_you_mean
from lantern_accel.models.checkpoint import (
    load_into,
    read_tensors,
    to_drafter_names,
    to_llamagen_names,
)
from lantern_accel.models.drafter import DrafterConfig, EagleDrafter
from lantern_accel.models.llamagen import LlamaGenConfig, LlamaGenGPT
from lantern_accel.models.text import TextEncoder, TextEncoderConfig
from lantern_accel.models.transformer import pack
from lantern_accel.models.vq import VQConfig, VQModel
from lantern_accel.ops import TensorOps
from lantern_accel.strategy import DynamicTree, Lantern, LanternPP, Sampling, StaticTree

FORMAT: Literal[1] = 1
ASSETS = Path(__file__).resolve().parent.parent / "assets"


class ModelDefaults(BaseModel):
    """What a request gets that does not say otherwise."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sampling: Sampling = Sampling()
    static_tree: StaticTree = NAIVE_EXTEND_57
    dynamic_tree: DynamicTree = EAGLE2_TREE
    lantern: Lantern = Lantern()
    lantern_pp: LanternPP = LanternPP()


class ModelManifest(BaseModel):
    """``model.json``: what a model folder holds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = FORMAT
    name: str
    family: Literal["llamagen"] = "llamagen"
    summary: str = ""
    licence: str = ""
    target: LlamaGenConfig
    drafter: DrafterConfig | None = None
    text: TextEncoderConfig | None = None
    vq: VQConfig
    neighbour_space: Literal["decoder", "raw"] = Field(
        "decoder", description="measure neighbours where the decoder looks codes up, or on raw rows"
    )
    defaults: ModelDefaults = ModelDefaults()

    @model_validator(mode="after")
    def _parts_fit(self) -> ModelManifest:
        t = self.target
        if self.vq.codebook_size != t.vocab_size:
            raise ValueError(
                f"the codebook has {self.vq.codebook_size} codes, the target {t.vocab_size}"
            )
        if self.text is not None and (self.text.dim, self.text.prefix_length) != (
            t.caption_dim,
            t.prefix_length,
        ):
            raise ValueError(
                f"the text encoder gives {self.text.prefix_length} x {self.text.dim} features, the "
                f"target takes {t.prefix_length} x {t.caption_dim}"
            )
        d = self.drafter
        if d is not None and (d.dim, d.vocab_size, d.grid, d.prefix_length) != (
            t.dim,
            t.vocab_size,
            t.grid,
            t.prefix_length - 1,
        ):
            raise ValueError(
                f"the drafter (dim {d.dim}, {d.vocab_size} codes, grid {d.grid}, prefix "
                f"{d.prefix_length}) is not of this target (dim {t.dim}, {t.vocab_size} codes, grid "
                f"{t.grid}, prefix {t.prefix_length - 1} for its drafter)"
            )
        return self

    @property
    def image_size(self) -> int:
        """Side of an image in pixels."""
        return self.target.grid * self.vq.downsample


@dataclass
class Model:
    """A model in memory: target, drafter and tokenizer on the device, text encoder on the host."""

    manifest: ModelManifest
    target: LlamaGenGPT
    drafter: EagleDrafter | None
    vq: VQModel
    text: TextEncoder | None
    text_tokenizer: Any
    weights_hash: str


def bundled_models() -> dict[str, Path]:
    """Return the models that the package carries, by name."""
    return {path.parent.name: path.parent for path in sorted(ASSETS.glob("*/model.json"))}


def find_model(name: str | Path) -> Path:
    """Return the folder of a model given by name or by path; raises :class:`ModelError`."""
    known = bundled_models()
    if str(name) in known:
        return known[str(name)]
    path = Path(name)
    if (path / "model.json").is_file():
        return path
    if path.is_dir():
        raise ModelError(f"the folder {path} has no model.json, so it is not a model")
    raise ModelError(
        f"unknown model {str(name)!r}{did_you_mean(str(name), known)} (a model is a bundled name or "
        "a folder with a model.json)"
    )


def read_manifest(folder: Path) -> ModelManifest:
    """Read ``model.json``; raises :class:`CheckpointError` with the field that is wrong."""
    path = folder / "model.json"
    try:
        return ModelManifest.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the parts"
        raise CheckpointError(f"{path}: {where}: {first['msg']}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None


def load_model(folder: Path, ops: TensorOps, *, dtype: torch.dtype, device: torch.device) -> Model:
    """Load every part of a model folder; target and drafter in ``dtype``, the rest in float32."""
    manifest = read_manifest(folder)
    digest = hashlib.sha256()

    def part(
        module: nn.Module, name: str, rename: Any, to: torch.dtype, where: torch.device
    ) -> nn.Module:
        path = folder / f"{name}.safetensors"
        tensors = read_tensors(path)
        digest.update(path.read_bytes())
        load_into(module, rename(tensors), path.name)
        module.to(device=where, dtype=to).eval().requires_grad_(False)
        return module

    def same(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return tensors

    target = LlamaGenGPT(manifest.target, ops=ops)
    tables = target.rope_cos, target.rope_sin
    part(target, "target", to_llamagen_names, dtype, device)
    target.rope_cos, target.rope_sin = (t.to(device) for t in tables)
    pack(target, ops)
    drafter = None
    if manifest.drafter is not None:
        drafter = EagleDrafter(manifest.drafter, ops=ops)
        tables = drafter.rope_cos, drafter.rope_sin
        part(drafter, "drafter", to_drafter_names, dtype, device)
        drafter.rope_cos, drafter.rope_sin = (t.to(device) for t in tables)
        pack(drafter, ops)
    vq = VQModel(manifest.vq)
    part(vq, "vq", same, torch.float32, device)
    text = text_tokenizer = None
    if manifest.text is not None:
        text = TextEncoder(manifest.text)
        part(text, "text", same, torch.float32, torch.device("cpu"))
        text_tokenizer = _read_tokenizer(folder / "text_tokenizer.json")
    return Model(manifest, target, drafter, vq, text, text_tokenizer, digest.hexdigest()[:16])


def _read_tokenizer(path: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read as a tokenizer: {error}") from None
