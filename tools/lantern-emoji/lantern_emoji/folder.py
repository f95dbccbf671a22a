"""What the stages leave in the training folder, read back, and put together as a model folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from pydantic import BaseModel
from torch import nn

from lantern_accel.errors import DataError
from lantern_accel.families.keys import load_float
from lantern_accel.families.llamagen.model import (
    DrafterConfig,
    LlamaGenConfig,
    LlamaGenGPT,
    LlamaGenManifest,
)
from lantern_accel.families.llamagen.text import TextEncoder, TextEncoderConfig
from lantern_accel.files import read_json_file, write_json
from lantern_accel.nn.vq import VQConfig, VQModel
from lantern_accel.strategy.choose import ModelDefaults
from lantern_accel.training.folder import write_weights
from lantern_emoji.target import TargetConfig, TextTarget

Made = TypeVar("Made", bound=BaseModel)
Module = TypeVar("Module", bound=nn.Module)


def write_model(model: nn.Module, out: Path, name: str) -> None:
    """Write a model's weights as bf16 ``name.safetensors`` and its config as ``name.json``."""
    write_weights(model.state_dict(), out / f"{name}.safetensors")
    config = cast(BaseModel, model.config)
    write_json(out / f"{name}.json", config.model_dump(mode="json"))


def read_made(kind: type[Made], path: Path, stage: str, field: str = "") -> Made:
    """Return what a stage of training wrote as JSON, or one field of it.

    Raises :class:`DataError` where the file is not there, or is not what the stage writes.
    """
    try:
        found = read_json_file(path)
        return kind.model_validate(found[field] if field else found)
    except FileNotFoundError:
        raise DataError(f"{path.parent} holds no trained {stage}; train it first") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:120]
        raise DataError(
            f"{path} is not what training a {stage} writes ({reason}); train the {stage} again"
        ) from None


def read_model(
    make: Callable[[Any], Module], config: type[BaseModel], folder: Path, name: str, stage: str
) -> Module:
    """Read back what :func:`write_model` wrote, in float32; raises where it is not there.

    ``make``: from its config to the model; ``stage``: of training, which wrote it.
    """
    model = make(read_made(config, folder / f"{name}.json", stage))
    load_float(model, folder / f"{name}.safetensors")
    return model


def load_tokenizer(folder: Path, device: torch.device | None = None) -> VQModel:
    """Return the image tokenizer that was written there, in float32 and ready to use."""
    model = read_model(VQModel, VQConfig, folder, "vq", "tokenizer")
    return model.to(device or torch.get_default_device()).eval().requires_grad_(False)


def read_target(folder: Path) -> TextTarget:
    """Read back the target that was trained there, in float32; raises where it is not there."""
    text = read_model(TextEncoder, TextEncoderConfig, folder, "text", "target")
    return TextTarget(text, read_model(LlamaGenGPT, LlamaGenConfig, folder, "target", "target"))


def read_mixture(work: Path) -> TargetConfig:
    """Return the settings that the target in ``work`` was trained with."""
    return read_made(TargetConfig, work / "target" / "report.json", "target", "config")


def bundle(
    work: Path, to: Path, name: str, defaults: ModelDefaults, summary: str = "", licence: str = ""
) -> Path:
    """Put the trained parts together as a model folder and return it.

    A model without a trained drafter gets none. Raises :class:`DataError` where a part is missing.
    """
    parts = {"target": work / "target", "text": work / "target", "vq": work / "tokenizer"}
    if (work / "decoder" / "vq.safetensors").is_file():
        parts["vq"] = work / "decoder"
    if (work / "drafter" / "drafter.safetensors").is_file():
        parts["drafter"] = work / "drafter"
    for part, folder in parts.items():
        if not (folder / f"{part}.safetensors").is_file():
            raise DataError(f"{folder} holds no {part}.safetensors; train the {folder.name} first")
    drafter = None
    if "drafter" in parts:
        drafter = read_made(DrafterConfig, parts["drafter"] / "drafter.json", "drafter")
    manifest = LlamaGenManifest(
        name=name,
        summary=summary,
        licence=licence,
        target=read_made(LlamaGenConfig, parts["target"] / "target.json", "target"),
        text=read_made(TextEncoderConfig, parts["text"] / "text.json", "target"),
        drafter=drafter,
        vq=read_made(VQConfig, parts["vq"] / "vq.json", "tokenizer"),
        defaults=defaults.model_copy(update={"style": read_mixture(work).default_style}),
    )
    to.mkdir(parents=True, exist_ok=True)
    for part, folder in parts.items():
        shutil.copyfile(folder / f"{part}.safetensors", to / f"{part}.safetensors")
    shutil.copyfile(work / "text_tokenizer.json", to / "text_tokenizer.json")
    write_json(to / "model.json", manifest.model_dump(mode="json"))
    return to
