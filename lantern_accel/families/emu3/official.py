"""The files of Emu3-Gen and Emu3.5-Image: the official layout, and that of transformers for Emu3.

Queries and keys turn in pairs ``(i, i + d/2)``. Emu3.5 is known by its norms of queries and keys. The
official image tokenizer is a repository of its own; transformers' folder holds all parts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lantern_accel.checkpoints.layouts import checkpoints_in, explain_sizes, find_file, folder_json
from lantern_accel.checkpoints.weights import Checkpoint, has_weights, open_checkpoint
from lantern_accel.errors import CheckpointError
from lantern_accel.families import keys
from lantern_accel.families.base import Found, Parts
from lantern_accel.families.emu3.model import DEFAULTS, SIZES_3P5, Emu3Config, Emu3Manifest, grid_of
from lantern_accel.families.emu3.text import (
    BEFORE,
    FRAME,
    VISION,
    WORDS,
    Emu3Ids,
    Variant,
    vision_tokens,
)
from lantern_accel.families.image_tokenizer import (
    check_codebook,
    movq_sizes,
    tokenizer_names,
    vq_sizes,
)
from lantern_accel.families.published import ModelEntry
from lantern_accel.nn.movq import MoVQConfig
from lantern_accel.nn.vq import VQConfig

SIGNATURES = (
    keys.Signature(
        "official", {"model.embed_tokens.weight": 2, "model.layers.0.self_attn.q_proj.weight": 2}
    ),
    keys.Signature("transformers", {"text_model.model.embed_tokens.weight": 2}),
    keys.Signature("transformers, in memory", {"model.text_model.embed_tokens.weight": 2}),
)
#: What one file holds for the other part, and what a training leaves in it.
SIDE_FILES = {
    "target": re.compile(r"^(model\.)?vqmodel\."),
    "vq": re.compile(r"^((model\.)?text_model|lm_head|loss|model_ema)\."),
}
IN_TARGET = r"(model\.)?vqmodel\."
#: From transformers' names of the image tokenizer to the official ones.
IMAGE_RULES: tuple[keys.Rule, ...] = (
    (r"\.(up|down)_block\.", "."),
    (r"\.middle_block\.attn_norm\.", ".mid.attn_1.norm."),
    (r"\.middle_block\.", ".mid."),
    (r"\.attn_norms\.(\d+)\.", r".attn.\1.norm."),
    (r"\.([qkv])_proj\.", r".\1."),
    (r"\.out_proj\.", ".proj_out."),
)
RULES: dict[str, tuple[keys.Rule, ...]] = {
    "target": ((r"^(model\.)?text_model\.", ""), *keys.LLAMA),
    "vq": IMAGE_RULES,
}
#: What the official configuration classes take for what a file leaves out.
_LLAMA: dict[str, object] = {
    "num_attention_heads": 32, "rms_norm_eps": 1e-5, "max_position_embeddings": 9216,
    "rope_theta": 1e6,
}  # fmt: skip
#: What Emu3.5's file has to say, since its configuration was never seen.
_ASKED = ("rms_norm_eps", "num_attention_heads")
#: The configuration's names of ids.
_IDS = {
    "bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "pad", "img_token_id": "image",
    "boi_token_id": "image_start", "eoi_token_id": "image_end", "eol_token_id": "row_end",
    "eof_token_id": "frame_end",
}  # fmt: skip
#: Positions of Emu3-Chat, and pixels of Emu3-Stage1's and Emu3-Gen's images.
CHAT_POSITIONS, STAGE1_AREA, GEN_AREA = 131072, 512 * 512, 720 * 720


def _whose(variant: Variant) -> str:
    """Return whose image tokenizer a model needs."""
    name = variant.capitalize()
    return f"{name}'s image tokenizer (BAAI/{name}-VisionTokenizer)"


def detect(path: Path, parts: Parts) -> Found[Emu3Manifest] | None:
    """Say what of this family lies at ``path``; None where it is another family's.

    Raises :class:`CheckpointError` for an Emu3 that generates no images, and for parts of several models.
    """
    if path.is_dir() and not has_weights(path):
        return None
    folder = path if path.is_dir() else path.parent
    said = folder_json(folder)
    kind = str(said.get("model_type", "")).lower()
    if kind.startswith("emu3visionvq"):
        raise CheckpointError(
            f"{path} is the image tokenizer of Emu3 alone; name Emu3-Gen's folder, and this with "
            "--use vq=PATH"
        )
    ours = kind.startswith("emu3") and "text" not in kind
    opened = keys.open_model(path, SIGNATURES, ours=ours, whose="Emu3")
    if opened is None or not (ours or opened[1].startswith("transformers")):
        return None
    checkpoint, _ = opened
    _check_generates(path, said)
    variant, vq = _variant(checkpoint), _image_tokenizer(path, parts.vq, checkpoint)
    tokenizer = None if vq is None else checkpoint if vq == path else open_checkpoint(vq)
    found = Found(manifest_of(checkpoint, said, tokenizer), {"target": path}, parts)
    if vq is not None:
        found.files["vq"] = vq
    else:
        found.missing["vq"] = (
            f"an image tokenizer: put {_whose(variant)} into {folder / 'vision_tokenizer'}, or name "
            "it with --use vq=PATH"
        )
    _add_text(found, folder)
    return found


def _variant(checkpoint: Checkpoint) -> Variant:
    """Return which of the two a model is, by its norms of queries and keys."""
    named = keys.rename_keys(checkpoint, RULES["target"])
    return "emu3.5" if "layers.0.attention.q_norm.weight" in named else "emu3"


def _check_generates(path: Path, said: Mapping[str, Any]) -> None:
    """Raise :class:`CheckpointError` for the models of this family that are not Emu3-Gen."""
    text = said.get("text_config") or said
    for name, value, one, what in (
        ("max_position_embeddings", CHAT_POSITIONS, "Emu3-Chat", "reads images and writes text"),
        ("image_area", STAGE1_AREA, "Emu3-Stage1", "is a stage of training before Emu3-Gen"),
    ):
        if text.get(name) == value:
            raise CheckpointError(
                f"{path} is {one} by its {name}, which {what}; use BAAI/Emu3-Gen, which generates images"
            )


def manifest_of(
    checkpoint: Checkpoint, said: dict[str, Any], tokenizer: Checkpoint | None = None
) -> Emu3Manifest:
    """Return the manifest of weights and their configuration, which is read off shapes where it can be.

    ``tokenizer``: the image tokenizer; None: the one among the weights, else it has the published sizes.
    Raises :class:`CheckpointError` where the parts are not of one model.
    """
    named = keys.rename_keys(checkpoint, RULES["target"])
    path, text = checkpoint.path, said.get("text_config") or said
    given = {name: value for name, value in text.items() if value is not None}
    variant = _variant(checkpoint)
    for name in _ASKED if variant == "emu3.5" else ():
        if name not in given:
            raise CheckpointError(
                f"the config.json of {path} lacks {name}, which the weights of Emu3.5 cannot say; "
                "fetch it again from the model's repository"
            )
    sizes = keys.llama_sizes(checkpoint, named, {**_LLAMA, **given})
    if sizes.pop("bias"):
        raise CheckpointError(f"{path} has biases of queries, which Emu3 has not; use Emu3-Gen")
    first = _first_code(said)
    codes = sizes["token_count"] - first
    ids = _check_ids(path, {**said, **given}, first)
    if tokenizer is None and _holds_tokenizer(checkpoint):
        tokenizer = checkpoint
    vq = _published_vq(variant, codes) if tokenizer is None else _vq_sizes(tokenizer, variant)
    if tokenizer is not None:
        check_codebook(tokenizer.path, vq, path, codes, _whose(variant))
    area = said.get("image_area") or GEN_AREA
    height, width = _usual_grid(variant, area, vq.downsample, sizes["max_positions"])
    with explain_sizes(path, "its configuration is not of these weights"):
        target = Emu3Config(
            **sizes,
            image_first=first,
            image_codes=codes,
            newline_id=ids.row_end,
            height=height,
            width=width,
            head_norm=variant == "emu3.5",
        )
        return Emu3Manifest(
            name=path.absolute().name if path.is_dir() else path.stem,
            variant=variant,
            area=area,
            ids=ids,
            target=target,
            tied=any(one.get("tie_word_embeddings") is True for one in (said, given)),
            vq=vq,
            defaults=DEFAULTS[variant].within(codes),
        )


def special_ids(said: Mapping[str, object]) -> Emu3Ids:
    """Return the ids of a configuration's vocabulary."""
    return Emu3Ids.before(_first_code(said))


