"""The files of Janus: deepseek-ai's own layout, and that of transformers. No tensor differs between them.

Both hold the half that reads pictures too (a vision tower, its aligner, the head of text tokens), which
drawing does not need. Queries and keys turn in pairs ``(i, i + d/2)`` in both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lantern_accel.checkpoints.layouts import explained, read_json
from lantern_accel.checkpoints.loading import Recipe
from lantern_accel.checkpoints.weights import Checkpoint, has_weights, open_checkpoint
from lantern_accel.errors import CheckpointError
from lantern_accel.families.base import Found, Parts
from lantern_accel.families.image_tokenizer import vq_names, vq_sizes
from lantern_accel.families.janus.model import DEFAULTS, JanusConfig, JanusManifest
from lantern_accel.families.janus.text import ROLES, SpecialIds, Variant, read_ids
from lantern_accel.families.layout import KeyLayout, block_recipes, llama_sizes
from lantern_accel.families.prompted_family import add_drafter
from lantern_accel.families.published import ModelEntry
from lantern_accel.families.registry import released
from lantern_accel.nn.vq import VQConfig


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
    KeyLayout.llama("original", "language_model.model.", "language_model.lm_head.weight"),
    embed="gen_embed.weight",
    aligner=("gen_aligner.layers.0", "gen_aligner.layers.{i}"),
    head_in="gen_head.output_mlp_projector",
    head_out="gen_head.vision_head",
    vq="gen_vision_model.",
    vision_positions="vision_model.vision_tower.pos_embed",
)
HUGGING_FACE = JanusLayout(
    KeyLayout.llama("Hugging Face", "model.language_model."),
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


def key_layout(checkpoint: Checkpoint) -> JanusLayout | None:
    """Return the layout that a file's keys follow; None where they are not Janus's.

    Raises :class:`CheckpointError` for JanusFlow, for weights that only read pictures, and for layouts
    that are mixed.
    """
    there, path = set(checkpoint), checkpoint.path
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


def target_recipes(checkpoint: Checkpoint, config: JanusConfig) -> dict[str, Recipe]:
    """Say for every parameter of :class:`JanusGPT` where it lies in a checkpoint."""
    layout = key_layout(checkpoint)
    if layout is None:
        raise CheckpointError(
            f"{checkpoint.path} has no image embedding under any name that Janus's layouts use; it is of "
            "another architecture"
        )
    recipes = block_recipes(checkpoint, layout.trunk, config.decoder, config.head_dim)
    recipes["gen_embed.weight"] = Recipe((layout.embed,))
    linear = {f"aligner.{i}": layout.aligned(i) for i in range(config.aligner_depth)}
    for ours, theirs in {**linear, "head_in": layout.head_in, "output": layout.head_out}.items():
        for leaf in ("weight", "bias"):
            recipes[f"{ours}.{leaf}"] = Recipe((f"{theirs}.{leaf}",))
    return recipes


def picture_names(keys: Iterable[str]) -> dict[str, str]:
    """Return LlamaGen's name of every tensor of the picture tokenizer, with its key."""
    return vq_names(keys, [layout.vq for layout in LAYOUTS])


