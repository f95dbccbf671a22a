"""The files of Anole and Lumina-mGPT: where they lie, and which of the two they are.

Sizes are read off shapes; a configuration gives what they cannot say: epsilon, the rotation's base, the
longest sequence, where the norms are. The two are one trunk: Meta's layout and transformers' own
configuration are Anole's, Lumina's configuration has fields of its own. The side of Lumina's images is
in no file, so that its published name has to be in the path, or be given.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lantern_accel.checkpoints.layouts import (
    check_sizes,
    explain_sizes,
    find_file,
    folder_json,
    our_sizes,
)
from lantern_accel.checkpoints.weights import Checkpoint, has_weights, open_checkpoint
from lantern_accel.errors import CheckpointError, show
from lantern_accel.families.base import OTHER_DRAFTER, Found, Parts
from lantern_accel.families.chameleon.layouts import (
    SIGNATURES,
    VQ_PREFIX,
    block_sizes,
    chameleon_vq_config,
)
from lantern_accel.families.chameleon.model import (
    DEFAULTS,
    ChameleonConfig,
    ChameleonDrafterConfig,
    ChameleonManifest,
    Variant,
)
from lantern_accel.families.chameleon.text import ChameleonIds, ids_from_vocabulary
from lantern_accel.families.image_tokenizer import check_codebook, tokenizer_names, vq_sizes
from lantern_accel.families.keys import check_usual, layout_of, open_model
from lantern_accel.families.published import ModelEntry
from lantern_accel.families.registry import ask_for_name, entry_at, list_published, parts_of
from lantern_accel.families.tokenizer import read_vocabulary
from lantern_accel.nn.vq import VQConfig

#: What a published drafter has from its target.
SHARED = {"image_first", "image_codes", "newline_id", "height", "width", "prefix_length"}
#: Fields that Lumina's configuration alone has.
LUMINAS = ("mask_image_logits", "dropout")
_WHERE_VQ = "tokenizer/vqgan.ckpt of Chameleon's release"
_WHERE_TEXT = "tokenizer/text_tokenizer.json of Chameleon's release"


def read_settings(weights: Path) -> dict[str, object]:
    """Return ``config.json`` or ``params.json`` next to weights, flat; {} without one."""
    folder = weights if weights.is_dir() else weights.parent
    found: dict[str, object] = {}
    for name in ("config.json", "params.json", "consolidate_params.json"):
        content = folder_json(folder, name)
        inner = content.get("model")
        found.update({**content, **(inner if isinstance(inner, dict) else {})})
    return found


def _read_sizes(config: dict[str, object]) -> dict[str, object]:
    """Return what a configuration says that shapes do not."""
    found, names = our_sizes(config), ("norm_eps", "rope_base", "swin_norm", "max_positions")
    return {name: found[name] for name in names if name in found}


def target_config(
    checkpoint: Checkpoint, config: dict[str, object], ids: ChameleonIds, newline: bool, side: int
) -> ChameleonConfig:
    """Return a target's configuration.

    ``newline``: rows end in a token of their own; ``side``: codes along the default image's side.
    Raises :class:`CheckpointError` where the configuration is of other weights.
    """
    if (kind := config.get("model_type")) not in (None, "chameleon"):
        raise CheckpointError(
            f"{checkpoint.path} is of the type {show(kind)} by its configuration, and its tensors are "
            "Chameleon's, so the two are not of one model; fetch both again"
        )
    sizes = block_sizes(checkpoint)
    check_usual(checkpoint.path, config)
    check_sizes(checkpoint.path, config, {n: sizes[n] for n in ("dim", "n_layer", "n_head")})
    return ChameleonConfig(
        **sizes,
        **_read_sizes(config),
        image_first=ids.image_first,
        image_codes=ids.image_codes,
        newline_id=ids.newline if newline else None,
        height=side,
        width=side,
    )


def published_drafter(path: Path, target: ChameleonConfig) -> ChameleonDrafterConfig:
    """Return the sizes of LANTERN's drafter; raises :class:`CheckpointError` for something else."""
    checkpoint = open_checkpoint(path)
    if layout_of(checkpoint, SIGNATURES) != "drafter":
        raise CheckpointError(
            f"{path} is not a drafter for Anole or Lumina: it lacks their norms of queries and keys; "
            f"{OTHER_DRAFTER}"
        )
    sizes = block_sizes(checkpoint)
    if sizes["n_layer"] != 1:
        raise CheckpointError(
            f"the drafter {path} has {sizes['n_layer']} layers, only drafters of one layer are "
            f"supported; {OTHER_DRAFTER}"
        )
    said = {
        name: value
        for name, value in _read_sizes(read_settings(path)).items()
        if name != "max_positions"
    }
    shared = target.model_dump(include=SHARED)
    with explain_sizes(
        f"the config.json of the drafter {path}", "take it from where the drafter is from"
    ):
        return ChameleonDrafterConfig(**sizes, **said, **shared, bias="fc.bias" in checkpoint)