def _first_code(said: Mapping[str, Any]) -> int:
    """Return the id of code 0: behind the image's end, as the configuration has it."""
    end = said.get("eoi_token_id") or (said.get("vocabulary_map") or {}).get(FRAME[2])
    if end is None:
        end = (said.get("pad_token_id") or Emu3Ids().pad) + BEFORE["pad"] - BEFORE["image_end"]
    return int(end) + 1


def _check_ids(path: Path, said: Mapping[str, object], first: int) -> Emu3Ids:
    with explain_sizes(f"the vocabulary of {path} has no place for Emu3's tokens", "use Emu3-Gen"):
        ids = Emu3Ids.before(first)
    by_order = ids.model_dump()
    for name, ours in _IDS.items():
        value = said.get(name)
        if value is not None and value != by_order[ours]:
            raise CheckpointError(
                f"the configuration of {path} says {name} {value}, but by the vocabulary's order it is "
                f"{by_order[ours]}; the two are not of one model"
            )
    return ids


def _published_vq(variant: Variant, codes: int) -> MoVQConfig | VQConfig:
    if variant == "emu3":
        return MoVQConfig(codebook_size=codes, halvings=2)
    return VQConfig(ch=256, num_res_blocks=4, codebook_size=codes, codebook_dim=256, l2_norm=False)


