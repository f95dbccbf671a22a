"""The files of Janus: deepseek-ai's own layout, and that of transformers. No tensor differs between them.

Both hold the half that reads images too (a vision tower, its aligner, the head of text tokens), which
text-to-image does not need. Queries and keys turn in pairs ``(i, i + d/2)`` in both.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from lantern_accel.checkpoints.layouts import explain_sizes, find_file, folder_json
from lantern_accel.checkpoints.weights import Checkpoint, has_weights
from lantern_accel.errors import CheckpointError
from lantern_accel.families import keys
from lantern_accel.families.base import Found, Parts
from lantern_accel.families.image_tokenizer import LOWEST_FIRST, VQ_RULES, vq_sizes
from lantern_accel.families.janus.model import DEFAULTS, JanusConfig, JanusManifest
from lantern_accel.families.janus.text import ROLES, JanusIds, Variant, read_ids
from lantern_accel.families.published import ModelEntry
from lantern_accel.families.registry import ask_for_name, entries_like, entry_at
from lantern_accel.nn.vq import VQConfig

TARGET_RULES: tuple[keys.Rule, ...] = (
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
    *keys.LLAMA,
)
#: Of the image tokenizer, which has LlamaGen's tensors.
IMAGE_RULES = ((r"^(gen_vision_model|model\.vqmodel)\.", ""), *VQ_RULES, LOWEST_FIRST)
RULES = {"target": TARGET_RULES, "vq": IMAGE_RULES}
_HINT = "Janus-Pro-1B, Janus-Pro-7B and Janus-1.3B hold all that is needed"
_FLOWS = f"is JanusFlow, which generates by flow matching and not token by token; {_HINT}"
_READS = (
    "holds only the half of Janus that reads images: it lacks gen_embed, gen_aligner, gen_head and "
    f"gen_vision_model; {_HINT}"
)
_CODES, _HF_CODES = "gen_embed.weight", "model.generation_embeddings.weight"
_WORDS, _HF_WORDS = (
    "language_model.model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
)
SIGNATURES = (
    keys.Signature("original", {_CODES: 2}),
    keys.Signature("Hugging Face", {_HF_CODES: 2}),
    keys.Signature("JanusFlow", {"vision_gen_enc_model.": 0}, refused=_FLOWS),
    keys.Signature("JanusFlow", {"vision_gen_dec_model.": 0}, refused=_FLOWS),
    keys.Signature("original", {"vision_model.": 0, _WORDS: 2}, (_CODES,), _READS),
    keys.Signature("Hugging Face", {"model.vision_model.": 0, _HF_WORDS: 2}, (_HF_CODES,), _READS),
)
#: What files hold for another part: the half that reads images, the image tokenizer, the target.
SIDE_FILES = {
    "target": re.compile(
        r"^(gen_vision_model|vision_model|aligner|language_model\.lm_head)\.|"
        r"^(lm_head|model\.(vqmodel|vision_model|aligner))\."
    ),
    "vq": re.compile(r"^(?!gen_vision_model\.|model\.vqmodel\.)"),
}
#: The vision tower's tables, whose last axis but one has one row per image token.
_VISION = (
    "vision_model.vision_tower.pos_embed",
    "model.vision_model.embeddings.position_embedding.weight",
)
#: What transformers' LlamaConfig takes for what a configuration leaves out, as published ones do.
_LLAMA = {"num_attention_heads": 32, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048}


def detect(path: Path, parts: Parts) -> Found[JanusManifest] | None:
    """Say what of this family lies at ``path``; None where it is another family's.

    Raises :class:`CheckpointError` for what is Janus's and cannot generate images, and where
    nothing says which of the two generations it is.
    """
    if path.is_dir() and not has_weights(path):
        return None
    folder = path if path.is_dir() else path.parent
    said = folder_json(folder)
    ours = said.get("model_type") in ("multi_modality", "janus")
    opened = keys.open_model(path, SIGNATURES, ours=ours, whose="Janus")
    if opened is None:
        return None
    checkpoint, _ = opened
    text = find_file([parts.text or folder], "tokenizer.json")
    manifest = manifest_of(checkpoint, said, None if text is None else read_ids(text))
    variant = _variant(path, folder, parts.entry, entries_like(manifest))
    manifest = manifest.model_copy(update={"variant": variant})
    found = Found(manifest, {"target": path, "vq": path}, parts)
    if text is None:
        found.missing["text"] = f"a text tokenizer: put the model's tokenizer.json into {folder}"
    else:
        found.files["text_tokenizer"] = text
    return found


def manifest_of(
    checkpoint: Checkpoint, said: dict[str, Any], ids: JanusIds | None = None
) -> JanusManifest:
    """Return the manifest of weights and their configuration, which is read off shapes where it can be.

    ``ids``: the tokenizer's; None: as the configuration says. Raises :class:`CheckpointError` where the
    two are not of one model.
    """
    vq = vq_sizes(checkpoint, keys.rename_keys(checkpoint, IMAGE_RULES), "Janus's image tokenizer")
    llama = said.get("language_config") or said.get("text_config") or {}
    target = target_config(checkpoint, llama, _grid(checkpoint, said))
    path = checkpoint.path
    with explain_sizes(f"the parts of {path} are not of one model", "take them from one release"):
        return JanusManifest(
            name=path.absolute().name if path.is_dir() else path.stem,
            ids=ids or JanusIds(**_ids_of_config(said)),
            target=target,
            vq=vq,
            defaults=DEFAULTS.within(target.vocab_size),
        )


def target_config(checkpoint: Checkpoint, llama: dict[str, object], grid: int) -> JanusConfig:
    """Return the target's sizes: shapes first, the configuration for what they cannot say."""
    named = keys.rename_keys(checkpoint, TARGET_RULES)
    given = {k: v for k, v in llama.items() if v is not None}
    sizes = keys.llama_sizes(checkpoint, named, {**_LLAMA, **given})
    codes, code_dim = keys.matrix_shape(checkpoint, named, "gen_embed.weight")
    with explain_sizes(checkpoint.path, "its configuration is not of these weights"):
        return JanusConfig(
            **sizes,
            vocab_size=codes,
            code_dim=code_dim,
            aligner_depth=keys.layer_count(named, "aligner"),
            head_dim_image=keys.matrix_shape(checkpoint, named, "head_in.weight")[0],
            grid=grid,
        )


