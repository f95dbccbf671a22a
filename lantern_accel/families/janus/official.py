"""The files of Janus: deepseek-ai's own layout, and that of transformers. No tensor differs between them.

Both hold the half that reads pictures too (a vision tower, its aligner, the head of text tokens), which
drawing does not need. Queries and keys turn in pairs ``(i, i + d/2)`` in both.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from lantern_accel.checkpoints.layouts import explained, find_file, folder_json, open_own
from lantern_accel.checkpoints.weights import Checkpoint, has_weights
from lantern_accel.errors import CheckpointError
from lantern_accel.families.base import Found, Parts
from lantern_accel.families.image_tokenizer import LOWEST_FIRST, VQ_RULES, vq_sizes
from lantern_accel.families.janus.model import DEFAULTS, JanusConfig, JanusManifest
from lantern_accel.families.janus.text import ROLES, SpecialIds, Variant, read_ids
from lantern_accel.families.keys import (
    LLAMA,
    Rule,
    layer_count,
    llama_sizes,
    matrix_shape,
    renamed,
)
from lantern_accel.families.prompted_family import add_drafter
from lantern_accel.families.published import ModelEntry
from lantern_accel.families.registry import released
from lantern_accel.nn.vq import VQConfig

TARGET_RULES: tuple[Rule, ...] = (
    (r"^(language_model\.)?lm_head\.", "text_head."),
    (r"^(language_model\.model|model\.language_model)\.", ""),
    (r"^model\.generation_embeddings\.", "gen_embed."),
    (r"^gen_aligner\.layers\.(\d+)\.", lambda match: f"aligner.{int(match[1]) // 2}."),
    (r"^model\.generation_aligner\.fc1\.", "aligner.0."),
    (
        r"^model\.generation_aligner\.hidden_layers\.(\d+)\.",
        lambda match: f"aligner.{int(match[1]) + 1}.",
    ),
    (r"^(gen_head\.output_mlp_projector|model\.generation_head\.proj_out)\.", "head_in."),
    (r"^(gen_head|model\.generation_head)\.vision_head\.", "output."),
    *LLAMA,
)
#: Of the picture tokenizer, which has LlamaGen's tensors.
PICTURE_RULES = (
    (r"^(gen_vision_model|model\.vqmodel)\.", ""),
    *VQ_RULES,
    LOWEST_FIRST,
)
RULES = {"target": TARGET_RULES, "vq": PICTURE_RULES}
#: How the keys begin that nothing but the drawing half of a layout has, and its table of codes.
_OWN = {
    "original": ("gen_embed.", "gen_aligner.", "gen_head."),
    "Hugging Face": ("model.generation_embeddings.", "model.generation_"),
}
#: The vision tower's table, which has one row per image token.
_VISION = (
    "vision_model.vision_tower.pos_embed",
    "model.vision_model.embeddings.position_embedding.weight",
)

#: What files hold for another part: the half that reads pictures, the picture tokenizer, the target.
BESIDE = {
    "target": re.compile(
        r"^(gen_vision_model|vision_model|aligner|language_model\.lm_head)\.|"
        r"^(lm_head|model\.(vqmodel|vision_model|aligner))\."
    ),
    "vq": re.compile(r"^(?!gen_vision_model\.|model\.vqmodel\.)"),
}
#: What a file of understanding has, and JanusFlow's, which draws by flow matching.
_READS = ("vision_model.", "model.vision_model.")
_WORDS = {"language_model.model.embed_tokens.weight", "model.language_model.embed_tokens.weight"}
_FLOWS = ("vision_gen_enc_model.", "vision_gen_dec_model.")
_HINT = "Janus-Pro-1B, Janus-Pro-7B and Janus-1.3B hold all that drawing needs"


def key_layout(checkpoint: Checkpoint) -> str | None:
    """Return the layout that a file's keys follow; None where they are not Janus's.

    Raises :class:`CheckpointError` for JanusFlow, for weights that only read pictures, and for layouts
    that are mixed.
    """
    there, path = set(checkpoint), checkpoint.path
    if any(key.startswith(_FLOWS) for key in there):
        raise CheckpointError(
            f"{path} is JanusFlow, which draws by flow matching and not token by token; {_HINT}"
        )
    found = [name for name, own in _OWN.items() if any(key.startswith(own) for key in there)]
    if len(found) > 1:
        raise CheckpointError(
            f"{path} has keys of two layouts ({' and '.join(_OWN[name][0] for name in found)} among "
            "them); use the files of one release"
        )
    if found:
        return found[0]
    if any(key.startswith(_READS) for key in there) and there & _WORDS:
        raise CheckpointError(
            f"{path} holds only the half of Janus that reads pictures: it lacks gen_embed, gen_aligner, "
            f"gen_head and gen_vision_model; {_HINT}"
        )
    return None


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
    said = folder_json(folder)
    checkpoint = open_own(path, said.get("model_type") in _KINDS)
    layout = None if checkpoint is None else key_layout(checkpoint)
    if checkpoint is None or layout is None:
        return None
    files, missing = {"target": path, "vq": path}, {}
    text = find_file([parts.text or folder], "tokenizer.json")
    ids = _ids(said)
    if text is None:
        missing["text"] = f"a text tokenizer: put the model's tokenizer.json into {folder}"
    else:
        files["text_tokenizer"] = text
        ids = read_ids(text)
    variant, why = _variant(folder, said)
    manifest = manifest_of(checkpoint, said, ids, variant)
    manifest = manifest.named(
        released(manifest, published_manifest, _RELEASED, variant=manifest.variant)
    )
    manifest = add_drafter(manifest, folder, parts, files, missing)
    notes = [f"{layout} keys", f"the prompt of {ROLES[variant][0]}, {why}"]
    return Found(manifest, files, parts, notes, missing)


def manifest_of(
    checkpoint: Checkpoint,
    said: dict[str, Any],
    ids: SpecialIds | None = None,
    variant: Variant = "pro",
) -> JanusManifest:
    """Return the manifest of weights and their configuration, which is read off shapes where it can be.

    Raises :class:`CheckpointError` where the two are not of one model.
    """
    vq = vq_sizes(checkpoint, renamed(checkpoint, PICTURE_RULES), "Janus's image tokenizer")
    llama = said.get("language_config") or said.get("text_config") or {}
    target = target_config(checkpoint, llama, _grid(checkpoint, said))
    path = checkpoint.path
    with explained(f"the parts of {path} are not of one model", "take them from one release"):
        return JanusManifest(
            name=path.absolute().name if path.is_dir() else path.stem,
            variant=variant,
            ids=ids or SpecialIds(),
            target=target,
            vq=vq,
            defaults=DEFAULTS.within(target.vocab_size),
        )


def target_config(checkpoint: Checkpoint, llama: dict[str, Any], grid: int) -> JanusConfig:
    """Return the target's sizes: shapes first, the configuration for what they cannot say."""
    named = renamed(checkpoint, TARGET_RULES)
    given = {k: v for k, v in llama.items() if v is not None}
    sizes = llama_sizes(checkpoint, named, {**_LLAMA, **given})
    codes, code_dim = matrix_shape(checkpoint, named, "gen_embed.weight")
    with explained(checkpoint.path, "its configuration is not of these weights"):
        return JanusConfig(
            **sizes,
            vocab_size=codes,
            code_dim=code_dim,
            aligner_depth=layer_count(named, "aligner"),
            head_dim_image=matrix_shape(checkpoint, named, "head_in.weight")[0],
            grid=grid,
        )


def _grid(checkpoint: Checkpoint, said: dict[str, Any]) -> int:
    """Return the tokens along one side: as many as the vision tower has patches; 24 without one."""
    vision = said.get("vision_config") or {}
    count = vision.get("num_image_tokens")
    for key in _VISION:
        if count is None and key in checkpoint:
            shape = checkpoint.shape(key)
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
