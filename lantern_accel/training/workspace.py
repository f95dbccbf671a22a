"""The training folder: each stage reads what the one before it wrote.

``WORK/text_tokenizer.json``, ``WORK/tokenizer/``, ``WORK/target/``, ``WORK/drafter/``; ``bundle`` puts
their results together as a model folder that ``--model`` takes.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import ValidationError

from lantern_accel.checkpoints.bundle import read_manifest
from lantern_accel.errors import DataError
from lantern_accel.families.llamagen.drafter import DrafterConfig
from lantern_accel.families.llamagen.manifest import LlamaGenManifest
from lantern_accel.families.llamagen.model import LlamaGenConfig
from lantern_accel.families.llamagen.text import TextEncoderConfig
from lantern_accel.families.llamagen.vq import VQConfig
from lantern_accel.families.manifest import ModelDefaults
from lantern_accel.families.tokenizer import read_tokenizer
from lantern_accel.files import read_json_file, read_toml_file, write_json, write_whole
from lantern_accel.quality.progress import Progress
from lantern_accel.training.batches import Batches, SceneTokens
from lantern_accel.training.captions import save_text_tokenizer, train_text_tokenizer, word_corpus
from lantern_accel.training.catalogue import COMMON
from lantern_accel.training.common import TrainConfig, read_made
from lantern_accel.training.data import EmojiDataset, load_data
from lantern_accel.training.device import TrainDevice
from lantern_accel.training.drafter import TextTargetFeatures, read_drafter, train_drafter
from lantern_accel.training.encode import encode_dataset, encode_scenes
from lantern_accel.training.objective import DrafterTrainConfig
from lantern_accel.training.render import SIZE
from lantern_accel.training.samples import SampleSheet
from lantern_accel.training.scenes import SCENE_WORDS, draw_scenes
from lantern_accel.training.target import TargetConfig, fresh_target, read_target, train_target
from lantern_accel.training.tokenizer import TokenizerConfig, load_tokenizer, train_tokenizer

Config = TypeVar("Config", bound=TrainConfig)
TOKENS = "tokens.npy"
SCENES = "scene_tokens.npz"


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
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "configuration"
        message = first["msg"].removeprefix("Value error, ")
        raise DataError(f"{path or 'the configuration'}: {where}: {message}") from None


def folder_of(config: TrainConfig) -> str:
    """Return where in the training folder a stage keeps what it makes."""
    if isinstance(config, TokenizerConfig):
        return "decoder" if config.part == "decoder" else "tokenizer"
    return config.folder if isinstance(config, TargetConfig) else "drafter"


def _need(path: Path, command: str) -> Path:
    if not path.exists():
        raise DataError(f"{path} is not there; run `lantern-accel train {command}` first")
    return path


def _text_tokenizer(work: Path, data: EmojiDataset) -> Any:
    path = work / "text_tokenizer.json"
    if not path.is_file():
        save_text_tokenizer(train_text_tokenizer(word_corpus(data.records, SCENE_WORDS)), path)
    return read_tokenizer(path)


def _tokens(
    work: Path, data: EmojiDataset, device: TrainDevice, progress: Progress | None
) -> np.ndarray[Any, Any]:
    folder = _need(work / "tokenizer" / "vq.safetensors", "tokenizer").parent
    path = folder / TOKENS
    if not path.is_file() and device.main:
        vq = load_tokenizer(folder, device.device)
        encoded = encode_dataset(vq, data, dtype=device.dtype, progress=progress)
        write_whole(path, lambda stream: np.save(stream, encoded))
    device.wait()
    tokens: np.ndarray[Any, Any] = np.load(path)
    if len(tokens) != len(data.records):
        raise DataError(
            f"{path} holds {len(tokens)} images, the data {len(data.records)}; delete it to encode "
            "them again"
        )
    return tokens


def _scene_tokens(
    work: Path,
    data: EmojiDataset,
    count: int,
    seed: int,
    device: TrainDevice,
    progress: Progress | None,
) -> SceneTokens | None:
    """Draw and encode scenes, or read them back where the same were encoded before."""
    if not count:
        return None
    folder = work / "tokenizer"
    scenes = draw_scenes(data, count, seed)
    digest = hashlib.sha256((folder / "vq.safetensors").read_bytes())
    digest.update(repr(scenes).encode())
    key = digest.hexdigest()
    path = folder / SCENES
    if path.is_file():
        with np.load(path) as stored:
            if str(stored["key"]) == key:
                return SceneTokens(scenes, stored["codes"])
    if device.main:
        vq = load_tokenizer(folder, device.device)
        codes = encode_scenes(vq, data, scenes, dtype=device.dtype, progress=progress)
        write_whole(path, lambda stream: np.savez(stream, key=np.array(key), codes=codes))
    device.wait()
    with np.load(path) as stored:
        return SceneTokens(scenes, stored["codes"])


def run_tokenizer(
    config: TokenizerConfig,
    work: Path,
    progress: Progress | None,
    *,
    resume: bool,
    device: TrainDevice,
) -> dict[str, Any]:
    """Train the VQ tokenizer in ``work/tokenizer``, then encode the images.

    Of a finished one the decoder alone is trained on in ``work/decoder``: its codes stay valid, and
    so does every target on them.
    """
    data = load_data()
    if config.part == "decoder":
        start = load_tokenizer(_need(work / "tokenizer" / "vq.safetensors", "tokenizer").parent)
        return train_tokenizer(
            config, data, work / folder_of(config), device, progress, resume=resume, start=start
        ).model_dump(mode="json")
    out = work / "tokenizer"
    report = train_tokenizer(config, data, out, device, progress, resume=resume)
    if device.main:
        (out / TOKENS).unlink(missing_ok=True)
    device.wait()
    _tokens(work, data, device, progress)
    return report.model_dump(mode="json")


def target_batches(
    work: Path,
    config: TargetConfig,
    text: TextEncoderConfig,
    device: TrainDevice,
    progress: Progress | None,
) -> tuple[Batches, dict[str, Batches]]:
    """Return what a target trains on, and the held-out batches by the name of their figure."""
    data = load_data()
    tokens = _tokens(work, data, device, progress)
    tokenizer = _text_tokenizer(work, data)
    scenes = _scene_tokens(work, data, config.scenes, config.seed, device, progress)
    concepts = dict.fromkeys(COMMON, config.common_weight) | config.concept_weights
    train = Batches(
        data.records, tokens, tokenizer, text, "train", config.group_weights, concepts,
        scenes=scenes, scene_share=config.scene_share,
        style_weights=config.style_weights, default_style=config.default_style,
    )  # fmt: skip
    style = config.default_style
    judged = {
        "heldout_nll": Batches(
            data.records, tokens, tokenizer, text, "heldout", default_style=style
        )
    }
    if scenes is not None and any(scene.split == "heldout" for scene in scenes.scenes):
        judged["heldout_scenes_nll"] = Batches(
            data.records,
            tokens,
            tokenizer,
            text,
            "heldout",
            scenes=scenes,
            scene_share=1.0,
            default_style=style,
        )
    return train, judged


def run_target(
    config: TargetConfig,
    work: Path,
    progress: Progress | None,
    *,
    resume: bool,
    device: TrainDevice,
) -> dict[str, Any]:
    """Train target and text encoder in the configured folder, ``work/target`` by default."""
    data = load_data()
    vq = load_tokenizer(_need(work / "tokenizer" / "vq.safetensors", "tokenizer").parent)
    tokenizer = _text_tokenizer(work, data)
    grid = SIZE // vq.config.downsample
    # A relative folder is relative to the training folder.
    start = read_target(work / config.start_from) if config.start_from else None
    model = fresh_target(config, tokenizer.get_vocab_size(), vq.config.codebook_size, grid, start)
    train, judged = target_batches(work, config, model.text.config, device, progress)
    sheet = SampleSheet(vq.to(device.device), tokenizer, device.device)
    return train_target(
        config,
        model,
        train,
        judged,
        work / config.folder,
        device,
        progress,
        resume=resume,
        draw=sheet,
    )


def _mixture(work: Path) -> TargetConfig:
    """Return what the target in ``work`` was trained on."""
    return read_made(TargetConfig, work / "target" / "report.json", "target", "config")


def run_drafter(
    config: DrafterTrainConfig,
    work: Path,
    progress: Progress | None,
    *,
    resume: bool,
    device: TrainDevice,
) -> dict[str, Any]:
    """Train the drafter on the final target, in ``work/drafter``."""
    target = read_target(_need(work / "target", "target"))
    # The mixture that the target was trained on: the drafter sees the same.
    train, judged = target_batches(work, _mixture(work), target.text.config, device, progress)
    source = TextTargetFeatures(
        target, train, judged["heldout_nll"], device,
        text_dropout=config.text_dropout, compile=config.compile, taps=config.taps,
    )  # fmt: skip
    codebook = load_tokenizer(work / "tokenizer").codebook()
    start = read_drafter(work / config.start_from) if config.start_from else None
    return train_drafter(
        config,
        source,
        work / "drafter",
        device,
        progress,
        resume=resume,
        codebook=codebook,
        start=start,
    )


def bundle(work: Path, to: Path, name: str, defaults: ModelDefaults, summary: str = "") -> Path:
    """Put the trained parts together as a model folder; returns it."""
    parts = {
        "target": work / "target",
        "text": work / "target",
        "drafter": work / "drafter",
        "vq": work / "tokenizer",
    }
    if (work / "decoder" / "vq.safetensors").is_file():
        parts["vq"] = work / "decoder"
    for part, folder in parts.items():
        command = "tokenizer" if part == "vq" else folder.name
        _need(folder / f"{part}.safetensors", command)
    manifest = LlamaGenManifest(
        name=name,
        summary=summary,
        licence="Apache-2.0 (weights); image data: see NOTICE",
        target=read_made(LlamaGenConfig, parts["target"] / "target.json", "target"),
        text=read_made(TextEncoderConfig, parts["text"] / "text.json", "target"),
        drafter=read_made(DrafterConfig, parts["drafter"] / "drafter.json", "drafter"),
        vq=read_made(VQConfig, parts["vq"] / "vq.json", "tokenizer"),
        defaults=defaults.model_copy(update={"style": _mixture(work).default_style}),
    )
    to.mkdir(parents=True, exist_ok=True)
    for part, folder in parts.items():
        shutil.copyfile(folder / f"{part}.safetensors", to / f"{part}.safetensors")
    shutil.copyfile(work / "text_tokenizer.json", to / "text_tokenizer.json")
    write_json(to / "model.json", manifest.model_dump(mode="json"))
    return to


def with_drafter(model: Path, drafter: Path, to: Path) -> Path:
    """Write ``to``, a copy of the model folder ``model`` with the newly trained drafter."""
    manifest = read_manifest(model)
    config = read_made(DrafterConfig, drafter / "drafter.json", "drafter")
    try:
        joined = type(manifest).model_validate(
            {**manifest.model_dump(), "drafter": config.model_dump()}
        )
    except ValidationError as error:
        raise DataError(
            f"the drafter in {drafter} does not fit the model in {model}: {error.errors()[0]['msg']}"
        ) from None
    to.mkdir(parents=True, exist_ok=True)
    for path in sorted(model.iterdir()):
        if path.is_file() and path.name not in ("model.json", "drafter.safetensors"):
            write_whole(to / path.name, lambda stream, p=path: stream.write(p.read_bytes()))  # type: ignore[misc]
    written = (drafter / "drafter.safetensors").read_bytes()
    write_whole(to / "drafter.safetensors", lambda stream: stream.write(written))
    write_json(to / "model.json", joined.model_dump(mode="json"))
    return to
