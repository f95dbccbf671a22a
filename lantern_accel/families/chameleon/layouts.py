"""The tensors of Anole and Lumina-mGPT: which layout a file has, and where each of ours lies in it.

In Hugging Face's layout heads turn in pairs ``(i, i + d/2)``: rows of queries, keys and their norms are
permuted to adjacent pairs, those of Meta's layout and of GAIR's fork. Norms of queries and keys ``[d]``,
``[parts, d]`` or ``[heads, d]``: each part's serves its share of the heads (Chameleon's model
parallelism).
"""

from __future__ import annotations

import functools
import re

import torch
from torch import Tensor

from lantern_accel.checkpoints.weights import Checkpoint
from lantern_accel.errors import CheckpointError
from lantern_accel.families import keys
from lantern_accel.families.chameleon.model import TrunkConfig
from lantern_accel.nn.rotary import to_adjacent_pairs
from lantern_accel.nn.vq import VQConfig

#: The norm that tells Chameleon from other trunks, and by its axes which pairs turn.
MARK = "layers.0.attention.q_norm.weight"
_ORIGINAL, _HF = "layers.0.attention.q_normalization.weight", "layers.0.self_attn.q_norm.weight"
SIGNATURES = (
    keys.Signature("original", {_ORIGINAL: 1}),
    keys.Signature("GAIR's fork", {f"model.{_HF}": 1}),
    keys.Signature("Hugging Face", {f"model.{_HF}": 2}),
    keys.Signature("drafter", {"fc.weight": 2, _HF: 0}),
)
RULES: tuple[keys.Rule, ...] = ((r"\.([qk])_normalization\.", r".\1_norm."), *keys.LLAMA)
DRAFTER_RULES: tuple[keys.Rule, ...] = (*RULES, (r"^tok_embeddings\.", "embed_tokens."))
BOTH_RULES = {"target": RULES, "drafter": DRAFTER_RULES}
#: Where Hugging Face's files keep the image tokenizer, and what each part's may hold for the other.
VQ_PREFIX = "model.vqmodel."
SIDE_FILES = {
    "target": re.compile(r"^model\.vqmodel\."),
    "vq": re.compile(r"^(lm_head|model\.(embed_tokens|layers|norm))\."),
}


def head_norm_rows(norm: Tensor, heads: int, split: bool) -> Tensor:
    """Return a norm's weight or bias, ``[heads, d]``, of ``[d]``, ``[parts, d]`` or ``[heads, d]``."""
    rows = norm.reshape(-1, norm.shape[-1])
    rows = rows.repeat_interleave(heads // rows.shape[0], dim=0)
    if split:
        rows = to_adjacent_pairs(rows.reshape(-1), rows.shape[1]).reshape(rows.shape)
    return rows


def check_norm(key: str, shape: tuple[int, ...], heads: int, head_dim: int) -> None:
    """Raise :class:`CheckpointError` for a norm that no layout has."""
    rows = 1 if len(shape) == 1 else shape[0]
    if len(shape) not in (1, 2) or shape[-1] != head_dim or not rows or heads % rows:
        raise CheckpointError(
            f"{key} has shape {list(shape)}, which cannot serve {heads} heads of width {head_dim}; the "
            "checkpoint is of another model, or damaged: fetch it again"
        )


def code_changes(config: TrunkConfig, split: bool) -> list[keys.Change]:
    """Return what becomes of queries, keys, norms and head; ``split``: pairs are ``(i, i + d/2)``."""
    changes: list[keys.Change] = [(r"^output\.", keys.SomeRows(torch.tensor(config.token_ids())))]
    changes += [keys.to_adjacent(config.head_dim)] if split else []
    for part, heads in (("q_norm", config.n_head), ("k_norm", config.kv_heads)):
        change = functools.partial(head_norm_rows, heads=heads, split=split)
        changes.append((rf"\.{part}\.", change))
    return changes


def trunk_changes(checkpoint: Checkpoint, config: TrunkConfig) -> list[keys.Change]:
    """Return :func:`code_changes` as a file's norms ask for; nothing for our own files.

    Raises :class:`CheckpointError` for another architecture, and for norms of several layouts.
    """
    named = keys.rename_keys(checkpoint, RULES)
    if "layers.0.attention.qk_norm.weight" in named:
        return []
    if MARK not in named:
        raise CheckpointError(
            "the checkpoint has no norms of queries and keys under any name that Chameleon's layouts "
            "use; it is of another architecture"
        )
    mark = checkpoint.shape(named[MARK])
    split = len(mark) == 2
    for part, heads in (("q_norm", config.n_head), ("k_norm", config.kv_heads)):
        for key in (key for name, key in named.items() if f".{part}." in name):
            shape = checkpoint.shape(key)
            check_norm(key, shape, heads, config.head_dim)
            if (len(shape) == 2) != split:
                raise CheckpointError(
                    f"{key} has shape {list(shape)}, but {named[MARK]} {list(mark)}: their rotations "
                    "turn different pairs, so they are of two checkpoints; fetch both again"
                )
    return code_changes(config, split)


def block_sizes(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the sizes of the blocks, read off shapes."""
    named = keys.rename_keys(checkpoint, RULES)
    return keys.trunk_sizes(checkpoint, named, checkpoint.shape(named[MARK])[-1])


def chameleon_vq_config(**changes: object) -> VQConfig:
    """Return the sizes of Meta's ``vqgan.ckpt`` (8192 codes of width 256), with changes."""
    sizes: dict[str, object] = {"codebook_size": 8192, "codebook_dim": 256, "l2_norm": False}
    return VQConfig.model_validate({**sizes, **changes})