#: What transformers' LlamaConfig takes for what a configuration leaves out, as published ones do.
_LLAMA = {"num_attention_heads": 32, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
#: Sizes by which a published model is known.
_RELEASED = ("dim", "n_layer", "n_head", "ffn_dim", "token_count", "vocab_size", "grid")
_KINDS = ("multi_modality", "janus")


def detect(path: Path, parts: Parts) -> Found | None:
    """Say what of this family lies at ``path``; None where it is another family's.

    Raises :class:`CheckpointError` for what is Janus's and cannot draw.
    """
    if path.is_dir() and not has_weights(path):
        return None
    folder = path if path.is_dir() else path.parent
    said = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError:
        if said.get("model_type") in _KINDS:
            raise
        return None  # whose it is, others may know
    layout = key_layout(checkpoint)
    if layout is None:
        return None
    files, missing = {"target": path, "vq": path}, {}
    text = _tokenizer(parts.text or folder)
    ids = _ids(said)
    if text is None:
        missing["text"] = f"a text tokenizer: put the model's tokenizer.json into {folder}"
    else:
        files["text_tokenizer"] = text
        ids = read_ids(text)
    variant, why = _variant(folder, said)
    manifest = manifest_of(checkpoint, layout, said, ids=ids, variant=variant)
    manifest = manifest.named(
        released(manifest, published_manifest, _RELEASED, variant=manifest.variant)
    )
    manifest = add_drafter(manifest, folder, parts, files, missing)
    notes = [f"{layout.trunk.name} keys", f"the prompt of {ROLES[variant][0]}, {why}"]
    return Found(manifest, files, parts, notes, missing)


def manifest_of(
    checkpoint: Checkpoint,
    layout: JanusLayout,
    said: dict[str, Any],
    *,
    ids: SpecialIds,
    variant: Variant,
) -> JanusManifest:
    """Return the manifest of weights and their configuration, which is read off shapes where it can be.

    Raises :class:`CheckpointError` where the two are not of one model.
    """
    vq = vq_sizes(checkpoint, picture_names(checkpoint), "Janus's image tokenizer")
    llama = said.get("language_config") or said.get("text_config") or {}
    target = target_config(checkpoint, layout, llama, _grid(checkpoint, layout, said))
    path = checkpoint.path
    with explained(
        lambda why: f"the parts of {path} are not of one model ({why}); take them from one release"
    ):
        return JanusManifest(
            name=path.absolute().name if path.is_dir() else path.stem,
            variant=variant,
            ids=ids,
            target=target,
            vq=vq,
            defaults=DEFAULTS.within(target.vocab_size),
        )


def target_config(
    checkpoint: Checkpoint, layout: JanusLayout, llama: dict[str, Any], grid: int
) -> JanusConfig:
    """Return the target's sizes: shapes first, the configuration for what they cannot say."""
    rope = llama.get("rope_parameters") or {}
    scaled = llama.get("rope_scaling")
    if rope.get("rope_type", "default") != "default":
        scaled = rope
    if scaled or llama.get("hidden_act", "silu") != "silu":
        odd = f"rope_scaling {scaled}" if scaled else f"hidden_act {llama['hidden_act']!r}"
        raise CheckpointError(
            f"the configuration of {checkpoint.path} asks for {odd}, which no published Janus has and "
            "which is not supported; use a published model"
        )
    said = {**_LLAMA, **{k: v for k, v in llama.items() if v is not None}}
    sizes = llama_sizes(checkpoint, layout.trunk, said)
    if sizes["n_kv_head"] == sizes["n_head"]:
        sizes["n_kv_head"] = 0
    codes, code_dim = checkpoint.shape(layout.embed)
    depth = 0
    while f"{layout.aligned(depth)}.weight" in checkpoint:
        depth += 1
    with explained(
        lambda why: f"{checkpoint.path}: {why}; its configuration is not of these weights"
    ):
        return JanusConfig(
            **sizes,
            vocab_size=codes,
            code_dim=code_dim,
            aligner_depth=depth,
            head_dim_image=checkpoint.shape(f"{layout.head_in}.weight")[0],
            rope_base=rope.get("rope_theta", said.get("rope_theta", 10000.0)),
            grid=grid,
        )


def _grid(checkpoint: Checkpoint, layout: JanusLayout, said: dict[str, Any]) -> int:
    """Return the tokens along one side: as many as the vision tower has patches; 24 without one."""
    vision = said.get("vision_config") or {}
    count = vision.get("num_image_tokens")
    if count is None and layout.vision_positions in checkpoint:
        shape = checkpoint.shape(layout.vision_positions)
        count = shape[1] if len(shape) == 3 else shape[0]
    if count is None:
        return 24
    side = math.isqrt(count) if isinstance(count, int) and count > 0 else 0
    if not side or side * side != count:
        raise CheckpointError(
            f"{checkpoint.path} has pictures of {count} tokens, which is no square; its configuration is "
            "damaged"
        )
    return side


def _tokenizer(path: Path) -> Path | None:
    found = path / "tokenizer.json" if path.is_dir() else path
    return found if found.is_file() else None


def _ids(said: dict[str, Any]) -> SpecialIds:
    """Return the ids that a configuration says, where there is no tokenizer to say them."""
    text = said.get("text_config") or {}
    named = {"bos": text.get("bos_token_id"), "pad": text.get("pad_token_id")}
    return SpecialIds(**{name: i for name, i in named.items() if isinstance(i, int)})


def _variant(folder: Path, said: dict[str, Any]) -> tuple[Variant, str]:
    """Return whose prompt a model was trained on, and by what that was told.

    Shapes cannot tell: Janus-Pro-1B and Janus-1.3B are alike.
    """
    template = folder / "chat_template.jinja"
    if template.is_file():
        text = template.read_text(encoding="utf-8", errors="replace")
        return ("pro" if "<|User|>" in text else "1.3b"), "by its chat template"
    names = [str(said.get("_name_or_path", "")), *folder.absolute().parts[:-6:-1]]
    for name in names:
        if re.search(r"janus-1\.3b", name.lower()):
            return "1.3b", "by its name"
    return "pro", "as nothing says that it is Janus-1.3B"


def published_manifest(entry: ModelEntry) -> JanusManifest:
    """Return the manifest of a published model."""
    return JanusManifest(
        **entry.labels,
        variant=entry.config["variant"],
        target=JanusConfig(**entry.config["target"]),
        vq=VQConfig(),
        defaults=DEFAULTS,
    )
