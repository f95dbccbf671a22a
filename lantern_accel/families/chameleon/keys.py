"""Chameleon's checkpoints: which keys hold what, and which pairs of a head their rotation turns.

Two layouts are published, and a third mixes them:

* *original* (Meta, GAIR's ``consolidated.pth``): ``layers.N.attention.wq``, norms ``[d]``, adjacent
  pairs;
* *Hugging Face* (transformers, Lumina-mGPT): ``model.layers.N.self_attn.q_proj``, norms ``[1, d]`` or
  ``[heads, d]``, pairs ``(i, i + d/2)``: rows of ``q_proj``, ``k_proj`` and of their norms are permuted;
* GAIR's fork of transformers: Hugging Face's keys, but norms ``[d]`` and nothing permuted.

So the pairing is read off the shape of a norm. Published drafters use Hugging Face's keys without
``model.`` before them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from lantern_accel.checkpoints.loading import Recipe
from lantern_accel.errors import CheckpointError
from lantern_accel.families.chameleon.model import ChameleonConfig, TrunkConfig
from lantern_accel.families.layout import KeyLayout, block_recipes
from lantern_accel.nn.rotary import to_adjacent_pairs, to_half_split

Shape = Callable[[str], tuple[int, ...]]


ORIGINAL = KeyLayout(
    name="original",
    embedding="tok_embeddings.weight",
    head="output.weight",
    norm="norm.weight",
    block="layers.{i}.",
    q="attention.wq.weight",
    k="attention.wk.weight",
    v="attention.wv.weight",
    qkv="attention.wqkv.weight",
    out="attention.wo.weight",
    q_norm="attention.q_normalization",
    k_norm="attention.k_normalization",
    gate="feed_forward.w1.weight",
    up="feed_forward.w3.weight",
    gate_up="feed_forward.w13.weight",
    down="feed_forward.w2.weight",
    attention_norm="attention_norm.weight",
    ffn_norm="ffn_norm.weight",
)
HUGGING_FACE = KeyLayout(
    name="Hugging Face",
    embedding="model.embed_tokens.weight",
    head="lm_head.weight",
    norm="model.norm.weight",
    block="model.layers.{i}.",
)
DRAFTER = KeyLayout(
    name="drafter", embedding="embed_tokens.weight", head="", norm="", block="layers.{i}."
)
LAYOUTS = (ORIGINAL, HUGGING_FACE, DRAFTER)

#: What Hugging Face's files hold for another part: the picture tokenizer, or the target.
BESIDE_TARGET = re.compile(r"^model\.vqmodel\.")
BESIDE_VQ = re.compile(r"^(lm_head|model\.(embed_tokens|layers|norm))\.")


def key_layout(keys: Iterable[str]) -> KeyLayout | None:
    """Return the layout that a file's keys follow; None for another architecture.

    Chameleon's mark is the norm of the queries, which LlamaGen has not.
    """
    there = set(keys)
    for layout in LAYOUTS:
        mark = f"{layout.block}{layout.q_norm}.weight".format(i=0)
        if mark in there and layout.embedding in there:
            return layout
    return None


def half_split(shape: tuple[int, ...]) -> bool:
    """Return whether a query norm of this shape belongs to rotations of pairs ``(i, i + d/2)``.

    ``[d]``: adjacent pairs (original, GAIR's fork); ``[1, d]`` and ``[heads, d]``: half-split.
    """
    return len(shape) == 2


def head_norm_rows(norm: Tensor, heads: int, split: bool) -> Tensor:
    """Return a norm's weight or bias, ``[heads, d]``, of ``[d]``, ``[parts, d]`` or ``[heads, d]``.

    ``parts`` is Chameleon's model parallelism: each part's norm serves its share of the heads.
    """
    rows = norm.reshape(-1, norm.shape[-1])
    rows = rows.repeat_interleave(heads // rows.shape[0], dim=0)
    if split:
        rows = to_adjacent_pairs(rows.reshape(-1), rows.shape[1]).reshape(rows.shape)
    return rows


def trunk_recipes(
    keys: Iterable[str], shape: Shape, config: TrunkConfig
) -> tuple[KeyLayout, dict[str, Recipe]]:
    """Say for every parameter of the blocks and the embedding where it lies in a checkpoint.

    ``shape`` gives a key's shape. Raises :class:`CheckpointError` for another architecture.
    """
    there = set(keys)
    layout = key_layout(there)
    if layout is None:
        raise CheckpointError(
            "the checkpoint has no norms of queries and keys under any name that Chameleon's layouts "
            "use; it is of another architecture"
        )
    d = config.head_dim
    mark = f"{layout.block}{layout.q_norm}.weight".format(i=0)
    split = half_split(shape(mark))
    recipes = {"tok_embeddings.weight": Recipe((layout.embedding,))}
    recipes |= block_recipes(there, layout, config.decoder, d if split else 0)
    for i in range(config.n_layer):
        theirs, ours = layout.block.format(i=i), f"layers.{i}."
        for leaf in ("weight", "bias"):
            heads = {
                f"{theirs}{layout.q_norm}.{leaf}": config.n_head,
                f"{theirs}{layout.k_norm}.{leaf}": config.kv_heads,
            }
            for key, count in heads.items():
                if key not in there:
                    continue  # told with all that is missing
                check_norm(key, shape(key), count, d)
                if half_split(shape(key)) != split:
                    raise CheckpointError(
                        f"{key} has shape {list(shape(key))}, but {mark} {list(shape(mark))}: their "
                        "rotations turn different pairs, so they are of two checkpoints; fetch both again"
                    )
            recipes[f"{ours}attention.qk_norm.{leaf}"] = Recipe(tuple(heads), _norm(heads, split))
    return layout, recipes


def check_norm(key: str, shape: tuple[int, ...], heads: int, head_dim: int) -> None:
    """Raise :class:`CheckpointError` for a norm that no layout has."""
    rows = 1 if len(shape) == 1 else shape[0]
    if len(shape) not in (1, 2) or shape[-1] != head_dim or not rows or heads % rows:
        raise CheckpointError(
            f"{key} has shape {list(shape)}, which cannot serve {heads} heads of width {head_dim}; the "
            "checkpoint is of another model, or damaged: fetch it again"
        )


def _norm(heads: Mapping[str, int], split: bool) -> Callable[[str, Tensor], Tensor]:
    return lambda key, tensor: head_norm_rows(tensor, heads[key], split)


def target_recipes(keys: Iterable[str], shape: Shape, config: ChameleonConfig) -> dict[str, Recipe]:
    """Say for every parameter of :class:`ChameleonGPT` where it lies in a checkpoint."""
    layout, recipes = trunk_recipes(keys, shape, config)
    recipes["norm.weight"] = Recipe((layout.norm,))
    rows = None if config.text_head else torch.tensor(config.token_ids())

    def codes(key: str, tensor: Tensor) -> Tensor:
        return tensor if rows is None else tensor.index_select(0, rows)

    recipes["output.weight"] = Recipe((layout.head,), codes)
    return recipes


def published_drafter(weights: Mapping[str, Tensor], config: TrunkConfig) -> dict[str, Tensor]:
    """Return a drafter's parameters under the published keys: what :func:`drafter_recipes` reads.

    Rows of q, k and their norms ``[heads, d]`` are half-split.
    """
    d, heads, kv_heads = config.head_dim, config.n_head, config.kv_heads
    plain = ("embed_tokens.weight", "fc.weight", "fc.bias")
    out = {name: weights[name] for name in plain if name in weights}
    for i in range(config.n_layer):
        ours, theirs = f"layers.{i}.", DRAFTER.block.format(i=i)
        out[theirs + DRAFTER.attention_norm] = weights[f"{ours}attention_norm.weight"]
        out[theirs + DRAFTER.ffn_norm] = weights[f"{ours}ffn_norm.weight"]
        out[theirs + DRAFTER.out] = weights[f"{ours}attention.wo.weight"]
        out[theirs + DRAFTER.down] = weights[f"{ours}feed_forward.w2.weight"]
        gate, up = weights[f"{ours}feed_forward.w13.weight"].chunk(2)
        out[theirs + DRAFTER.gate], out[theirs + DRAFTER.up] = gate, up
        parts = [heads * d, kv_heads * d, kv_heads * d]
        q, k, v = torch.split(weights[f"{ours}attention.wqkv.weight"], parts)
        out[theirs + DRAFTER.q] = to_half_split(q, d)
        out[theirs + DRAFTER.k] = to_half_split(k, d)
        out[theirs + DRAFTER.v] = v
        for leaf in ("weight", "bias"):
            norms = torch.split(weights[f"{ours}attention.qk_norm.{leaf}"], [heads, kv_heads])
            for name, norm in zip((DRAFTER.q_norm, DRAFTER.k_norm), norms, strict=True):
                split = to_half_split(norm.reshape(-1), d).reshape(norm.shape)
                out[f"{theirs}{name}.{leaf}"] = split
    return out


def drafter_recipes(keys: Iterable[str], shape: Shape, config: TrunkConfig) -> dict[str, Recipe]:
    """Say for every parameter of a published drafter for Chameleon where it lies."""
    there = set(keys)
    _, recipes = trunk_recipes(there, shape, config)
    recipes["fc.weight"] = Recipe(("fc.weight",))
    if "fc.bias" in there:
        recipes["fc.bias"] = Recipe(("fc.bias",))
    recipes["embed_tokens.weight"] = recipes.pop("tok_embeddings.weight")
    return recipes
