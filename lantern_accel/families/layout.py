"""Maps the parameters of a described trunk to the names of a checkpoint.

The trunk is a :class:`lantern_accel.nn.decoder.Decoder`. A key layout is names; matrices may be
fused or apart, and pairs of a rotation adjacent or half-split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lantern_accel.checkpoints.layouts import check_said
from lantern_accel.checkpoints.loading import Recipe
from lantern_accel.checkpoints.weights import Checkpoint
from lantern_accel.errors import CheckpointError
from lantern_accel.nn.decoder import Decoder
from lantern_accel.nn.rotary import to_adjacent_pairs


@dataclass(frozen=True)
class KeyLayout:
    """Names of one layout; ``{i}`` is the layer, "" what it never has.

    ``qkv`` and ``gate_up`` are fused matrices that a checkpoint may have in place of the ones
    before them. Biases have the names of their matrices, with ``bias`` for ``weight``.
    """

    name: str
    embedding: str
    head: str
    norm: str
    block: str
    q: str = "self_attn.q_proj.weight"
    k: str = "self_attn.k_proj.weight"
    v: str = "self_attn.v_proj.weight"
    qkv: str = ""
    out: str = "self_attn.o_proj.weight"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    gate: str = "mlp.gate_proj.weight"
    up: str = "mlp.up_proj.weight"
    gate_up: str = ""
    down: str = "mlp.down_proj.weight"
    attention_norm: str = "input_layernorm.weight"
    attention_post_norm: str = ""
    ffn_norm: str = "post_attention_layernorm.weight"
    ffn_post_norm: str = ""

    @classmethod
    def llama(
        cls, name: str, trunk: str, head: str = "lm_head.weight", **special: str
    ) -> KeyLayout:
        """Return transformers' names of a Llama whose trunk's begin with ``trunk``."""
        return cls(
            name=name,
            embedding=f"{trunk}embed_tokens.weight",
            head=head,
            norm=f"{trunk}norm.weight",
            block=f"{trunk}layers.{{i}}.",
            **special,
        )

    def layers(self, keys: Iterable[str]) -> int:
        """Return how many layers a checkpoint has, by its keys; 0 where it has none."""
        pattern = re.compile(re.escape(self.block).replace(r"\{i\}", r"(\d+)"))
        return 1 + max((int(m[1]) for key in keys if (m := pattern.match(key))), default=-1)


def llama_sizes(
    checkpoint: Checkpoint, layout: KeyLayout, said: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the sizes of a Llama's trunk: shapes first, the configuration for what they cannot say.

    ``said``: transformers' names, with what the file leaves out filled in. Raises
    :class:`CheckpointError` where a tensor is absent, or the configuration is of another model.
    """
    block, path = layout.block.format(i=0), checkpoint.path
    token_count, dim = checkpoint.shape(layout.embedding)
    rows, kv_rows = (checkpoint.shape(block + key)[0] for key in (layout.q, layout.k))
    heads, width = said["num_attention_heads"], said.get("head_dim")
    width = width or (rows // heads if isinstance(heads, int) and heads > 0 else 0)
    if not isinstance(heads, int) or heads < 1 or rows != heads * width or kv_rows % width:
        raise CheckpointError(
            f"{path} has {rows} rows of queries and {kv_rows} of keys, which are not {heads} heads of "
            "one width; its configuration is of another model"
        )
    layers = layout.layers(checkpoint)
    check_said(
        checkpoint.path,
        said,
        {"hidden_size": dim, "num_hidden_layers": layers, "vocab_size": token_count},
    )
    return {
        "dim": dim,
        "n_layer": layers,
        "n_head": heads,
        "n_kv_head": kv_rows // width,
        "head_width": 0 if heads * width == dim else width,
        "ffn_dim": checkpoint.shape(block + layout.down)[1],
        "token_count": token_count,
        "norm_eps": said["rms_norm_eps"],
        "bias": block + layout.q.removesuffix("weight") + "bias" in checkpoint,
        "max_positions": said["max_position_embeddings"],
    }


def block_recipes(
    keys: Iterable[str], layout: KeyLayout, decoder: Decoder, half_split: int = 0
) -> dict[str, Recipe]:
    """Say for every parameter of the trunk, those of head norms and the head excepted, where it lies.

    ``half_split``: how many numbers of a head turn in pairs ``(i, i + r/2)``, whose rows are reordered;
    0: pairs are adjacent already.
    """
    there, d = set(keys), decoder.head_dim
    recipes = {"tok_embeddings.weight": Recipe((layout.embedding,))}
    if layout.norm:
        recipes["norm.weight"] = Recipe((layout.norm,))

    def reorder(turned: tuple[str, ...]) -> Callable[[str, Tensor], Tensor] | None:
        if not half_split:
            return None
        return lambda key, rows: to_adjacent_pairs(rows, d, half_split) if key in turned else rows

    for i in range(decoder.layers):
        theirs, ours = layout.block.format(i=i), f"layers.{i}."
        fused = bool(layout.gate_up) and theirs + layout.gate_up in there
        plain = {
            "attention_norm.weight": (layout.attention_norm,),
            "ffn_norm.weight": (layout.ffn_norm,),
            "attention.wo.weight": (layout.out,),
            "feed_forward.w13.weight": ((layout.gate_up,) if fused else (layout.gate, layout.up)),
            "feed_forward.w2.weight": (layout.down,),
        }
        if decoder.norms == "both":
            plain["attention_post_norm.weight"] = (layout.attention_post_norm,)
            plain["ffn_post_norm.weight"] = (layout.ffn_post_norm,)
        for mine, names in plain.items():
            recipes[ours + mine] = Recipe(tuple(theirs + name for name in names))
        for leaf in ("weight", "bias") if decoder.bias else ("weight",):
            q, k, v, whole = (
                theirs + name.removesuffix("weight") + leaf
                for name in (layout.q, layout.k, layout.v, layout.qkv)
            )
            sources = (whole,) if layout.qkv and whole in there else (q, k, v)
            recipes[f"{ours}attention.wqkv.{leaf}"] = Recipe(sources, reorder((q, k)))
    return recipes
