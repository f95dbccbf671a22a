"""Reading checkpoints: official and Hugging Face key layouts to ours, with errors that name the key.

Our names are LlamaGen's, with ``w1`` and ``w3`` stacked into ``w13`` and q, k, v into ``wqkv``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from lantern_accel.errors import CheckpointError

#: Keys that released files may carry and that hold nothing we need.
HARMLESS = re.compile(r"(^|\.)(freqs_cis|rope\.freqs|rotary_emb\.inv_freq|codebook_used)$|^loss\.")

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


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read one checkpoint file (``.safetensors``, ``.pt``, ``.pth``, ``.bin``) as named tensors.

    Pickles are read with ``weights_only``: no code in them runs. Raises :class:`CheckpointError` for
    a missing, truncated or foreign file.
    """
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint file {path}; check the path")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(path))
        with torch.serialization.safe_globals([__import__("argparse").Namespace]):
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint ({type(error).__name__}: {error}); it may be "
            "truncated or of another format: fetch it again and compare its size"
        ) from error
    for name in ("model", "module", "state_dict"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(name), Mapping):
            loaded = loaded[name]
            break
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{path} holds a {type(loaded).__name__}, not a state dict")
    return {k: v for k, v in loaded.items() if isinstance(v, Tensor)}


def _stack(tensors: dict[str, Tensor], parts: tuple[str, ...], whole: str) -> None:
    """Replace ``parts`` by their concatenation under the name ``whole``, wherever all are there."""
    first = re.compile(rf"(.*\.){re.escape(parts[0])}\.weight$")
    for key in [k for k in tensors if first.match(k)]:
        stem = key[: -len(f"{parts[0]}.weight")]
        names = [f"{stem}{part}.weight" for part in parts]
        if all(name in tensors for name in names):
            tensors[f"{stem}{whole}.weight"] = torch.cat([tensors.pop(name) for name in names])


def to_llamagen_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename a LlamaGen GPT state dict, official or Hugging Face layout, to our names."""
    out: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        for pattern, name in _HF_NAMES:
            key = re.sub(pattern, name, key)
        out[key] = tensor
    _stack(out, ("wq", "wk", "wv"), "wqkv")
    _stack(out, ("w1", "w3"), "w13")
    return out


def to_drafter_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename a published LANTERN drafter's state dict to our names."""
    out = to_llamagen_names(tensors)
    if "tok_embeddings.weight" in out:
        out["embed_tokens.weight"] = out.pop("tok_embeddings.weight")
    return out


def load_into(module: nn.Module, tensors: Mapping[str, Tensor], what: str) -> None:
    """Copy tensors into a module's parameters; every key and every shape must agree.

    Raises :class:`CheckpointError` naming the first missing or unexpected key, or the key with both
    shapes where the checkpoint disagrees with its config.
    """
    own = dict(module.state_dict())
    given = {k: v for k, v in tensors.items() if k in own or not HARMLESS.search(k)}
    for key, tensor in given.items():
        if key in own and tuple(tensor.shape) != tuple(own[key].shape):
            raise CheckpointError(
                f"{what}: {key} has shape {list(tensor.shape)} in the checkpoint, but its config "
                f"says {list(own[key].shape)}; the checkpoint and the config are not of one model"
            )
    missing = [k for k in own if k not in given]
    extra = [k for k in given if k not in own]
    if missing or extra:
        parts = []
        if missing:
            parts.append(f"{len(missing)} keys are missing, the first is {missing[0]!r}")
        if extra:
            parts.append(f"{len(extra)} keys are unknown, the first is {extra[0]!r}")
        raise CheckpointError(
            f"{what}: {' and '.join(parts)}; the checkpoint is of another architecture, or a part "
            "of it is absent"
        )
    module.load_state_dict(given, strict=True)
