"""The files of GLM-Image's prior, in the released diffusers folder or in the prior's own.

There is one layout, that of transformers; half of each head turns in pairs ``(i, i + r/2)``. The file
holds a vision tower and an image tokenizer too, which text-to-image does not need; the tokenizer's
codebook says which codes are alike.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lantern_accel.checkpoints.layouts import explain_sizes, find_file, folder_json, read_json
from lantern_accel.checkpoints.weights import Checkpoint, has_weights
from lantern_accel.errors import CheckpointError
from lantern_accel.families import keys
from lantern_accel.families.base import Found, Parts
from lantern_accel.families.glm_image.model import (
    DEFAULTS,
    CodebookConfig,
    GlmImageConfig,
    GlmImageManifest,
    Marks,
)
from lantern_accel.families.published import ModelEntry

TARGET_RULES: tuple[keys.Rule, ...] = (
    (r"^model\.language_model\.", ""),
    (r"\.mlp\.gate_up_proj\.", ".feed_forward.w13."),
    (r"\.post_self_attn_layernorm\.", ".attention_post_norm."),
    (r"\.post_mlp_layernorm\.", ".ffn_post_norm."),
    *keys.LLAMA,
)
CODEBOOK = "model.vqmodel.quantize.embedding.weight"
CODEBOOK_RULES = ((r"^model\.vqmodel\.quantize\.", ""),)
RULES = {"target": TARGET_RULES, "vq": CODEBOOK_RULES}
#: What the file holds for another part: the half that reads images, the codebook, the target.
SIDE_FILES = {
    "target": re.compile(r"^model\.(visual|vqmodel)\."),
    "vq": re.compile(r"^(?!model\.vqmodel\.quantize\.embedding\.)"),
}


_FIRST = "model.language_model.layers.0."
#: The prior, whose blocks have four norms.
SIGNATURES = (
    keys.Signature(
        "transformers",
        {
            "model.language_model.embed_tokens.weight": 2,
            f"{_FIRST}post_self_attn_layernorm.weight": 1,
            f"{_FIRST}mlp.gate_up_proj.weight": 2,
        },
    ),
)
#: The prior's folder in the released one, and the tokenizer's.
PRIOR, PROCESSOR = "vision_language_encoder", "processor"
#: What transformers' configuration class takes for what a file leaves out.
_TEXT = {"num_attention_heads": 32, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072}


def detect(path: Path, parts: Parts) -> Found[GlmImageManifest] | None:
    """Say what of this family lies at ``path``; None where it is another family's.

    Raises :class:`CheckpointError` for what is GLM-Image's and has no prior.
    """
    home = _home(path)
    if home is None:
        return None
    folder = home if home.is_dir() else home.parent
    said = folder_json(folder)
    ours = said.get("model_type") == "glm_image"
    opened = keys.open_model(home, SIGNATURES, ours=ours, whose="GLM-Image")
    if opened is None:
        return None
    checkpoint, _ = opened
    if parts.vq is not None:
        raise CheckpointError(
            f"GLM-Image takes no vq from elsewhere, so {parts.vq} would not be read; leave "
            "--use vq=PATH out"
        )
    homes = [folder / PROCESSOR, folder.parent / PROCESSOR, folder]
    if parts.text is not None:
        homes = [parts.text / PROCESSOR, parts.text]
    text = find_file(homes, "tokenizer.json")
    found = Found(manifest_of(checkpoint, said, text), {"target": home}, parts)
    if CODEBOOK in checkpoint:
        found.files["vq"] = home
    else:
        found.missing["vq"] = f"the codebook {CODEBOOK}: fetch the released {PRIOR} again"
    if text is None:
        found.missing["text"] = (
            f"a text tokenizer: put the released {PROCESSOR} folder next to {folder}"
        )
    else:
        found.files["text_tokenizer"] = text
    return found


def manifest_of(
    checkpoint: Checkpoint, said: dict[str, object], tokenizer: Path | None = None
) -> GlmImageManifest:
    """Return the manifest of weights and their configuration, which is read off shapes where it can be.

    ``tokenizer``: its file, whose configuration names the marks around a size. Raises
    :class:`CheckpointError` where the two are not of one model.
    """
    path = checkpoint.path
    with explain_sizes(path, "its configuration is not of these weights"):
        target = _target(checkpoint, said)
        known = checkpoint.shape(CODEBOOK) if CODEBOOK in checkpoint else (target.vocab_size, 2048)
        vq = CodebookConfig(codebook_size=known[0], codebook_dim=known[1])
        return GlmImageManifest(
            name="glm-image" if path.name == PRIOR else path.absolute().name,
            ids=read_marks(said, tokenizer),
            target=target,
            vq=vq,
            defaults=DEFAULTS.within(target.vocab_size),
        )


def _target(checkpoint: Checkpoint, said: dict[str, Any]) -> GlmImageConfig:
    """Return the target's sizes: shapes first, the configuration for what they cannot say."""
    given = {k: v for k, v in (said.get("text_config") or {}).items() if v is not None}
    # Where another form of the file repeats the rotation, there is one kind alone.
    given.pop("rope_scaling", None)
    sizes = keys.llama_sizes(
        checkpoint, keys.rename_keys(checkpoint, TARGET_RULES), {**_TEXT, **given}
    )
    sizes["n_kv_head"] = sizes["n_kv_head"] or sizes["n_head"]
    rope = given.get("rope_parameters") or {}
    codes = (said.get("vq_config") or {}).get("num_embeddings")
    if codes is None:
        codes = checkpoint.shape(CODEBOOK)[0] if CODEBOOK in checkpoint else 16384
    rows = checkpoint.shape("lm_head.weight")[0]
    if codes > rows:
        raise CheckpointError(
            f"the head of {checkpoint.path} has {rows} rows, fewer than {codes} codes; its "
            "configuration is of another model"
        )
    width = sizes["head_width"] or sizes["dim"] // sizes["n_head"]
    return GlmImageConfig(
        **sizes,
        vocab_size=codes,
        head_rows=rows,
        rotated=int(width * (rope.get("partial_rotary_factor") or 1.0)),
        sections=tuple(rope.get("mrope_section") or (8, 12, 12)),
    )


