"""The sizes of Chameleon's models and their parts, read off the shapes of a checkpoint's tensors.

A configuration gives what shapes cannot say: epsilon, the rotation's base, the longest sequence, where
the norms are. Weights are not read.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lantern_accel.checkpoints.layouts import check_said, explained, read_json
from lantern_accel.checkpoints.weights import Checkpoint
from lantern_accel.errors import CheckpointError
from lantern_accel.families.chameleon.drafter import ChameleonDrafterConfig
from lantern_accel.families.chameleon.keys import DRAFTER, key_layout
from lantern_accel.families.chameleon.model import ChameleonConfig
from lantern_accel.families.chameleon.text import SpecialIds
from lantern_accel.families.image_tokenizer import vq_names, vq_sizes
from lantern_accel.families.layout import KeyLayout
from lantern_accel.nn.vq import VQConfig

#: Where Hugging Face's files keep the picture tokenizer.
VQ_PREFIX = "model.vqmodel."
#: Sizes that configurations repeat, Hugging Face's and Meta's, with our names.
_SIZES = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "dim": "dim",
    "n_layers": "n_layer",
    "n_heads": "n_head",
}
#: What a drafter has from its target.
SHARED = ("image_first", "image_codes", "newline_id", "height", "width", "prefix_length")


def said_of(weights: Path) -> dict[str, Any]:
    """Return ``config.json`` or ``params.json`` beside weights, flat; {} without one."""
    folder = weights if weights.is_dir() else weights.parent
    found: dict[str, Any] = {}
    for name in ("config.json", "params.json", "consolidate_params.json"):
        if (folder / name).is_file():
            content = read_json(folder / name)
            inner = content.get("model")
            found.update({**content, **(inner if isinstance(inner, dict) else {})})
    return found


def norm_shape(checkpoint: Checkpoint, layout: KeyLayout) -> tuple[int, ...]:
    """Return the shape of the first layer's query norm, which tells the pairing."""
    return checkpoint.shape(f"{layout.block}{layout.q_norm}.weight".format(i=0))


def _trunk_sizes(checkpoint: Checkpoint, layout: KeyLayout) -> dict[str, Any]:
    """Return the sizes of the blocks, read off shapes."""
    block = layout.block.format(i=0)
    token_count, dim = checkpoint.shape(layout.embedding)
    head_dim = norm_shape(checkpoint, layout)[-1]
    if block + layout.q in checkpoint:
        q_rows = checkpoint.shape(block + layout.q)[0]
        kv_rows = checkpoint.shape(block + layout.k)[0]
    else:
        q_rows = dim
        kv_rows = (checkpoint.shape(block + layout.qkv)[0] - q_rows) // 2
    layers = layout.layers(checkpoint)
    if not layers:
        raise CheckpointError(f"{checkpoint.path} has no layers; fetch it again")
    return {
        "dim": dim,
        "n_layer": layers,
        "n_head": q_rows // head_dim,
        "n_kv_head": 0 if kv_rows == q_rows else kv_rows // head_dim,
        "ffn_dim": checkpoint.shape(block + layout.down)[1],
        "token_count": token_count,
    }


def _said(config: dict[str, Any]) -> dict[str, Any]:
    """Return what a configuration says that shapes do not."""
    rope = config.get("rope_parameters") or {}
    values = {
        "norm_eps": config.get("rms_norm_eps", config.get("norm_eps")),
        "rope_base": config.get("rope_theta", rope.get("rope_theta")),
        "swin_norm": config.get("swin_norm"),
        "max_positions": config.get("max_position_embeddings"),
    }
    return {name: value for name, value in values.items() if value is not None}


def target_config(
    checkpoint: Checkpoint,
    layout: KeyLayout,
    config: dict[str, Any],
    ids: SpecialIds,
    newline: bool,
    side: int,
) -> ChameleonConfig:
    """Return a target's configuration.

    ``newline``: rows end in a token of their own; ``side``: codes along the default picture's side.
    Raises :class:`CheckpointError` where the configuration is of other weights.
    """
    sizes = _trunk_sizes(checkpoint, layout)
    check_said(checkpoint.path, config, {name: sizes[size] for name, size in _SIZES.items()})
    return ChameleonConfig(
        **sizes,
        **_said(config),
        image_first=ids.image_first,
        image_codes=ids.image_codes,
        newline_id=ids.newline if newline else None,
        height=side,
        width=side,
    )


def drafter_config(
    checkpoint: Checkpoint, path: Path, target: ChameleonConfig
) -> ChameleonDrafterConfig:
    """Return a published drafter's configuration; raises where it is of another target."""
    layout = key_layout(checkpoint)
    if layout is not DRAFTER:
        raise CheckpointError(
            f"{path} is not a drafter for Anole or Lumina: it lacks their norms of queries and keys; "
            "name another with --drafter, or decode without one: --drafter none"
        )
    sizes = _trunk_sizes(checkpoint, layout)
    if (sizes["dim"], sizes["token_count"]) != (target.dim, target.token_count):
        raise CheckpointError(
            f"the drafter {path} has width {sizes['dim']} and {sizes['token_count']} tokens, the model "
            f"{target.dim} and {target.token_count}, so it was trained for another model; name another "
            "with --drafter, or decode without one: --drafter none"
        )
    if sizes["n_layer"] != 1:
        raise CheckpointError(
            f"the drafter {path} has {sizes['n_layer']} layers, only drafters of one layer are "
            "supported; name another with --drafter"
        )
    said = _said(said_of(path))
    said.pop("max_positions", None)
    with explained(
        lambda why: (
            f"the config.json of the drafter {path} is wrong ({why}); take it from where the "
            "drafter is from"
        )
    ):
        return ChameleonDrafterConfig(
            **sizes,
            **said,
            **{name: getattr(target, name) for name in SHARED},
            bias="fc.bias" in checkpoint,
        )


def fitting_drafter(target: ChameleonConfig) -> ChameleonDrafterConfig:
    """Return the sizes of a drafter to train for a target: one block as the target's are."""
    shape = ("dim", "n_head", "n_kv_head", "ffn_dim", "token_count", "norm_eps", "rope_base")
    names = (*shape, "swin_norm", *SHARED)
    return ChameleonDrafterConfig(**{name: getattr(target, name) for name in names})


def drafter_said(config: ChameleonDrafterConfig) -> dict[str, Any]:
    """Return the ``config.json`` of a drafter, as published drafters have it."""
    return {
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.kv_heads,
        "vocab_size": config.token_count,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_base,
        "swin_norm": config.swin_norm,
        "bias": config.bias,
    }


def chameleon_vq_config(**changes: object) -> VQConfig:
    """Return the sizes of Meta's ``vqgan.ckpt`` (8192 codes of width 256), with changes."""
    sizes: dict[str, object] = {"codebook_size": 8192, "codebook_dim": 256, "l2_norm": False}
    return VQConfig.model_validate({**sizes, **changes})


def picture_names(keys: Iterable[str]) -> dict[str, str]:
    """Return our name of every tensor of the VQGAN, with its key; alone in a file or beside a target."""
    there = list(keys)
    within = any(key.startswith(VQ_PREFIX) for key in there)
    return vq_names(there, (VQ_PREFIX if within else "",), highest_first=True)


def vq_config(checkpoint: Checkpoint) -> VQConfig:
    """Return the sizes of Chameleon's VQGAN, read off shapes."""
    names = picture_names(checkpoint)
    return vq_sizes(checkpoint, names, "Chameleon's VQGAN", attend=False, l2_norm=False)
