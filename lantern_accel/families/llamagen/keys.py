"""Key layouts: official and Hugging Face names to ours.

Our names are LlamaGen's, with ``w1`` and ``w3`` stacked into ``w13`` and q, k, v into ``wqkv``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from lantern_accel.checkpoints.loading import HARMLESS, Recipe, check_keys, mismatch
from lantern_accel.checkpoints.weights import open_checkpoint

_HF_NAMES = (
    (r"^model\.", ""),
    (r"^lm_head\.", "output."),
    (r"^embed_tokens\.", "tok_embeddings."),
    (r"\.self_attn\.([qkv])_proj\.", r".attention.w\1."),
    (r"\.self_attn\.o_proj\.", ".attention.wo."),
    (r"\.mlp\.gate_proj\.", ".feed_forward.w1."),
    (r"\.mlp\.up_proj\.", ".feed_forward.w3."),
    (r"\.mlp\.down_proj\.", ".feed_forward.w2."),
    (r"\.input_layernorm\.", ".attention_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
)
#: Matrices that we keep stacked, by the names of their parts.
_STACKED = {"wqkv": ("wq", "wk", "wv"), "w13": ("w1", "w3")}


def llamagen_name(key: str) -> str:
    """Return LlamaGen's name of a key in LlamaGen's or the Hugging Face layout."""
    for pattern, name in _HF_NAMES:
        key = re.sub(pattern, name, key)
    return key


def drafter_name(key: str) -> str:
    """Return our name of a key of a published LANTERN drafter, or of our own."""
    name = llamagen_name(key)
    return name.replace("tok_embeddings.", "embed_tokens.", 1)


def sources(keys: Iterable[str], rename: Callable[[str], str]) -> dict[str, tuple[str, ...]]:
    """Return our parameter names with the keys that they are stacked from.

    A second key of one name keeps its own, and parts whose siblings are absent stay as they are, so that
    they are reported as unknown.
    """
    out: dict[str, tuple[str, ...]] = {}
    for key in keys:
        name = rename(key)
        out[key if name in out else name] = (key,)
    for whole, parts in _STACKED.items():
        first = f"{parts[0]}.weight"
        for name in [n for n in out if n.endswith(f".{first}")]:
            stem = name.removesuffix(first)
            names = [f"{stem}{part}.weight" for part in parts]
            if all(n in out for n in names):
                out[f"{stem}{whole}.weight"] = tuple(out.pop(n)[0] for n in names)
    return out


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read one checkpoint file (``.safetensors``, ``.pt``, ``.pth``, ``.bin``) as named tensors.

    Pickles are read with ``weights_only``: no code in them runs. Raises :class:`CheckpointError` for
    a missing, truncated or foreign file.
    """
    checkpoint = open_checkpoint(path)
    return {key: checkpoint.read(key) for key in checkpoint}


def load_into(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    what: str,
    rename: Callable[[str], str] = str,
) -> None:
    """Copy tensors into a module's parameters; every key and every shape must agree.

    ``rename``: from their keys to LlamaGen's. Raises :class:`CheckpointError` naming the first missing or
    unexpected key, or the key with both shapes where the checkpoint disagrees with its config.
    """
    own = dict(module.state_dict())
    given = {
        name: tensors[keys[0]] if len(keys) == 1 else torch.cat([tensors[key] for key in keys])
        for name, keys in sources(tensors, rename).items()
        if name in own or not HARMLESS.search(name)
    }
    for key, tensor in given.items():
        if key in own and tensor.shape != own[key].shape:
            raise mismatch(what, key, list(tensor.shape), list(own[key].shape))
    check_keys(own, {key: Recipe((key,)) for key in given}, given, what)
    module.load_state_dict(given, strict=True)


def load_float(module: nn.Module, path: Path) -> None:
    """Copy a checkpoint file of a module's own names into it, in float32."""
    load_into(module, {k: v.float() for k, v in read_tensors(path).items()}, path.name)
