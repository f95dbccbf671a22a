"""The weights of ``race_lantern.py``: random ones or a folder's, in our names and in LANTERN's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from lantern_accel.decoding.neighbours import neighbour_table
from lantern_accel.families.keys import LLAMA, load_float
from lantern_accel.families.llamagen.drafter import DrafterConfig, EagleDrafter
from lantern_accel.families.llamagen.model import LlamaGenConfig, LlamaGenGPT
from lantern_accel.families.llamagen.official import DRAFTER_RULES

PREFIX = 120


@dataclass(frozen=True)
class Weights:
    """Two modules in float32 on the host, a table of neighbours and one caption."""

    target: LlamaGenGPT
    drafter: EagleDrafter
    neighbours: Tensor
    caption: Tensor
    mask: Tensor


def random_weights(config: LlamaGenConfig, k: int, seed: int) -> Weights:
    """Return seeded random weights whose guided distributions are flat, as visual models' are."""
    torch.manual_seed(seed)
    target = LlamaGenGPT(config)
    drafter = EagleDrafter(drafter_config(config, config.hidden_dim, norm_eps=1e-5))
    for part in (target, drafter):
        for name, weight in part.named_parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)
            elif "norm" not in name:
                nn.init.zeros_(weight)
    caption = torch.randn(PREFIX, config.caption_dim)
    table = neighbour_table(torch.randn(config.vocab_size, 8), k)
    return Weights(target, drafter, table, caption, torch.ones(PREFIX, dtype=torch.bool))


def stored_weights(folder: Path, k: int, row: int) -> Weights:
    """Read a folder's weights and its caption number ``row`` (right-padded)."""
    from safetensors.torch import load_file

    config = LlamaGenConfig.from_official(json.loads((folder / "target_config.json").read_text()))
    facts = json.loads((folder / "drafter_config.json").read_text())
    target = LlamaGenGPT(config)
    load_float(target, folder / "target.safetensors", LLAMA)
    drafter = EagleDrafter(
        drafter_config(config, facts["intermediate_size"], norm_eps=facts["rms_norm_eps"])
    )
    load_float(drafter, folder / "drafter.safetensors", DRAFTER_RULES)
    captions = load_file(folder / "captions.safetensors")
    mask = captions["caption_mask"][row].bool()
    generator = torch.Generator().manual_seed(0)
    codebook = torch.randn(config.vocab_size, 8, generator=generator)
    tables = folder / "proximity.safetensors"
    codebook = load_file(tables)["codebook_raw"] if tables.is_file() else codebook
    return Weights(
        target, drafter, neighbour_table(codebook, k), captions["caption_emb"][row], mask
    )


def drafter_config(config: LlamaGenConfig, ffn_dim: int, norm_eps: float) -> DrafterConfig:
    return DrafterConfig(
        dim=config.dim,
        n_head=config.n_head,
        ffn_dim=ffn_dim,
        vocab_size=config.vocab_size,
        grid=config.grid,
        prefix_length=PREFIX - 1,
        norm_eps=norm_eps,
        mask_padding=False,
    )


def hugging_face_names(module: nn.Module, model: str) -> dict[str, Tensor]:
    """Rename our state dict to the layout of LANTERN's checkpoints; ``model`` prefixes the trunk."""
    out: dict[str, Tensor] = {}
    for key, tensor in module.state_dict().items():
        for ours, theirs in (
            ("tok_embeddings", "embed_tokens"),
            ("attention.wo", "self_attn.o_proj"),
            ("feed_forward.w2", "mlp.down_proj"),
            ("attention_norm", "input_layernorm"),
            ("ffn_norm", "post_attention_layernorm"),
        ):
            key = key.replace(ours, theirs)
        if "attention.wqkv" in key:
            for part, letter in zip(tensor.chunk(3), "qkv", strict=True):
                out[model + key.replace("attention.wqkv", f"self_attn.{letter}_proj")] = part
        elif "feed_forward.w13" in key:
            for part, word in zip(tensor.chunk(2), ("gate", "up"), strict=True):
                out[model + key.replace("feed_forward.w13", f"mlp.{word}_proj")] = part
        elif key == "output.weight":
            out["lm_head.weight"] = tensor
        else:
            out[model + key] = tensor
    return out
