"""Reads a trainer's settings, and puts the parts in a training folder together as a model.

``WORK/text_tokenizer.json``, ``WORK/tokenizer/`` (the image tokenizer), ``WORK/target/`` and
``WORK/drafter/`` are what the trainers write.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from pydantic import BaseModel, ValidationError
from safetensors.torch import save
from torch import Tensor, nn

from lantern_accel.errors import DataError, LanternError
from lantern_accel.families.base import Parts
from lantern_accel.families.keys import load_float
from lantern_accel.families.llamagen.drafter import DrafterConfig
from lantern_accel.families.llamagen.manifest import LlamaGenManifest
from lantern_accel.families.llamagen.model import LlamaGenConfig
from lantern_accel.families.llamagen.text import TextEncoderConfig
from lantern_accel.families.llamagen.words import normalise
from lantern_accel.files import read_json_file, read_toml_file, write_json, write_whole
from lantern_accel.models.bundle import HEAD, folder_parts, with_head
from lantern_accel.nn.vq import VQConfig, VQModel
from lantern_accel.records import Frozen, first_wrong
from lantern_accel.strategy.choose import ModelDefaults
from lantern_accel.training.loop import read_made

Config = TypeVar("Config", bound=Frozen)
Module = TypeVar("Module", bound=nn.Module)


def read_config(kind: type[Config], path: Path | None, **overrides: Any) -> Config:
    """Read a trainer's configuration from JSON or TOML; overrides that are None are ignored.

    Raises :class:`DataError` naming the field that is wrong.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            toml = path.suffix == ".toml"
            values = read_toml_file(path) if toml else read_json_file(path)
            if not isinstance(values, dict):
                raise ValueError("it holds no settings by name")
        except (OSError, ValueError) as error:
            raise DataError(f"the configuration {path} cannot be read: {error}") from None
    values.update({k: v for k, v in overrides.items() if v is not None})
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise DataError(f"{path or 'the configuration'}: {first_wrong(error)}") from None


def write_weights(
    weights: Mapping[str, Tensor], path: Path, said: dict[str, str] | None = None
) -> None:
    """Write tensors as bf16 safetensors; ``said``: what the file says about itself."""
    # A copy each: what was cut out of one matrix may not share its memory.
    kept = {
        k: v.detach().to("cpu", torch.bfloat16, copy=True).contiguous() for k, v in weights.items()
    }
    write_whole(path, save(kept, said))


def write_model(model: nn.Module, out: Path, name: str) -> None:
    """Write a model's weights as bf16 ``name.safetensors`` and its config as ``name.json``."""
    write_weights(model.state_dict(), out / f"{name}.safetensors")
    config = cast(BaseModel, model.config)
    write_json(out / f"{name}.json", config.model_dump(mode="json"))


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
            raise DataError(
                f"{folder / part}.safetensors is not there; train the {folder.name} first"
            )
    drafter = None
    if "drafter" in parts:
        drafter = read_made(DrafterConfig, parts["drafter"] / "drafter.json", "drafter")
    trained = read_json_file(work / "target" / "report.json")
    style = trained.get("config", {}).get("default_style") if isinstance(trained, dict) else None
    manifest = LlamaGenManifest(
        name=name,
        summary=summary,
        licence=licence,
        target=read_made(LlamaGenConfig, parts["target"] / "target.json", "target"),
        text=read_made(TextEncoderConfig, parts["text"] / "text.json", "target"),
        drafter=drafter,
        vq=read_made(VQConfig, parts["vq"] / "vq.json", "tokenizer"),
        defaults=defaults.model_copy(update={"style": style}),
    )
    to.mkdir(parents=True, exist_ok=True)
    for part, folder in parts.items():
        shutil.copyfile(folder / f"{part}.safetensors", to / f"{part}.safetensors")
    shutil.copyfile(work / "text_tokenizer.json", to / "text_tokenizer.json")
    write_json(to / "model.json", manifest.model_dump(mode="json"))
    return to


def with_parts(model: Path, parts: Parts, to: Path) -> Path:
    """Write ``to``, a copy of the model folder ``model`` with a newly trained drafter or draft head."""
    try:
        found = with_head(folder_parts(model, parts), parts)
    except LanternError as error:
        raise DataError(f"what was trained does not fit the model in {model}: {error}") from None
    written = {
        f"{part}.safetensors": found.files[part].read_bytes()
        for part, path in (("drafter", parts.drafter), (HEAD, parts.head))
        if path is not None
    }
    to.mkdir(parents=True, exist_ok=True)
    for path in sorted(model.iterdir()):
        if path.is_file() and path.name not in ("model.json", *written):
            write_whole(to / path.name, path.read_bytes())
    for name, content in written.items():
        write_whole(to / name, content)
    write_json(to / "model.json", found.manifest.model_dump(mode="json"))
    return to


if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, UNK = "[PAD]", "[UNK]"
"""Special tokens of the text tokenizer; their ids are 0 and 1."""

_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def train_text_tokenizer(texts: Iterable[str], vocab_size: int = 3000) -> Tokenizer:
    """Build a WordPiece tokenizer from normalised ``texts``; [PAD] is 0 and [UNK] is 1.

    A quarter of the vocabulary is letters and common word pieces, so that any Latin word can be
    spelt; the rest are the most frequent whole words. The same texts in any order give the same
    file. The caller normalises text before encoding; the tokenizer splits on spaces only.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = Counter(word for text in texts for word in normalise(text).split())
    entries = [PAD, UNK, *_LETTERS, *("##" + letter for letter in _LETTERS)]
    entries += _most_common(_pieces(words), max(vocab_size // 4 - len(entries), 0))
    entries += _most_common(words, vocab_size)
    vocabulary = {entry: i for i, entry in enumerate(list(dict.fromkeys(entries))[:vocab_size])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=UNK, max_input_chars_per_word=64))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def _pieces(words: Counter[str]) -> Counter[str]:
    """Count the beginnings and the later parts of two to five letters, by the letters they save."""
    pieces: Counter[str] = Counter()
    for word, count in words.items():
        for start in range(len(word)):
            for end in range(start + 2, min(start + 5, len(word)) + 1):
                piece = word[start:end] if start == 0 else "##" + word[start:end]
                pieces[piece] += count * (end - start - 1)
    return pieces


def _most_common(counts: Counter[str], number: int) -> list[str]:
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [entry for entry, _ in ranked[:number]]
