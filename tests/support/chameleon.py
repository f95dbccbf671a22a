"""Tiny Chameleon checkpoints in every published layout, written to disk as their READMEs say.

The conversions between layouts are written out here from the official conversion script, index by
index, so that they share nothing with the loader that is tested.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lantern_accel.checkpoints.loading import Recipe, fill
from lantern_accel.checkpoints.weights import Checkpoint, open_checkpoint
from lantern_accel.families.chameleon.layouts import (
    DRAFTER_RULES,
    RULES,
    chameleon_vq_config,
    trunk_changes,
)
from lantern_accel.families.chameleon.model import TrunkConfig
from lantern_accel.families.chameleon.text import image_token_name
from lantern_accel.families.keys import recipes_of, rename_keys
from lantern_accel.nn.rotary import RotaryNetwork
from lantern_accel.nn.vq import VQModel
from support import official
from support.official import write_shards

NAMES = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "self_attn.q_proj.weight": "attention.wq.weight",
    "self_attn.k_proj.weight": "attention.wk.weight",
    "self_attn.v_proj.weight": "attention.wv.weight",
    "self_attn.o_proj.weight": "attention.wo.weight",
    "self_attn.q_norm.weight": "attention.q_normalization.weight",
    "self_attn.q_norm.bias": "attention.q_normalization.bias",
    "self_attn.k_norm.weight": "attention.k_normalization.weight",
    "self_attn.k_norm.bias": "attention.k_normalization.bias",
    "mlp.gate_proj.weight": "feed_forward.w1.weight",
    "mlp.up_proj.weight": "feed_forward.w3.weight",
    "mlp.down_proj.weight": "feed_forward.w2.weight",
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}


def target_recipes(checkpoint: Checkpoint, config: TrunkConfig) -> Mapping[str, Recipe]:
    """Say where the parameters of a target lie in a checkpoint."""
    return recipes_of(rename_keys(checkpoint, RULES), trunk_changes(checkpoint, config))


def drafter_recipes(checkpoint: Checkpoint, config: TrunkConfig) -> Mapping[str, Recipe]:
    """Say where the parameters of a drafter lie in a checkpoint."""
    return recipes_of(rename_keys(checkpoint, DRAFTER_RULES), trunk_changes(checkpoint, config))


def fill_from(
    path: Path,
    module: RotaryNetwork,
    recipes: Callable[[Checkpoint, TrunkConfig], Mapping[str, Recipe]],
) -> None:
    """Fill a target or a drafter from the files at a path, in float32."""
    checkpoint, cpu = open_checkpoint(path), torch.device("cpu")
    made = recipes(checkpoint, module.config)
    fill(module, checkpoint, made, dtype=torch.float32, device=cpu, what=path.name)


def random_hf_weights(
    seed: int,
    *,
    dim: int = 32,
    heads: int = 4,
    kv_heads: int = 4,
    layers: int = 2,
    ffn: int = 48,
    tokens: int = 64,
    parts: int = 1,
) -> dict[str, Tensor]:
    """Draw a target in Hugging Face's layout, with norms ``[parts, d]`` of queries and keys."""
    g = torch.Generator().manual_seed(seed)
    d = dim // heads

    def matrix(rows: int, columns: int, gain: float = 1.5) -> Tensor:
        return torch.randn(rows, columns, generator=g) * gain / columns**0.5

    out = {
        "model.embed_tokens.weight": torch.randn(tokens, dim, generator=g),
        "model.norm.weight": 1 + 0.25 * torch.randn(dim, generator=g),
        "lm_head.weight": matrix(tokens, dim, 3.0),
    }
    for i in range(layers):
        at = f"model.layers.{i}."
        out[at + "self_attn.q_proj.weight"] = matrix(heads * d, dim)
        out[at + "self_attn.k_proj.weight"] = matrix(kv_heads * d, dim)
        out[at + "self_attn.v_proj.weight"] = matrix(kv_heads * d, dim)
        out[at + "self_attn.o_proj.weight"] = matrix(dim, heads * d)
        for norm in ("q_norm", "k_norm"):
            out[f"{at}self_attn.{norm}.weight"] = 1 + 0.4 * torch.randn(parts, d, generator=g)
            out[f"{at}self_attn.{norm}.bias"] = 0.4 * torch.randn(parts, d, generator=g)
        out[at + "mlp.gate_proj.weight"] = matrix(ffn, dim)
        out[at + "mlp.up_proj.weight"] = matrix(ffn, dim)
        out[at + "mlp.down_proj.weight"] = matrix(dim, ffn)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out[f"{at}{norm}.weight"] = 1 + 0.25 * torch.randn(dim, generator=g)
    return out


