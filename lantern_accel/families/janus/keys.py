"""Janus's two layouts: deepseek-ai's own, and that of transformers. No tensor differs between them.

Both hold the half that reads pictures too (a vision tower, its aligner, the head of text tokens), which
drawing does not need. Queries and keys turn in pairs ``(i, i + d/2)`` in both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lantern_accel.checkpoints.loading import Recipe
from lantern_accel.errors import CheckpointError
from lantern_accel.families.image_tokenizer import vq_names
from lantern_accel.families.janus.model import JanusConfig
from lantern_accel.families.layout import KeyLayout, block_recipes


@dataclass(frozen=True)
class JanusLayout:
    """Names of one layout: the Llama's, and what is Janus's own.

    ``vision_positions``: the vision tower's table, which has one row per image token.
    """

    trunk: KeyLayout
    embed: str
    aligner: tuple[str, str]
    head_in: str
    head_out: str
    vq: str
    vision_positions: str

    def aligned(self, layer: int) -> str:
        """Return the name of one layer of the aligner."""
        first, more = self.aligner
        return first if layer == 0 else more.format(i=2 * layer, j=layer - 1)


ORIGINAL = JanusLayout(
    KeyLayout(
        name="original",
        embedding="language_model.model.embed_tokens.weight",
        head="language_model.lm_head.weight",
        norm="language_model.model.norm.weight",
        block="language_model.model.layers.{i}.",
    ),
    embed="gen_embed.weight",
    aligner=("gen_aligner.layers.0", "gen_aligner.layers.{i}"),
    head_in="gen_head.output_mlp_projector",
    head_out="gen_head.vision_head",
    vq="gen_vision_model.",
    vision_positions="vision_model.vision_tower.pos_embed",
)
HUGGING_FACE = JanusLayout(
    KeyLayout(
        name="Hugging Face",
        embedding="model.language_model.embed_tokens.weight",
        head="lm_head.weight",
        norm="model.language_model.norm.weight",
        block="model.language_model.layers.{i}.",
    ),
    embed="model.generation_embeddings.weight",
    aligner=("model.generation_aligner.fc1", "model.generation_aligner.hidden_layers.{j}"),
    head_in="model.generation_head.proj_out",
    head_out="model.generation_head.vision_head",
    vq="model.vqmodel.",
    vision_positions="model.vision_model.embeddings.position_embedding.weight",
)
LAYOUTS = (ORIGINAL, HUGGING_FACE)

#: What files hold for another part: the half that reads pictures, the picture tokenizer, the target.
BESIDE_TARGET = re.compile(
    r"^(gen_vision_model|vision_model|aligner|language_model\.lm_head)\.|"
    r"^(lm_head|model\.(vqmodel|vision_model|aligner))\."
)
BESIDE_VQ = re.compile(r"^(?!gen_vision_model\.|model\.vqmodel\.)")
#: What a file of understanding has, and JanusFlow's, which draws by flow matching.
_READS = ("vision_model.", "model.vision_model.")
_FLOWS = ("vision_gen_enc_model.", "vision_gen_dec_model.")
_HINT = "Janus-Pro-1B, Janus-Pro-7B and Janus-1.3B hold all that drawing needs"


def key_layout(keys: Iterable[str], path: Path) -> JanusLayout | None:
    """Return the layout that a file's keys follow; None where they are not Janus's.

    Raises :class:`CheckpointError` for JanusFlow, for weights that only read pictures, and for layouts
    that are mixed.
    """
    there = set(keys)
    if any(key.startswith(_FLOWS) for key in there):
        raise CheckpointError(
            f"{path} is JanusFlow, which draws by flow matching and not token by token; {_HINT}"
        )
    found = [one for one in LAYOUTS if any(key.startswith(_own(one)) for key in there)]
    if len(found) > 1:
        raise CheckpointError(
            f"{path} has keys of two layouts ({found[0].embed} and {found[1].embed} among them); use "
            "the files of one release"
        )
    if found:
        return found[0]
    reads = any(key.startswith(_READS) for key in there)
    if reads and any(one.trunk.embedding in there for one in LAYOUTS):
        raise CheckpointError(
            f"{path} holds only the half of Janus that reads pictures: it lacks gen_embed, gen_aligner, "
            f"gen_head and gen_vision_model; {_HINT}"
        )
    return None


def _own(layout: JanusLayout) -> tuple[str, ...]:
    """Return how the keys begin that nothing but this layout's drawing half has."""
    heads = (layout.head_in, layout.head_out)
    return (layout.embed, layout.aligner[0].rpartition(".")[0], *heads)


def target_recipes(keys: Iterable[str], config: JanusConfig, path: Path) -> dict[str, Recipe]:
    """Say for every parameter of :class:`JanusGPT` where it lies in a checkpoint."""
    there = set(keys)
    layout = key_layout(there, path)
    if layout is None:
        raise CheckpointError(
            f"{path} has no image embedding under any name that Janus's layouts use; it is of another "
            "architecture"
        )
    trunk = layout.trunk
    recipes = block_recipes(there, trunk, config.decoder, config.head_dim)
    recipes["tok_embeddings.weight"] = Recipe((trunk.embedding,))
    recipes["norm.weight"] = Recipe((trunk.norm,))
    recipes["gen_embed.weight"] = Recipe((layout.embed,))
    linear = {f"aligner.{i}": layout.aligned(i) for i in range(config.aligner_depth)}
    for ours, theirs in {**linear, "head_in": layout.head_in, "output": layout.head_out}.items():
        for leaf in ("weight", "bias"):
            recipes[f"{ours}.{leaf}"] = Recipe((f"{theirs}.{leaf}",))
    return recipes


def picture_names(keys: Iterable[str]) -> dict[str, str]:
    """Return LlamaGen's name of every tensor of the picture tokenizer, with its key."""
    return vq_names(keys, [layout.vq for layout in LAYOUTS])
