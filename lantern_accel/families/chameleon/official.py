"""Finding Anole and Lumina-mGPT in folders laid out as their READMEs say.

Both are one trunk, so that shapes cannot tell them apart; configurations and names do.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lantern_accel.checkpoints.layouts import drafter_weights, explained
from lantern_accel.checkpoints.weights import Checkpoint, has_weights, open_checkpoint
from lantern_accel.errors import CheckpointError
from lantern_accel.families.base import Found, Parts
from lantern_accel.families.catalogue import parts_of, released
from lantern_accel.families.chameleon.drafter import ChameleonDrafterConfig
from lantern_accel.families.chameleon.keys import DRAFTER, half_split, key_layout
from lantern_accel.families.chameleon.manifest import DEFAULTS, ChameleonManifest, Variant
from lantern_accel.families.chameleon.model import ChameleonConfig
from lantern_accel.families.chameleon.sizes import (
    SHARED,
    VQ_PREFIX,
    chameleon_vq_config,
    drafter_config,
    norm_shape,
    said_of,
    target_config,
    vq_config,
)
from lantern_accel.families.chameleon.text import SpecialIds, ids_from_vocabulary
from lantern_accel.families.published import ModelEntry
from lantern_accel.families.tokenizer import read_vocabulary

_WHERE_VQ = "tokenizer/vqgan.ckpt of Chameleon's release"
_WHERE_TEXT = "tokenizer/text_tokenizer.json of Chameleon's release"
#: Sizes by which a published model is known.
_RELEASED = ("dim", "n_layer", "n_head", "ffn_dim", "token_count", "image_codes", "height")
VARIANTS: tuple[Variant, ...] = ("lumina", "anole")


def detect(path: Path, parts: Parts) -> Found | None:
    """Say what of this family lies at ``path``; None where it is another family's.

    Raises :class:`CheckpointError` for a Chameleon model that lacks a shard or has foreign sizes.
    """
    weights = _weights(path)
    if weights is None:
        return None
    config = said_of(weights)
    try:
        checkpoint = open_checkpoint(weights)
    except CheckpointError:
        if _is_ours(weights, config):
            raise
        return None  # whose it is, others may know
    layout = key_layout(checkpoint)
    if layout is None and config.get("model_type") == "chameleon":
        raise CheckpointError(
            f"{weights} is Chameleon's by its config.json, but lacks the embedding or the first layer's "
            "norm of queries: a part of it is absent; fetch it again"
        )
    if layout is None or layout is DRAFTER:
        return None
    files = {"target": weights}
    notes: list[str] = []
    missing: dict[str, str] = {}
    text = _text_tokenizer(path, parts)
    ids = SpecialIds()
    if text is None:
        missing["text"] = f"a text tokenizer: put {_WHERE_TEXT} into {path}"
    else:
        files["text_tokenizer"] = text
        ids = ids_from_vocabulary(read_vocabulary(text, _WHERE_TEXT))
    variant, why = _variant(path, config)
    notes.append(f"{variant.capitalize()}, {why}")
    vq_path = _picture_tokenizer(path, weights, checkpoint, parts)
    vq = chameleon_vq_config(codebook_size=ids.image_codes)
    if vq_path is None:
        missing["vq"] = f"a picture tokenizer: put {_WHERE_VQ} into {path}, or name it with --vq"
    else:
        files["vq"] = vq_path
        vq = vq_config(open_checkpoint(vq_path))
        if text is None:  # how many image tokens there are, only the vocabulary says
            ids = SpecialIds(image_codes=vq.codebook_size)
        if vq.codebook_size != ids.image_codes:
            raise CheckpointError(
                f"{vq_path} is of another codebook: it has {vq.codebook_size} codes, the vocabulary of "
                f"{path} {ids.image_codes}; name the right tokenizer with --vq"
            )
    pairing = "half-split" if half_split(norm_shape(checkpoint, layout)) else "adjacent"
    notes.append(f"{layout.name} keys, {pairing} rotary pairs")
    drafter = _drafter(path, parts, variant)
    if drafter is not None:
        files["drafter"] = drafter
    elif not parts.no_drafter:
        missing["drafter"] = _where_drafter(path, variant)
    with explained(
        lambda why: f"the parts of {path} are not of one model ({why}); take them from one release"
    ):
        target = target_config(
            checkpoint, layout, config, ids, variant == "lumina", _side(path, config, variant)
        )
        manifest = ChameleonManifest(
            name=_release(path).name,
            variant=variant,
            side=target.height,
            ids=ids,
            target=target,
            drafter=drafter and drafter_config(open_checkpoint(drafter), drafter, target),
            vq=vq,
            defaults=DEFAULTS[variant].within(target.image_codes),
        )
    # Both layouts of Anole are one model.
    manifest = manifest.named(released(manifest, published_manifest, _RELEASED, variant=variant))
    return Found(manifest, files, parts, notes, missing)


def manifest_of_module(weights: Checkpoint, config: dict[str, Any]) -> ChameleonManifest:
    """Return the manifest of a model that transformers has loaded, whose configuration has the ids.

    Rows have no end of their own here: a picture is Anole's, square. Raises :class:`CheckpointError`.
    """
    layout = key_layout(weights)
    if layout is None or not config.get("vocabulary_map"):
        raise CheckpointError(
            f"{weights.path} has no vocabulary_map in its configuration, or no norms of queries and "
            "keys, so "
            "it is not a Chameleon that draws; load Anole as transformers' "
            "ChameleonForConditionalGeneration"
        )
    ids = ids_from_vocabulary(config["vocabulary_map"])
    target = target_config(weights, layout, config, ids, False, _side(Path(), config, "anole"))
    return ChameleonManifest(
        name="anole",
        variant="anole",
        side=target.height,
        ids=ids,
        target=target,
        vq=chameleon_vq_config(codebook_size=ids.image_codes),
        defaults=DEFAULTS["anole"].within(target.image_codes),
    )


def published_manifest(entry: ModelEntry) -> ChameleonManifest:
    """Return the manifest of a published model, drafter included where one is published."""
    variant: Variant = entry.config["variant"]
    side = entry.config["pixels"] // 16
    target = ChameleonConfig(
        newline_id=SpecialIds().newline if variant == "lumina" else None, height=side, width=side
    )
    shared = {name: getattr(target, name) for name in SHARED}
    return ChameleonManifest(
        **entry.labels,
        variant=variant,
        side=side,
        target=target,
        drafter=ChameleonDrafterConfig(**shared) if "drafter" in parts_of(entry) else None,
        vq=chameleon_vq_config(),
        defaults=DEFAULTS[variant],
    )


# --- files --------------------------------------------------------------------------------------------


def _weights(path: Path) -> Path | None:
    """Return the file or folder that holds the target's weights, where there may be one."""
    if path.is_file():
        return path
    for folder in (path / "models" / "7b", path):
        if (folder / "consolidated.pth").is_file():
            return folder / "consolidated.pth"
    return path if path.is_dir() and has_weights(path) else None


