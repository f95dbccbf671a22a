"""Tiny model folders with random weights, as ``--model`` takes them."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def small_tokenizer(words: Sequence[str]) -> Tokenizer:
    """Return a tokenizer of these words, which spells all others of letters and digits."""
    letters = string.ascii_lowercase + string.digits
    entries = ["[PAD]", "[UNK]", *letters, *("##" + letter for letter in letters), *words]
    vocabulary = {entry: i for i, entry in enumerate(entries)}
    tokenizer = Tokenizer(
        models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=64)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def write_tiny_model(
    folder: Path, *, conditioning: str = "text", drafter: bool = True, grid: int = 4, seed: int = 5
) -> Path:
    """Write a model whose images have ``grid * grid`` tokens."""
    from safetensors.torch import save_file

    from lantern_accel.families.llamagen.model import (
        DrafterConfig,
        LlamaGenConfig,
        LlamaGenDrafter,
        LlamaGenGPT,
        LlamaGenManifest,
    )
    from lantern_accel.families.llamagen.text import TextEncoder, TextEncoderConfig
    from lantern_accel.nn.vq import VQConfig, VQModel
    from lantern_accel.strategy.choose import ModelDefaults
    from lantern_accel.strategy.values import DynamicTree, Sampling, StaticTree

    text = conditioning == "text"
    prefix = 5 if text else 1
    target = LlamaGenConfig(
        dim=32,
        n_layer=2,
        n_head=4,
        ffn_dim=48,
        vocab_size=48,
        grid=grid,
        conditioning=conditioning,  # type: ignore[arg-type]
        prefix_length=prefix,
        num_classes=7,
        caption_dim=24,
    )
    draft = DrafterConfig(
        dim=32, n_head=4, ffn_dim=48, vocab_size=48, grid=grid, prefix_length=prefix - 1
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = small_tokenizer(["blue", "dog", "face", "fish", "heart", "in", "red", "sea", "the"])
    tokenizer.save(str(folder / "text_tokenizer.json"), pretty=False)
    words = TextEncoderConfig(
        vocab_size=tokenizer.get_vocab_size(), dim=24, n_layer=1, prefix_length=prefix
    )
    vq = VQConfig(
        ch=32, ch_mult=(1, 1), num_res_blocks=1, z_channels=32, codebook_size=48, codebook_dim=4
    )
    torch.manual_seed(seed)
    parts: dict[str, Any] = {"target": LlamaGenGPT(target), "vq": VQModel(vq)}
    if text:
        parts["text"] = TextEncoder(words)
    if drafter:
        parts["drafter"] = LlamaGenDrafter(draft)
    for name, module in parts.items():
        save_file(
            {k: v.contiguous() for k, v in module.state_dict().items()},
            folder / f"{name}.safetensors",
        )
    manifest = LlamaGenManifest(
        name="tiny",
        target=target,
        drafter=draft if drafter else None,
        text=words if text else None,
        vq=vq,
        defaults=ModelDefaults(
            sampling=Sampling(cfg_scale=2.0),
            static_tree=StaticTree(paths=((0,), (1,), (0, 0))),
            dynamic_tree=DynamicTree(top_k=2, depth=1, total=5),
        ),
    )
    (folder / "model.json").write_text(manifest.model_dump_json())
    return folder