def read_marks(said: dict[str, object], tokenizer: Path | None) -> Marks:
    """Return the strings around an image's size, of the tokenizer's own configuration."""
    told = {} if tokenizer is None else folder_json(tokenizer.parent, "tokenizer_config.json")
    start = said.get("image_start_token_id")
    named = {
        "size_begin": told.get("grid_bos_token"),
        "size_end": told.get("grid_eos_token"),
        "image_start": told.get("bos_token") or (start and f"<|dit_token_{start}|>"),
        "pad": said.get("image_end_token_id"),
    }
    return Marks(**{name: value for name, value in named.items() if value is not None})


def _home(path: Path) -> Path | None:
    """Return where the prior's weights lie, in the released folder or at the path itself."""
    if not path.is_dir():
        return path if path.is_file() else None
    index, prior = path / "model_index.json", path / PRIOR
    if index.is_file():
        if read_json(index).get("_class_name") != "GlmImagePipeline":
            return None
        if prior.is_dir() and has_weights(prior):
            return prior
    elif folder_json(path).get("_class_name") != "GlmImageTransformer2DModel":
        return path if has_weights(path) else None
    raise CheckpointError(
        f"{path} holds GLM-Image's diffusion half without its prior; name the whole release of "
        f"zai-org/GLM-Image, with its folder {PRIOR}, or that folder"
    )


def published_manifest(entry: ModelEntry) -> GlmImageManifest:
    """Return the manifest of the published model."""
    return GlmImageManifest(
        **entry.labels, target=GlmImageConfig(), vq=CodebookConfig(), defaults=DEFAULTS
    )