def _release(path: Path) -> Path:
    """Return the folder of a release: two above Anole's ``models/7b``, where its tokenizer lies."""
    home = path.absolute() if path.is_dir() else path.absolute().parent
    return home.parent.parent if home.name == "7b" else home


def _homes(path: Path) -> list[Path]:
    """Return where a model's other parts may lie: its folder, those above, and the releases' own."""
    home = path if path.is_dir() else path.parent
    roots = [home, home.parent]
    if home.name == "7b":
        roots.append(_release(path))
    below = ("tokenizer", "chameleon/tokenizer")
    return [home, *(root / folder for root in roots for folder in below)]


def _file_of(given: Path | None, name: str) -> Path | None:
    """Return the file of this name at a path that a user gave: itself, or within the folder."""
    if given is None or given.is_file():
        return given
    for folder in (given, given / "tokenizer"):
        if (folder / name).is_file():
            return folder / name
    return None


def _text_tokenizer(path: Path, parts: Parts) -> Path | None:
    name = "text_tokenizer.json"
    # The picture tokenizer's folder has the text tokenizer beside it.
    near = None if parts.vq is None or parts.vq.is_file() else _file_of(parts.vq, name)
    given = _file_of(parts.text, name)
    for found in (given, *(home / name for home in _homes(path)), near):
        if found is not None and found.is_file():
            return found
    for home in _homes(path):
        if (home / "tokenizer.json").is_file():
            return home / "tokenizer.json"
    return None