def _grid(checkpoint: Checkpoint, said: dict[str, Any]) -> int:
    """Return the tokens along one side: as many as the vision tower has patches; 24 without one."""
    tables = (checkpoint.shape(key)[-2] for key in _VISION if key in checkpoint)
    count = (said.get("vision_config") or {}).get("num_image_tokens", next(tables, 576))
    side = math.isqrt(count) if isinstance(count, int) and count > 0 else 0
    if not side or side * side != count:
        raise CheckpointError(
            f"{checkpoint.path} is expected to have a square token grid, but {count} is not a square "
            "number; its configuration is damaged"
        )
    return side


def _ids_of_config(said: dict[str, Any]) -> dict[str, int]:
    """Return the ids that a configuration says, where there is no tokenizer to say them."""
    text = said.get("text_config") or {}
    named = {"bos": text.get("bos_token_id"), "pad": text.get("pad_token_id")}
    return {name: i for name, i in named.items() if isinstance(i, int)}


def _variant(
    path: Path, folder: Path, given: ModelEntry | None, known: list[ModelEntry]
) -> Variant:
    """Return whose prompt a model was trained on; raises :class:`CheckpointError` where nothing says.

    Shapes cannot tell Janus-Pro-1B from Janus-1.3B; ``known``: the published models of these sizes.
    Other sizes are Pro's.
    """
    template, entry = folder / "chat_template.jinja", given or entry_at("janus", path)
    if given is None and template.is_file():
        text = template.read_text(encoding="utf-8", errors="replace")
        return "pro" if ROLES["pro"][0] in text else "1.3b"
    if entry is not None:
        variant: Variant = entry.config["variant"]
        return variant
    if len({one.config["variant"] for one in known}) > 1:
        raise ask_for_name(path, "which generation of Janus it is", [one.name for one in known])
    return "pro"


def published_manifest(entry: ModelEntry) -> JanusManifest:
    """Return the manifest of a published model."""
    return JanusManifest(
        **entry.labels,
        variant=entry.config["variant"],
        target=JanusConfig(**entry.config["target"]),
        vq=VQConfig(),
        defaults=DEFAULTS,
    )
