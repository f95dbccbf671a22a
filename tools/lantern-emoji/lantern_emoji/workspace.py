"""The stages of the emoji model's training: each reads what the one before it wrote.

``WORK/text_tokenizer.json``, ``WORK/tokenizer/``, ``WORK/target/``, ``WORK/drafter/``;
``python tools/lantern-emoji bundle`` puts their results together as a model folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lantern_accel.errors import DataError
from lantern_accel.families.llamagen.text import TextEncoderConfig
from lantern_accel.families.tokenizer import read_tokenizer
from lantern_accel.files import write_whole
from lantern_accel.progress import Progress
from lantern_accel.training.device import TrainDevice
from lantern_accel.training.drafter import DrafterTrainConfig, start_of, train_drafter
from lantern_accel.training.loop import TrainConfig
from lantern_emoji.batches import Batches, SceneTokens
from lantern_emoji.captions import word_corpus
from lantern_emoji.catalogue import COMMON
from lantern_emoji.data import EmojiDataset, load_data
from lantern_emoji.encode import encode_dataset, encode_scenes
from lantern_emoji.features import TextTargetFeatures
from lantern_emoji.folder import load_tokenizer, read_mixture, read_target
from lantern_emoji.render import SIZE
from lantern_emoji.samples import SampleSheet
from lantern_emoji.scenes import SCENE_WORDS, draw_scenes
from lantern_emoji.target import TargetConfig, fresh_target
from lantern_emoji.target_training import train_target
from lantern_emoji.tokenizer import TokenizerConfig, train_tokenizer
from lantern_emoji.vocabulary import train_text_tokenizer

TOKENS = "tokens.npy"
SCENES = "scene_tokens.npz"


def folder_of(config: TrainConfig) -> str:
    """Return where in the training folder a stage keeps what it makes."""
    if isinstance(config, TokenizerConfig):
        return "decoder" if config.part == "decoder" else "tokenizer"
    return config.folder if isinstance(config, TargetConfig) else "drafter"


def _need(path: Path, command: str) -> Path:
    if not path.exists():
        raise DataError(f"{path} is not there; run `python tools/lantern-emoji {command}` first")
    return path


def _text_tokenizer(work: Path, data: EmojiDataset) -> Any:
    path = work / "text_tokenizer.json"
    if not path.is_file():
        write_whole(path, train_text_tokenizer(word_corpus(data.records, SCENE_WORDS)).to_str())
    return read_tokenizer(path)


def _tokens(
    work: Path, data: EmojiDataset, device: TrainDevice, progress: Progress | None
) -> np.ndarray[Any, Any]:
    folder = _need(work / "tokenizer" / "vq.safetensors", "tokenizer").parent
    path = folder / TOKENS
    if not path.is_file():
        vq = load_tokenizer(folder, device.device)
        encoded = encode_dataset(vq, data, dtype=device.dtype, progress=progress)
        write_whole(path, lambda stream: np.save(stream, encoded))
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
    vq = load_tokenizer(folder, device.device)
    codes = encode_scenes(vq, data, scenes, dtype=device.dtype, progress=progress)
    write_whole(path, lambda stream: np.savez(stream, key=np.array(key), codes=codes))
    return SceneTokens(scenes, codes)


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
    (out / TOKENS).unlink(missing_ok=True)
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
    held_out = partial(
        Batches,
        data.records,
        tokens,
        tokenizer,
        text,
        "heldout",
        default_style=config.default_style,
    )
    judged = {"heldout_nll": held_out()}
    if scenes is not None and any(scene.split == "heldout" for scene in scenes.scenes):
        judged["heldout_scenes_nll"] = held_out(scenes=scenes, scene_share=1.0)
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
    train, judged = target_batches(work, read_mixture(work), target.text.config, device, progress)
    source = TextTargetFeatures(
        target, train, judged["heldout_nll"], device,
        text_dropout=config.text_dropout, compile=config.compile, taps=config.taps,
    )  # fmt: skip
    start = start_of(config, work / "drafter")
    return train_drafter(
        config,
        source,
        work / "drafter",
        device,
        progress,
        resume=resume,
        start=start,
    )


#: Of each stage its settings and its trainer.
STAGES: dict[str, tuple[type[TrainConfig], Callable[..., dict[str, Any]]]] = {
    "tokenizer": (TokenizerConfig, run_tokenizer),
    "target": (TargetConfig, run_target),
    "drafter": (DrafterTrainConfig, run_drafter),
}