def _is_ours(weights: Path, config: dict[str, Any]) -> bool:
    return config.get("model_type") == "chameleon" or weights.name == "consolidated.pth"


# --- which model --------------------------------------------------------------------------------------


def _names(path: Path, config: dict[str, Any]) -> list[str]:
    """Return what a model is called, the nearest name first.

    In the Hub's cache a folder is called by a hash, and two above it by the repository.
    """
    names = [str(config.get("_name_or_path", "")), *path.parts[:-6:-1]]
    return [name.lower() for name in names if not re.fullmatch(r"[0-9a-f]{40}", name)]


def _variant(path: Path, config: dict[str, Any]) -> tuple[Variant, str]:
    """Return which of the two a folder holds, and by what.

    Shapes cannot tell: both are the same trunk. Lumina's configurations alone say whether image logits
    are hidden, and its training had dropout.
    """
    if "mask_image_logits" in config or config.get("dropout"):
        return "lumina", "by its config.json (mask_image_logits, dropout)"
    for name in _names(path.absolute(), config):
        for variant in VARIANTS:
            if variant in name:
                return variant, "by its name"
    return "anole", "as nothing says that it is Lumina"


def _side(path: Path, config: dict[str, Any], variant: Variant) -> int:
    """Return the codes along the side of the pictures that a model was trained for.

    Anole: 32. Lumina: its name says how many pixels, 16 a code; 768 where it does not.
    """
    said = config.get("vq_config") or {}
    levels = len(said.get("ch_mult", said.get("channel_multiplier", ())))
    if variant == "anole":
        return int(said["resolution"]) >> (levels - 1) if "resolution" in said and levels else 32
    for name in _names(path.absolute(), config):
        found = re.search(r"(?<!\d)(512|768|1024)(?!\d)", name)
        if found:
            return int(found[1]) // 16
    return 64 if int(config.get("max_position_embeddings", 0)) > 4096 else 48


def _drafter(path: Path, parts: Parts, variant: Variant) -> Path | None:
    if parts.no_drafter:
        return None
    if parts.drafter is not None:
        return drafter_weights(parts.drafter)
    home = _release(path)
    beside = sorted((home.parent / "trained_drafters").glob(f"{variant}*drafter*"))
    for folder in (home / "drafter", *beside):
        own = drafter_weights(folder)
        if own.is_file() or (folder.is_dir() and has_weights(folder)):
            return own
    return None


def _where_drafter(path: Path, variant: Variant) -> str:
    if variant == "lumina":
        return (
            "a drafter: none is published for Lumina, train one with `lantern-accel train drafter`"
        )
    home = _release(path) / "drafter"
    return f"a drafter: put jadohu/anole_drafter into {home}, or name it with --drafter"


def _picture_tokenizer(path: Path, weights: Path, target: Checkpoint, parts: Parts) -> Path | None:
    """Return the file of the picture tokenizer: given, beside the model, or within its shards."""
    name = "vqgan.ckpt"
    if parts.vq is not None:
        found = _file_of(parts.vq, name)
        if found is None:
            raise CheckpointError(f"{parts.vq} has no {name}; name {_WHERE_VQ}")
        return found
    for home in _homes(path):
        if (home / name).is_file():
            return home / name
    return weights if f"{VQ_PREFIX}decoder.conv_in.weight" in target else None
