"""GLM-Image's one layout, that of transformers. Half of each head turns in pairs ``(i, i + r/2)``.

The file holds a vision tower and a picture tokenizer too, which drawing from text does not need; the
tokenizer's codebook says which codes are alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import Tensor

from lantern_accel.checkpoints.loading import Recipe
from lantern_accel.families.glm_image.model import GlmImageConfig
from lantern_accel.families.layout import KeyLayout, block_recipes

LAYOUT = KeyLayout(
    name="Hugging Face",
    embedding="model.language_model.embed_tokens.weight",
    head="lm_head.weight",
    norm="model.language_model.norm.weight",
    block="model.language_model.layers.{i}.",
    gate_up="mlp.gate_up_proj.weight",
    attention_post_norm="post_self_attn_layernorm.weight",
    ffn_post_norm="post_mlp_layernorm.weight",
)
CODEBOOK = "model.vqmodel.quantize.embedding.weight"
#: What the file holds for another part: the half that reads pictures, the codebook, the target.
BESIDE_TARGET = re.compile(r"^model\.(visual|vqmodel)\.")
BESIDE_VQ = re.compile(r"^(?!model\.vqmodel\.quantize\.embedding\.)")


def is_prior(keys: Iterable[str]) -> bool:
    """Return whether a file's keys are of GLM-Image's prior, whose blocks have four norms."""
    there, block = set(keys), LAYOUT.block.format(i=0)
    marks = (block + LAYOUT.attention_post_norm, block + LAYOUT.gate_up, LAYOUT.embedding)
    return all(mark in there for mark in marks)


def target_recipes(keys: Iterable[str], config: GlmImageConfig) -> dict[str, Recipe]:
    """Say for every parameter of :class:`GlmImageGPT` where it lies in a checkpoint."""
    recipes = block_recipes(keys, LAYOUT, config.decoder, config.rotated)

    def codes(key: str, rows: Tensor) -> Tensor:
        return rows[: config.vocab_size]

    recipes["tok_embeddings.weight"] = Recipe((LAYOUT.embedding,))
    recipes["norm.weight"] = Recipe((LAYOUT.norm,))
    recipes["output.weight"] = Recipe((LAYOUT.head,), codes)
    return recipes