def _vq_sizes(tokenizer: Checkpoint, variant: Variant) -> MoVQConfig | VQConfig:
    """Return an image tokenizer's sizes; raises :class:`CheckpointError` for one of another family."""
    names, whose = tokenizer_names(tokenizer, IN_TARGET, IMAGE_RULES), _whose(variant)
    if variant == "emu3.5":
        return vq_sizes(tokenizer, names, whose, l2_norm=False)
    if "decoder.time_conv.0.conv.conv.weight" not in names:
        raise CheckpointError(
            f"{tokenizer.path} has no convolutions over time, so it is not {whose}; use that one"
        )
    return movq_sizes(tokenizer, names, whose)


def _usual_grid(variant: Variant, area: int, pixels: int, positions: int) -> tuple[int, int]:
    """Return the size that a request gets which names none; a square where positions are too few."""
    grid = SIZES_3P5[0] if variant == "emu3.5" else grid_of("1:1", area, pixels)
    if grid[0] * (grid[1] + 1) < positions:
        return grid
    side = max(1, math.isqrt(positions // 2))
    return side, side


# --- other parts --------------------------------------------------------------------------------------


def _holds_tokenizer(checkpoint: Checkpoint) -> bool:
    return any(re.match(IN_TARGET, key) for key in checkpoint)


def _image_tokenizer(path: Path, given: Path | None, target: Checkpoint) -> Path | None:
    """Return where the image tokenizer lies: named, near the model, or in the model's own file."""
    if given is not None:
        return given
    folder = path if path.is_dir() else path.parent
    names = ("vision_tokenizer", f"../{_variant(target).capitalize()}-VisionTokenizer")
    near = (folder / name for name in names)
    found = next((one for one in near if one.is_dir() and checkpoints_in(one)), None)
    return found or (path if _holds_tokenizer(target) else None)


def _add_text(found: Found[Emu3Manifest], folder: Path) -> None:
    """Add the tokenizer of either layout, or say what of it is absent."""
    home = found.parts.text or folder
    text = find_file([home], WORDS) or find_file([home], "tokenizer.json")
    if text is None:
        found.missing["text"] = f"a text tokenizer: put {WORDS} and {VISION} into {folder}"
        return
    if text.name == WORDS:
        if not (text.parent / VISION).is_file():
            found.missing["text"] = (
                f"{VISION}, the names of the image's tokens: put it into {folder}"
            )
            return
        codes = len(vision_tokens(text.parent)) - len(FRAME)
        if codes != found.manifest.target.image_codes:
            raise CheckpointError(
                f"{text.parent / VISION} names {codes} codes, the vocabulary of {folder} has "
                f"{found.manifest.target.image_codes}; they are not of one model"
            )
    found.files["text_tokenizer"] = text


def published_manifest(entry: ModelEntry) -> Emu3Manifest:
    """Return the manifest of a published model."""
    variant: Variant = entry.config["variant"]
    target = Emu3Config(**entry.config.get("target", {}))
    return Emu3Manifest(
        **entry.labels,
        variant=variant,
        target=target,
        vq=_published_vq(variant, target.image_codes),
        defaults=DEFAULTS[variant],
    )