def drafters_near(found: Found[ChameleonManifest]) -> list[Path]:
    """Return where ours or LANTERN's folders have the drafter of a model."""
    home, variant = _release(found.files["target"]), found.manifest.variant
    return [home / "drafter", home.parent / "trained_drafters" / f"{variant}_drafter"]


def detect(path: Path, parts: Parts) -> Found[ChameleonManifest] | None:
    """Say what of this family lies at ``path``; None where it is another family's.

    Raises :class:`CheckpointError` for a Chameleon model that lacks a shard or has foreign sizes, and
    where nothing says which one it is.
    """
    weights = _weights(path)
    if weights is None:
        return None
    config = read_settings(weights)
    ours = config.get("model_type") == "chameleon" or weights.name == "consolidated.pth"
    opened = open_model(weights, SIGNATURES, ours=ours, whose="Chameleon")
    if opened is None or opened[1] == "drafter":
        return None
    checkpoint, layout = opened
    entry = parts.entry or entry_at("chameleon", path)
    variant = _variant(path, config, layout, parts.entry, entry)
    if variant == "anole":
        side = anole_side(config)
    elif entry is not None and entry.config["variant"] == "lumina":
        side = int(entry.config["pixels"]) // 16
    else:
        names = [one.name for one in list_published() if one.config.get("variant") == "lumina"]
        raise ask_for_name(path, "for which size of images this Lumina-mGPT was trained", names)
    files, missing = {"target": weights}, dict[str, str]()
    text = _text_tokenizer(path, parts)
    ids = ChameleonIds()
    if text is None:
        missing["text"] = f"a text tokenizer: put {_WHERE_TEXT} into {path}"
    else:
        files["text_tokenizer"] = text
        ids = ids_from_vocabulary(read_vocabulary(text, _WHERE_TEXT))
    vq_path = _image_tokenizer(path, weights, checkpoint, parts)
    vq = chameleon_vq_config(codebook_size=ids.image_codes)
    if vq_path is None:
        missing["vq"] = (
            f"an image tokenizer: put {_WHERE_VQ} into {path}, or name it with --use vq=PATH"
        )
    else:
        files["vq"] = vq_path
        opened_vq = open_checkpoint(vq_path)
        tensors = tokenizer_names(opened_vq, VQ_PREFIX)
        vq = vq_sizes(opened_vq, tensors, "Chameleon's VQGAN", attend=False, l2_norm=False)
        if text is None:  # how many image tokens there are, only the vocabulary says
            ids = ChameleonIds(image_codes=vq.codebook_size)
        check_codebook(vq_path, vq, path, ids.image_codes, _WHERE_VQ)
    with explain_sizes(f"the parts of {path} are not of one model", "take them from one release"):
        target = target_config(checkpoint, config, ids, variant == "lumina", side)
        manifest = _manifest(_release(path).name, variant, ids, target, vq)
    return Found(manifest, files, parts, missing)


def _manifest(
    name: str, variant: Variant, ids: ChameleonIds, target: ChameleonConfig, vq: VQConfig
) -> ChameleonManifest:
    """Return the manifest of parts that are of one model."""
    defaults, side = DEFAULTS[variant].within(target.image_codes), target.height
    return ChameleonManifest(
        name=name, variant=variant, side=side, ids=ids, target=target, vq=vq, defaults=defaults
    )


