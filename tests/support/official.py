"""Tiny checkpoints in the official layouts, written as a user has them on disk."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lantern_accel.errors import ModelError
from lantern_accel.families.base import Parts
from lantern_accel.models.locate import find_model
from lantern_accel.nn.vq import VQConfig, VQModel
from support.golden import golden


def gpt_weights(
    seed: int = 0,
    *,
    dim: int = 32,
    layers: int = 2,
    ffn: int = 48,
    vocab: int = 64,
    classes: int | None = None,
    caption_dim: int = 24,
    prefix: int = 120,
) -> dict[str, Tensor]:
    """Return random weights under LlamaGen's official keys; with ``classes`` a class-conditional one."""
    g = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g) / shape[-1] ** 0.5

    out = {"tok_embeddings.weight": torch.randn(vocab, dim, generator=g)}
    if classes is not None:
        out["cls_embedding.embedding_table.weight"] = torch.randn(classes + 1, dim, generator=g)
    else:
        out["cls_embedding.cap_proj.fc1.weight"] = matrix(dim, caption_dim)
        out["cls_embedding.cap_proj.fc2.weight"] = matrix(dim, dim)
        out["cls_embedding.uncond_embedding"] = matrix(prefix, caption_dim)
    for i in range(layers):
        out[f"layers.{i}.attention.wqkv.weight"] = matrix(3 * dim, dim)
        out[f"layers.{i}.attention.wo.weight"] = matrix(dim, dim)
        out[f"layers.{i}.feed_forward.w1.weight"] = matrix(ffn, dim)
        out[f"layers.{i}.feed_forward.w3.weight"] = matrix(ffn, dim)
        out[f"layers.{i}.feed_forward.w2.weight"] = matrix(dim, ffn)
        out[f"layers.{i}.attention_norm.weight"] = 1 + 0.1 * torch.randn(dim, generator=g)
        out[f"layers.{i}.ffn_norm.weight"] = 1 + 0.1 * torch.randn(dim, generator=g)
    out["norm.weight"] = 1 + 0.1 * torch.randn(dim, generator=g)
    out["output.weight"] = 2 * matrix(vocab, dim)
    return out


def hugging_face(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename and split an official state dict as LANTERN's converted checkpoints are."""
    out: dict[str, Tensor] = {}
    names = {
        "attention.wo": "self_attn.o_proj",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "tok_embeddings": "embed_tokens",
    }
    for key, tensor in tensors.items():
        if key == "output.weight":
            out["lm_head.weight"] = tensor
            continue
        if "attention.wqkv" in key:
            for part, name in zip(tensor.chunk(3), "qkv", strict=True):
                out["model." + key.replace("attention.wqkv", f"self_attn.{name}_proj")] = part
            continue
        for ours, theirs in names.items():
            key = key.replace(ours, theirs)
        out[f"model.{key}"] = tensor
    return {key: tensor.contiguous() for key, tensor in out.items()}


def vq_weights(
    codes: int, *, seed: int = 1, ch_mult: tuple[int, ...] = (1, 1)
) -> dict[str, Tensor]:
    """Return random weights of a tiny image tokenizer under LlamaGen's keys."""
    torch.manual_seed(seed)
    config = VQConfig(
        ch=32, ch_mult=ch_mult, num_res_blocks=1, z_channels=32, codebook_size=codes, codebook_dim=8
    )
    return dict(VQModel(config).state_dict())


def drafter_weights(
    seed: int = 2, *, dim: int = 32, ffn: int = 48, vocab: int = 64
) -> dict[str, Tensor]:
    """Return random weights of a drafter under LANTERN's keys: eleven of them, no input norm."""
    g = torch.Generator().manual_seed(seed)
    out = {
        "embed_tokens.weight": torch.randn(vocab, dim, generator=g),
        "fc.weight": torch.randn(dim, 2 * dim, generator=g) / (2 * dim) ** 0.5,
        "fc.bias": 0.1 * torch.randn(dim, generator=g),
        "layers.0.post_attention_layernorm.weight": 1 + 0.1 * torch.randn(dim, generator=g),
        "layers.0.mlp.gate_proj.weight": torch.randn(ffn, dim, generator=g) / dim**0.5,
        "layers.0.mlp.up_proj.weight": torch.randn(ffn, dim, generator=g) / dim**0.5,
        "layers.0.mlp.down_proj.weight": torch.randn(dim, ffn, generator=g) / ffn**0.5,
    }
    for name in "qkvo":
        weight = torch.randn(dim, dim, generator=g) / dim**0.5
        out[f"layers.0.self_attn.{name}_proj.weight"] = weight
    return out


def drafter_config(
    input_type: str, *, dim: int = 32, ffn: int = 48, vocab: int = 64
) -> dict[str, Any]:
    """Return a drafter's ``config.json`` as LANTERN publishes it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": dim,
        "caption_dim": 24,
        "intermediate_size": ffn,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "num_key_value_heads": 4,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "vocab_size": vocab,
        "input_type": input_type,
    }


def write_trained(path: Path, weights: dict[str, Tensor], wrap: str | None = "model") -> Path:
    """Write a ``.pt`` as LlamaGen's trainers do: under ``model``, with steps and arguments."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content: Any = weights
    if wrap is not None:
        content = {wrap: weights, "steps": 7, "args": argparse.Namespace(lr=1e-4)}
    torch.save(content, path)
    return path


def write_sizes(path: Path, **sizes: Any) -> None:
    """Write the configuration that sizes outside the published ones need."""
    path.write_text(json.dumps(sizes))


def write_drafter(folder: Path, weights: dict[str, Tensor], config: dict[str, Any]) -> Path:
    """Write a drafter's folder: ``config.json`` and ``pytorch_model.bin``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(weights, folder / "pytorch_model.bin")
    return folder


def write_shards(
    folder: Path, weights: dict[str, Tensor], count: int, *, index: bool = True
) -> Path:
    """Write a sharded safetensors checkpoint in Hugging Face's naming."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = sorted(weights)
    per = -(-len(keys) // count)
    where = {}
    for number in range(count):
        name = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        part = {k: weights[k].contiguous() for k in keys[number * per : (number + 1) * per]}
        where.update(dict.fromkeys(part, name))
        save_file(part, folder / name, metadata={"format": "pt"})
    if index:
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {"total_size": 1}, "weight_map": where})
        )
    return folder


