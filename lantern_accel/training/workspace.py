"""The training folder: each stage reads what the one before it wrote.

``WORK/text_tokenizer.json``, ``WORK/tokenizer/``, ``WORK/target/``, ``WORK/drafter/``; ``bundle`` puts
their results together as a model folder that ``--model`` takes.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import ValidationError

from lantern_accel.errors import DataError
from lantern_accel.files import write_json, write_whole
from lantern_accel.models.bundle import ModelDefaults, ModelManifest
from lantern_accel.models.checkpoint import load_into, read_tensors
from lantern_accel.models.drafter import DrafterConfig
from lantern_accel.models.llamagen import LlamaGenConfig
from lantern_accel.models.text import TextEncoderConfig
from lantern_accel.models.vq import VQConfig
from lantern_accel.training.captions import save_text_tokenizer, train_text_tokenizer, word_corpus
from lantern_accel.training.common import Progress, TrainConfig
from lantern_accel.training.data import EmojiDataset, load_data
from lantern_accel.training.drafter import DrafterTrainConfig, train_drafter
from lantern_accel.training.target import Batches, TargetConfig, TextTarget, train_target
from lantern_accel.training.tokenizer import (
    TokenizerConfig,
    encode_dataset,
    load_tokenizer,
    train_tokenizer,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Config = TypeVar("Config", bound=TrainConfig)
TOKENS = "tokens.npy"


def read_config(kind: type[Config], path: Path | None, **overrides: Any) -> Config:
    """Read a trainer's configuration from JSON or TOML; overrides that are None do not count.

    Raises :class:`DataError` naming the field that is wrong.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            text = path.read_text(encoding="utf-8")
            values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        except (OSError, ValueError) as error:
            raise DataError(f"the configuration {path} cannot be read: {error}") from None
    values.update({k: v for k, v in overrides.items() if v is not None})
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "configuration"
        raise DataError(f"{path or 'the configuration'}: {where}: {first['msg']}") from None


def _need(path: Path, command: str) -> Path:
    if not path.exists():
        raise DataError(f"{path} is not there; run `lantern-accel train {command}` first")
    return path


def _text_tokenizer(work: Path, data: EmojiDataset) -> Any:
    from tokenizers import Tokenizer

    path = work / "text_tokenizer.json"
    if not path.is_file():
        save_text_tokenizer(train_text_tokenizer(word_corpus(data.records)), path)
    return Tokenizer.from_file(str(path))


def _tokens(work: Path, data: EmojiDataset, progress: Progress | None) -> np.ndarray[Any, Any]:
    folder = _need(work / "tokenizer" / "vq.safetensors", "tokenizer").parent
    path = folder / TOKENS
    if not path.is_file():
        encoded = encode_dataset(load_tokenizer(folder), data, progress=progress)
        write_whole(path, lambda stream: np.save(stream, encoded))
    tokens: np.ndarray[Any, Any] = np.load(path)
    if len(tokens) != len(data.records):
        raise DataError(
            f"{path} holds {len(tokens)} images, the data {len(data.records)}; delete it to encode "
            "them again"
        )
    return tokens


def run_tokenizer(
    config: TokenizerConfig, work: Path, progress: Progress | None, *, resume: bool
) -> dict[str, Any]:
    """Train the VQ tokenizer in ``work/tokenizer``, then encode the images."""
    data = load_data()
    out = work / "tokenizer"
    report = train_tokenizer(config, data, out, progress, resume=resume)
    (out / TOKENS).unlink(missing_ok=True)
    _tokens(work, data, progress)
    return report.model_dump(mode="json")


def run_target(
    config: TargetConfig, work: Path, progress: Progress | None, *, resume: bool
) -> dict[str, Any]:
    """Train target and text encoder in ``work/target``."""
    data = load_data()
    tokens = _tokens(work, data, progress)
    codes = load_tokenizer(work / "tokenizer").config.codebook_size
    tokenizer = _text_tokenizer(work, data)
    return train_target(
        config, data, tokens, tokenizer, codes, work / "target", progress, resume=resume
    )


def load_target(folder: Path) -> TextTarget:
    """Read a trained target and its text encoder back, in float32."""
    gpt = _json(LlamaGenConfig, _need(folder / "target.json", "target"))
    text = _json(TextEncoderConfig, folder / "text.json")
    model = TextTarget(gpt, text)
    for part, name in ((model.gpt, "target"), (model.text, "text")):
        path = folder / f"{name}.safetensors"
        load_into(part, {k: v.float() for k, v in read_tensors(path).items()}, path.name)
    return model


def _json(kind: Any, path: Path) -> Any:
    return kind.model_validate(json.loads(path.read_text(encoding="utf-8")))


def run_drafter(
    config: DrafterTrainConfig, work: Path, progress: Progress | None, *, resume: bool
) -> dict[str, Any]:
    """Train the drafter on the final target, in ``work/drafter``."""
    target = load_target(work / "target")
    data = load_data()
    tokens = _tokens(work, data, progress)
    tokenizer = _text_tokenizer(work, data)
    text = target.text.config
    # The factors that the target was trained with: the drafter sees the same mixture.
    trained = json.loads((work / "target" / "report.json").read_text(encoding="utf-8"))["config"]
    factors = trained["group_weights"], trained.get("concept_weights")
    train = Batches(data.records, tokens, tokenizer, text, "train", *factors)
    held = Batches(data.records, tokens, tokenizer, text, "heldout")
    return train_drafter(config, target, train, held, work / "drafter", progress, resume=resume)


def bundle(work: Path, to: Path, name: str, defaults: ModelDefaults, summary: str = "") -> Path:
    """Put the trained parts together as a model folder; returns it."""
    parts = {
        "target": work / "target",
        "text": work / "target",
        "drafter": work / "drafter",
        "vq": work / "tokenizer",
    }
    for part, folder in parts.items():
        command = "tokenizer" if part == "vq" else folder.name
        _need(folder / f"{part}.safetensors", command)
    manifest = ModelManifest(
        name=name,
        summary=summary,
        licence="Apache-2.0 (weights); image data: see NOTICE",
        target=_json(LlamaGenConfig, parts["target"] / "target.json"),
        text=_json(TextEncoderConfig, parts["text"] / "text.json"),
        drafter=_json(DrafterConfig, parts["drafter"] / "drafter.json"),
        vq=_json(VQConfig, parts["vq"] / "vq.json"),
        defaults=defaults,
    )
    to.mkdir(parents=True, exist_ok=True)
    for part, folder in parts.items():
        shutil.copyfile(folder / f"{part}.safetensors", to / f"{part}.safetensors")
    shutil.copyfile(work / "text_tokenizer.json", to / "text_tokenizer.json")
    write_json(to / "model.json", manifest.model_dump(mode="json"))
    return to


def set_threads(threads: int | None) -> None:
    """Use this many processor threads for training; None leaves torch's choice."""
    if threads is not None:
        torch.set_num_threads(threads)