def manifest_of_module(weights: Checkpoint, config: dict[str, Any]) -> ChameleonManifest:
    """Return the manifest of a model that transformers has loaded, whose configuration has the ids.

    Rows have no end of their own here: an image is Anole's, square. Raises :class:`CheckpointError`.
    """
    if layout_of(weights, SIGNATURES) is None or not config.get("vocabulary_map"):
        raise CheckpointError(
            f"{weights.path} has no vocabulary_map in its configuration, or no norms of queries and "
            "keys, so it is not a Chameleon that generates images; load Anole as transformers' "
            "ChameleonForConditionalGeneration"
        )
    ids = ids_from_vocabulary(config["vocabulary_map"])
    target = target_config(weights, config, ids, False, anole_side(config))
    vq = chameleon_vq_config(codebook_size=ids.image_codes)
    return _manifest("anole", "anole", ids, target, vq)


def published_manifest(entry: ModelEntry) -> ChameleonManifest:
    """Return the manifest of a published model, drafter included where one is published."""
    variant: Variant = entry.config["variant"]
    side = entry.config["pixels"] // 16
    newline = ChameleonIds().newline if variant == "lumina" else None
    target = ChameleonConfig(newline_id=newline, height=side, width=side)
    return ChameleonManifest(
        **entry.labels,
        variant=variant,
        side=side,
        target=target,
        drafter=ChameleonDrafterConfig.fitting(target) if "drafter" in parts_of(entry) else None,
        vq=chameleon_vq_config(),
        defaults=DEFAULTS[variant],
    )


# --- which model --------------------------------------------------------------------------------------


def _variant(
    path: Path,
    config: dict[str, object],
    layout: str | None,
    given: ModelEntry | None,
    entry: ModelEntry | None,
) -> Variant:
    """Return which of the two a folder holds; raises :class:`CheckpointError` where nothing says."""
    variant: Variant
    if given is None and layout == "original":
        return "anole"
    if given is None and any(config.get(name) is not None for name in LUMINAS):
        return "lumina"
    if entry is not None:
        variant = entry.config["variant"]
        return variant
    if config.get("model_type") == "chameleon":
        return "anole"
    names = [one.name for one in list_published() if one.family == "chameleon"]
    raise ask_for_name(path, "whether it is Anole or Lumina-mGPT", names)


def anole_side(config: dict[str, Any]) -> int:
    """Return the codes along the side of Anole's images: as its configuration says, or 32."""
    said = config.get("vq_config") or {}
    levels = len(said.get("ch_mult", said.get("channel_multiplier", ())))
    return int(said["resolution"]) >> (levels - 1) if "resolution" in said and levels else 32


# --- files --------------------------------------------------------------------------------------------


def _weights(path: Path) -> Path | None:
    """Return the file or folder that holds the target's weights, where there may be one."""
    found = find_file((path / "models" / "7b", path), "consolidated.pth")
    return path if found is None and path.is_dir() and has_weights(path) else found


def _release(path: Path) -> Path:
    """Return the folder of a release: two above Anole's ``models/7b``, where its tokenizer lies."""
    home = path.absolute() if path.is_dir() else path.absolute().parent
    return home.parent.parent if home.name == "7b" else home


def _homes(path: Path) -> list[Path]:
    """Return where a model's other parts may lie: its folder, those above, and the releases' own."""
    home = path if path.is_dir() else path.parent
    roots = [home, home.parent, _release(path)]
    below = ("tokenizer", "chameleon/tokenizer")
    return [home, *(root / folder for root in roots for folder in below)]


def _in(given: Path | None) -> list[Path]:
    """Return where a tokenizer may lie at a path that a user gave: itself, or within the folder."""
    return [] if given is None else [given, given / "tokenizer"]


def _text_tokenizer(path: Path, parts: Parts) -> Path | None:
    homes = _homes(path)
    # The image tokenizer's folder has the text tokenizer next to it.
    near = [] if parts.vq is None or parts.vq.is_file() else _in(parts.vq)
    named = find_file([*_in(parts.text), *homes, *near], "text_tokenizer.json")
    return named or find_file(homes, "tokenizer.json")


def _image_tokenizer(path: Path, weights: Path, target: Checkpoint, parts: Parts) -> Path | None:
    """Return the file of the image tokenizer: given, near the model, or within its shards."""
    found = find_file(_homes(path) if parts.vq is None else _in(parts.vq), "vqgan.ckpt")
    if found is None and parts.vq is not None:
        raise CheckpointError(f"{parts.vq} has no vqgan.ckpt; name {_WHERE_VQ}")
    if found is None and f"{VQ_PREFIX}decoder.conv_in.weight" in target:
        return weights
    return found