def interleaved(rows: Tensor, head_dim: int) -> Tensor:
    """Undo the official conversion: row ``i`` of a head's halves back to rows ``2i`` and ``2i + 1``."""
    out = torch.empty_like(rows)
    for start in range(0, rows.shape[0], head_dim):
        for i in range(head_dim // 2):
            out[start + 2 * i] = rows[start + i]
            out[start + 2 * i + 1] = rows[start + head_dim // 2 + i]
    return out


def unpermuted(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Turn Hugging Face's layout (norms ``[1, d]``) into GAIR's fork's: same keys, nothing permuted."""
    out = dict(weights)
    for key, value in weights.items():
        if ".q_norm." in key or ".k_norm." in key:
            assert value.shape[0] == 1
            out[key] = interleaved(value[0], value.shape[1])
        elif ".q_proj." in key or ".k_proj." in key:
            norm = key.replace("_proj", "_norm")
            out[key] = interleaved(value, weights[norm].shape[-1])
    return out


def original(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Turn Hugging Face's layout (norms ``[1, d]``) into the original consolidated one."""
    out: dict[str, Tensor] = {}
    for key, value in unpermuted(weights).items():
        if key in NAMES:
            out[NAMES[key]] = value
            continue
        layer, _, name = key.removeprefix("model.layers.").partition(".")
        out[f"layers.{layer}.{LAYER_NAMES[name]}"] = value
    return out


def vocabulary(codes: int, words: str, *, lumina: bool) -> dict[str, int]:
    """Return a small vocabulary with the published names, image tokens from 4 on."""
    names = ["<s>", "<pad>", "</s>", "<unk>", *(image_token_name(c) for c in range(codes))]
    names += ["<eoss>", "<racm3:break>", "<reserved08706>"]
    if lumina:
        names += ["<reserved08799>", *(f"<reserved{8800 + n:05d}>" for n in range(40))]
    names += [word for word in words.split() if word not in names]
    return {name: i for i, name in enumerate(names)}


def write_text_tokenizer(path: Path, names: Mapping[str, int]) -> None:
    """Write ``text_tokenizer.json``: words split at white space."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    tokenizer = Tokenizer(WordLevel(dict(names), unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))


def hf_config(weights: Mapping[str, Tensor], heads: int, **more: Any) -> dict[str, Any]:
    """Return the ``config.json`` that Hugging Face's layout has."""
    tokens, dim = weights["model.embed_tokens.weight"].shape
    return {
        "architectures": ["ChameleonForConditionalGeneration"],
        "model_type": "chameleon",
        "hidden_size": dim,
        "vocab_size": tokens,
        "num_attention_heads": heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "swin_norm": False,
        "max_position_embeddings": 4096,
        **more,
    }


def write_hf(
    folder: Path, weights: Mapping[str, Tensor], config: Mapping[str, Any], shards: int = 2
) -> None:
    """Write Hugging Face's layout: ``config.json``, numbered shards and their index."""
    write_shards(folder, dict(weights), shards)
    (folder / "config.json").write_text(json.dumps(dict(config)))


def write_original(folder: Path, weights: Mapping[str, Tensor], heads: int) -> None:
    """Write the original layout: ``models/7b`` with the parameters in two files."""
    home = folder / "models" / "7b"
    home.mkdir(parents=True, exist_ok=True)
    torch.save({**original(weights), "rope.freqs": None}, home / "consolidated.pth")
    model = {"dim": weights["model.norm.weight"].numel(), "n_heads": heads, "norm_eps": 1e-5}
    model["rope_theta"] = 10000.0
    (home / "params.json").write_text(json.dumps({"model": model}))
    (home / "consolidate_params.json").write_text(json.dumps({"model_parallel_size": 1}))


def random_drafter_weights(
    seed: int, *, dim: int = 32, heads: int = 4, ffn: int = 48, tokens: int = 64
) -> dict[str, Tensor]:
    """Draw a drafter as LANTERN publishes them: 16 keys, norms ``[heads, d]``."""
    g = torch.Generator().manual_seed(seed)
    block = random_hf_weights(
        seed, dim=dim, heads=heads, kv_heads=heads, layers=1, ffn=ffn, tokens=tokens, parts=heads
    )
    out = {k.removeprefix("model."): v for k, v in block.items() if k.startswith("model.layers")}
    out["embed_tokens.weight"] = torch.randn(tokens, dim, generator=g)
    out["fc.weight"] = torch.randn(dim, 2 * dim, generator=g) / (2 * dim) ** 0.5
    out["fc.bias"] = 0.1 * torch.randn(dim, generator=g)
    return out


def tiny_vq(seed: int, codes: int) -> VQModel:
    """Draw a VQGAN of two levels: a code is 2x2 pixels."""
    torch.manual_seed(seed)
    sizes = {"ch": 32, "ch_mult": (1, 1), "num_res_blocks": 1, "z_channels": 32}
    config = chameleon_vq_config(**sizes, codebook_size=codes, codebook_dim=4)
    return VQModel(config, attend=()).eval().requires_grad_(False)


def meta_names(model: VQModel) -> dict[str, Tensor]:
    """Return a VQGAN's tensors under the names of Meta's ``vqgan.ckpt``."""
    last = len(model.config.ch_mult) - 1

    def theirs(name: str) -> str:
        for i, part in enumerate(("block_1", "attn_1", "block_2")):
            name = name.replace(f".mid.{i}.", f".mid.{part}.")
        name = name.replace(".res.", ".block.").replace("encoder.conv_blocks.", "encoder.down.")
        up = r"decoder\.conv_blocks\.(\d+)"
        return re.sub(up, lambda found: f"decoder.up.{last - int(found[1])}", name)

    return {theirs(name): tensor for name, tensor in model.state_dict().items()}


def write_vqgan(path: Path, model: VQModel) -> None:
    """Write ``vqgan.ckpt``: the state dict, and parts of a loss that nothing needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {**meta_names(model), "loss.discriminator.main.0.weight": torch.zeros(1)}
    torch.save({"state_dict": state}, path)


def write_anole(folder: Path, *, layout: str, codes: int = 16, side: int = 4) -> Path:
    """Write a tiny Anole, ``layout`` "original" or "hf", with tokenizer, VQGAN and drafter.

    ``side`` codes along a picture's side; the original layout always has 32.
    """
    names = vocabulary(codes, "a red fox on the moon", lumina=False)
    weights = random_hf_weights(11, tokens=len(names))
    if layout == "original":
        write_original(folder, weights, 4)
    else:
        resolution = {"vq_config": {"resolution": 2 * side, "ch_mult": [1, 1]}}
        write_hf(folder, weights, hf_config(weights, 4, **resolution))
    write_text_tokenizer(folder / "tokenizer" / "text_tokenizer.json", names)
    write_vqgan(folder / "tokenizer" / "vqgan.ckpt", tiny_vq(12, codes))
    write_drafter(folder / "drafter", random_drafter_weights(13, tokens=len(names)))
    return folder


def write_drafter(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a drafter's folder as LANTERN publishes it for Anole."""
    official.write_drafter(folder, dict(weights), {"rms_norm_eps": 1e-5, "rope_theta": 10000.0})


def write_lumina(folder: Path, *, codes: int = 16) -> Path:
    """Write a tiny Lumina-mGPT-7B-512 in Hugging Face's layout, norms ``[1, d]``, VQGAN in its shards."""
    words = "Generate an image of 16x8 8x8 according to the following prompt: a red fox"
    names = vocabulary(codes, words, lumina=True)
    weights = random_hf_weights(21, tokens=len(names))
    picture = {f"model.vqmodel.{k}": v for k, v in meta_names(tiny_vq(22, codes)).items()}
    config = hf_config(weights, 4, mask_image_logits=False, dropout=0.05)
    write_hf(folder, {**weights, **picture}, config)
    write_text_tokenizer(folder / "tokenizer.json", names)
    return folder
