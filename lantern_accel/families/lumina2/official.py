"""The files of Lumina-mGPT 2.0: Chameleon's in Hugging Face's layout, with another vocabulary.

``model_type`` is chameleon for Anole and both Luminas; the vocabulary says which one it is. The image
decoder is another repository's file, and the size for which a model was trained is in no file.
"""

from __future__ import annotations

from pathlib import Path

from lantern_accel.checkpoints.layouts import explain_sizes, folder_json
from lantern_accel.checkpoints.weights import SUFFIXES, Checkpoint, has_weights, open_checkpoint
from lantern_accel.errors import CheckpointError
from lantern_accel.families import keys
from lantern_accel.families.base import Found, Parts
from lantern_accel.families.chameleon import layouts
from lantern_accel.families.chameleon.official import target_config
from lantern_accel.families.image_tokenizer import check_codebook, movq_sizes, tokenizer_names
from lantern_accel.families.lumina2.model import DEFAULTS, Lumina2Config, Lumina2Manifest
from lantern_accel.families.lumina2.text import (
    CODE,
    UNIT,
    UNIT_PIXELS,
    Lumina2Ids,
    first_token,
    ids_from_vocabulary,
)
from lantern_accel.families.published import ModelEntry
from lantern_accel.families.registry import entry_at
from lantern_accel.families.tokenizer import read_vocabulary
from lantern_accel.nn.movq import MoVQConfig

#: Pixels along the side of the released model's images, in the README's table.
PIXELS = 768
_WHERE_VQ = "movqgan_270M.ckpt of ai-forever/MoVQGAN"
_VQ_FOLDERS = ("", "270M", "movqgan", "movqgan/270M", "vq")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
#: What begins a prompt where no tokenizer says so: Qwen2.5's end of a turn.
_USUAL_FIRST = "<|im_end|>"


def detect(path: Path, parts: Parts) -> Found | None:
    """Say what of this family lies at ``path``; None where it is another family's.

    Raises :class:`CheckpointError` for a Lumina-mGPT 2.0 that lacks a shard or whose parts are not of one
    model.
    """
    if path.is_dir() and not has_weights(path):
        return None
    folder = path if path.is_dir() else path.parent
    said, home = folder_json(folder), parts.text or folder
    entry = parts.entry or entry_at("lumina2", path)
    text = home / _TOKENIZER[0]
    known = dict[str, int]()
    released = entry is not None and entry.family == "lumina2"
    if text.is_file() and (released or said.get("model_type") == "chameleon"):
        known = dict(read_vocabulary(text, "the one that comes with the model"))
    named = said.get("vocabulary_map") or known
    if not released and not any(name.startswith(CODE) for name in named):
        return None
    if not said:
        raise CheckpointError(
            f"{folder} lacks config.json, which says what the weights of Lumina-mGPT 2.0 cannot; fetch "
            "it from the model's repository"
        )
    opened = keys.open_model(path, layouts.SIGNATURES, ours=True, whose="Lumina-mGPT 2.0")
    assert opened is not None  # it is ours
    checkpoint, _ = opened
    files, missing = {"target": path}, dict[str, str]()
    absent = [name for name in _TOKENIZER if not (home / name).is_file()]
    if absent:
        missing["text"] = f"a text tokenizer: put the model's {' and '.join(absent)} into {home}"
    else:
        files["text_tokenizer"] = text
    first = first_token(folder_json(home, _TOKENIZER[1])) if not absent else _USUAL_FIRST
    ids = ids_from_vocabulary(known or named, first) if known or named else Lumina2Ids()
    vq, vq_path = MoVQConfig(codebook_size=ids.image_codes), _image_decoder(folder, parts)
    if vq_path is None:
        missing["vq"] = (
            f"an image decoder: put {_WHERE_VQ} into {folder}, or name it with --use vq=PATH"
        )
    else:
        files["vq"] = vq_path
        vq = _vq_config(vq_path, ids)
    with explain_sizes(f"the parts of {path} are not of one model", "take them from one release"):
        target = _target(checkpoint, said, ids)
        manifest = Lumina2Manifest(
            name=folder.absolute().name,
            side=target.height,
            ids=ids,
            target=target,
            vq=vq,
            defaults=DEFAULTS.within(target.image_codes),
        )
    return Found(manifest, files, parts, missing)


def published_manifest(entry: ModelEntry) -> Lumina2Manifest:
    """Return the manifest of a published model."""
    ids, side = Lumina2Ids(), entry.config["pixels"] * UNIT // UNIT_PIXELS
    target = Lumina2Config(
        token_count=171385,
        image_first=ids.image_first,
        image_codes=ids.image_codes,
        newline_id=ids.newline,
        height=side,
        width=side,
        max_positions=10240,
    )
    return Lumina2Manifest(
        **entry.labels, side=side, target=target, vq=MoVQConfig(), defaults=DEFAULTS
    )


def _target(checkpoint: Checkpoint, said: dict[str, object], ids: Lumina2Ids) -> Lumina2Config:
    """Return the target's sizes; its own image is the released one, or the largest that fits."""
    sizes = target_config(checkpoint, said, ids, True, UNIT).model_dump()
    side, most = PIXELS * UNIT // UNIT_PIXELS, sizes["max_positions"]
    while side > UNIT and (side * (side + 1) > most or side // UNIT >= len(ids.grids)):
        side -= UNIT
    return Lumina2Config(**{**sizes, "height": side, "width": side})


def _image_decoder(folder: Path, parts: Parts) -> Path | None:
    """Return the file of the image decoder: the one that was given, or one near the model."""
    given = parts.vq
    if given is not None and given.is_file():
        return given
    places = ((given or folder) / name for name in _VQ_FOLDERS)
    files = (one for place in places for one in sorted(place.glob("movqgan*")))
    found = next((one for one in files if one.is_file() and one.suffix in SUFFIXES), None)
    if found is None and given is not None:
        raise CheckpointError(f"{given} has no movqgan file; name {_WHERE_VQ}")
    return found


def _vq_config(path: Path, ids: Lumina2Ids) -> MoVQConfig:
    """Return the sizes of an image decoder; raises :class:`CheckpointError` for another model's."""
    checkpoint = open_checkpoint(path)
    vq = movq_sizes(checkpoint, tokenizer_names(checkpoint, layouts.VQ_PREFIX), "MoVQGAN")
    if vq.halvings:
        raise CheckpointError(
            f"{path} was trained on video, as Emu3's; name {_WHERE_VQ} with --use vq=PATH"
        )
    check_codebook(path, vq, "the vocabulary", ids.image_codes, _WHERE_VQ)
    return vq
