"""Maps the parameters of a described trunk to the names of a checkpoint.

The trunk is a :class:`lantern_accel.nn.decoder.Decoder`. A key layout is names; matrices may be
fused or apart, and pairs of a rotation adjacent or half-split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from lantern_accel.checkpoints.loading import Recipe
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

    def layers(self, keys: Iterable[str]) -> int:
        """Return how many layers a checkpoint has, by its keys; 0 where it has none."""
        pattern = re.compile(re.escape(self.block).replace(r"\{i\}", r"(\d+)"))
        return 1 + max((int(m[1]) for key in keys if (m := pattern.match(key))), default=-1)


def block_recipes(
    keys: Iterable[str], layout: KeyLayout, decoder: Decoder, half_split: int = 0
) -> dict[str, Recipe]:
    """Say for every parameter of the blocks, those of head norms excepted, where it lies.

    ``half_split``: how many numbers of a head turn in pairs ``(i, i + r/2)``, whose rows are reordered;
    0: pairs are adjacent already.
    """
    there, d = set(keys), decoder.head_dim
    recipes: dict[str, Recipe] = {}

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