def shard_folder(
    folder: Path,
    weights: dict[str, Tensor] | None = None,
    count: int = 3,
    *,
    index: bool = True,
) -> Path:
    """Write a tiny text-conditional GPT as LANTERN's converted checkpoints lie, without its VQ."""
    given = hugging_face(gpt_weights()) if weights is None else weights
    write_shards(folder, given, count, index=index)
    write_sizes(folder / "config.json", num_attention_heads=4, input_type="t2i")
    return folder


def class_folder(folder: Path, *, classes: int = 7, **sizes: int) -> Path:
    """LlamaGen's ``pretrained_models`` with a tiny class-conditional GPT, 24 x 24 tokens, and its VQ.

    ``sizes``: further ones of its configuration, such as a ``block_size`` of fewer tokens.
    """
    write_trained(folder / "c2i_tiny_384.pt", gpt_weights(classes=classes), None)
    write_sizes(folder / "c2i_tiny_384.json", n_head=4, **sizes)
    write_trained(folder / "vq_ds16_c2i.pt", vq_weights(64))
    return folder


def text_folder(folder: Path) -> Path:
    """LlamaGen's ``pretrained_models`` with a tiny text-conditional GPT, 16 x 16 tokens, and its VQ."""
    write_trained(folder / "t2i_tiny_stage1_256.pt", gpt_weights())
    write_sizes(folder / "t2i_tiny_stage1_256.json", n_head=4)
    write_trained(folder / "vq_ds16_t2i.pt", vq_weights(64))
    return folder


def write_features(path: Path, valid: list[int], *, width: int = 24, length: int = 120) -> Path:
    """Write caption features as a T5 gives them: right-padded, the pads not zero."""
    g = torch.Generator().manual_seed(9)
    features = torch.randn(len(valid), length, width, generator=g)
    mask = (torch.arange(length) < torch.tensor(valid).unsqueeze(1)).to(torch.uint8)
    save_file({"embeddings": features, "mask": mask}, path)
    return path


def recorded_captions(padded: str = "right") -> tuple[Tensor, Tensor]:
    """Return the recorded captions padded on the right, as T5 does, or on the left; pads are not zero."""
    io = golden("llamagen_t2i/io")
    features, mask = io["cond_embeds"], io["cond_masks"].bool()
    noise = torch.randn(features.shape, generator=torch.Generator().manual_seed(1))
    if padded == "left":
        return torch.where(mask.unsqueeze(-1), features, noise), mask
    rows = [torch.cat((f[m], n[~m])) for f, n, m in zip(features, noise, mask, strict=True)]
    return torch.stack(rows), mask.flip(1)


def add_drafter(folder: Path, input_type: str = "t2i", **sizes: int) -> Path:
    """Write LANTERN's drafter where it lies in a folder of official files; return its folder."""
    return write_drafter(
        folder / "trained_drafters" / "llamagen_drafter",
        drafter_weights(**sizes),
        drafter_config(input_type, **sizes),
    )


def refused(path: Path, parts: Parts | None = None) -> str:
    """Return the sentence with which a model is refused."""
    with pytest.raises(ModelError) as caught:
        find_model(path, parts)
    text = str(caught.value)
    assert "\n" not in text and "Traceback" not in text
    return text


class Hostile:
    """An object whose pickle makes a folder when it is read as code."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)
