"""Loading a model: from a folder with ``model.json`` (the bundled one is one), or official files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import nn

from lantern_accel.checkpoints.loading import (
    Fingerprint,
    LoadingProgress,
    Recipe,
    check_tensors,
    fill,
    without_data,
)
from lantern_accel.checkpoints.weights import Checkpoint, open_checkpoint
from lantern_accel.device.operations import TensorOps
from lantern_accel.errors import CheckpointError
from lantern_accel.families.base import PARTS, Found, Model, Parts
from lantern_accel.families.keys import load_float, recipes_of, rename_keys
from lantern_accel.families.manifest import Manifest, ManifestT
from lantern_accel.families.registry import family
from lantern_accel.files import digest_of, read_json_file
from lantern_accel.nn.draft_head import DraftHead, HeadFile, empty_head
from lantern_accel.nn.transformer import pack
from lantern_accel.records import first_wrong

#: A part next to :data:`PARTS`, small and read in float32; its file says under this key what it is for.
HEAD = "draft_head"
ASSETS = Path(__file__).resolve().parent.parent / "assets"


def bundled_models() -> dict[str, Path]:
    """Return the models that the package carries, by name."""
    return {path.parent.name: path.parent for path in sorted(ASSETS.glob("*/model.json"))}


def read_manifest(folder: Path) -> Manifest:
    """Read ``model.json`` as its family's manifest.

    Raises :class:`CheckpointError` with the field that is wrong.
    """
    path = folder / "model.json"
    try:
        content = read_json_file(path)
        named = content.get("family") if isinstance(content, dict) else None
        # Without a family that can be asked, the fields that every manifest has say what is wrong.
        kind = family(named).manifest_type if isinstance(named, str) else Manifest
        found: Manifest = kind.model_validate(content)
        return found
    except ValidationError as error:
        raise CheckpointError(f"{path}: {first_wrong(error)}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None


def folder_parts(folder: Path, parts: Parts) -> Found:
    """Return what a folder with a ``model.json`` holds; parts named elsewhere take their place."""
    manifest = read_manifest(folder)
    files = {part: folder / f"{part}.safetensors" for part in ("target", "vq")}
    if manifest.drafter is not None and not parts.no_drafter:
        files["drafter"] = folder / "drafter.safetensors"
    if manifest.draft_head is not None:
        files[HEAD] = folder / f"{HEAD}.safetensors"
    if manifest.text is not None:
        files["text"] = folder / "text.safetensors"
        files["text_tokenizer"] = folder / "text_tokenizer.json"
    elif (folder / "tokenizer.json").is_file():
        files["text_tokenizer"] = folder / "tokenizer.json"
    if parts.text is not None:
        raise CheckpointError(
            f"the model {manifest.name!r} takes no text encoder from elsewhere, so {parts.text} would "
            "not be read; leave --use text-encoder=PATH out"
        )
    if parts.vq is not None:
        files["vq"] = parts.vq
    if parts.drafter is not None:
        manifest, files["drafter"] = family(manifest.family).with_drafter(manifest, parts.drafter)
    return Found(manifest, files, parts)


def with_head(found: Found, parts: Parts) -> Found:
    """Return a model with the draft head that was named, or without its own where none was asked for.

    Raises :class:`CheckpointError` for a file that is not a draft head, or one of other sizes.
    """
    files = {part: file for part, file in found.files.items() if part != HEAD}
    if parts.no_head:
        return replace(found, manifest=found.manifest.model_copy(update={HEAD: None}), files=files)
    if parts.head is None:
        return found
    manifest, path = named_head(parts.head, found.manifest)
    return replace(found, manifest=manifest, files={**files, HEAD: path})


def named_head(path: Path, manifest: ManifestT) -> tuple[ManifestT, Path]:
    """Return a model's manifest with the sizes of a draft head at ``path``, and the head's file.

    Raises :class:`CheckpointError` for a file that is not a draft head, or one of other sizes.
    """
    if path.is_dir():
        path, folder = path / f"{HEAD}.safetensors", path
        if (folder / "checkpoint.pt").is_file() and not path.is_file():
            raise CheckpointError(
                f"the training of the draft head in {folder} has not ended; run the same `lantern-accel "
                "train head` again to go on, or leave --use head=PATH out"
            )
    try:
        config = HeadFile.model_validate_json(str(open_checkpoint(path).info.get(HEAD, ""))).config
    except ValidationError:
        raise CheckpointError(
            f"{path} is not a draft head of `lantern-accel train head`; train one, or leave "
            "--use head=PATH out"
        ) from None
    if (wrong := config.misfit(manifest.target.dim, manifest.target.vocab_size)) is not None:
        raise CheckpointError(
            f"the draft head {path} is of another model: {wrong}; name one of {manifest.name!r}, "
            "or leave --use head=PATH out"
        )
    return manifest.model_copy(update={HEAD: config}), path


def open_part(
    found: Found, part: str, ops: TensorOps
) -> tuple[nn.Module, Checkpoint, Mapping[str, Recipe]]:
    """Return a part without its data, its checkpoint, and where each of its tensors lies there."""
    kind, checkpoint = family(found.manifest.family), open_checkpoint(found.files[part])
    if part == HEAD:
        head = empty_head(found.manifest.draft_head)
        assert head is not None  # its file is looked for only where the manifest has its sizes
        return head, checkpoint, recipes_of(rename_keys(checkpoint, ()))
    with without_data():
        module = kind.build(found.manifest, part, ops)
    return module, checkpoint, kind.recipes(part, checkpoint, found.manifest)


def read_head(manifest: Manifest, path: Path, device: torch.device, trunk: str) -> DraftHead:
    """Load a draft head, which is small, in float32; ``trunk``: the fingerprint of the target.

    Raises :class:`CheckpointError` for a head of other weights.
    """
    head = empty_head(manifest.draft_head)
    assert head is not None  # its file is looked for only where the manifest has its sizes
    said = open_checkpoint(path).info.get(HEAD)
    if said is not None and HeadFile.model_validate_json(str(said)).trunk != trunk:
        raise CheckpointError(
            f"the draft head {path} was trained on another model's weights than those of "
            f"{manifest.name!r}; train one for these (`lantern-accel train head`), or decode "
            "without one (--use head=none)"
        )
    load_float(head, path)
    return head.to(device).eval().requires_grad_(False)


def load_model(
    found: Found,
    ops: TensorOps,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: LoadingProgress | None = None,
    pack_target: bool = True,
    text_dtype: torch.dtype | None = None,
) -> Model:
    """Load every part; target and drafter in ``dtype``, the image tokenizer in float32.

    ``text_dtype``: a text encoder's; None: ``dtype``.

    ``pack_target``: hand the target's weights to the backend; without it they stay as they are.

    Raises :class:`CheckpointError` naming the part and what is wrong with it.
    """
    kind = family(found.manifest.family)
    for part in PARTS:
        if part in kind.needs and part not in found.files:
            lacks = found.missing.get(part, f"its {part}")
            raise CheckpointError(f"the model {found.manifest.name!r} lacks {lacks}")
    loaded: dict[str, nn.Module | None] = dict.fromkeys(PARTS)
    fingerprint, trunk = Fingerprint(), ""
    opened = {part: open_part(found, part, ops) for part in PARTS if part in found.files}
    for part, (module, checkpoint, recipes) in opened.items():  # all, before any is read
        check_tensors(module, checkpoint, recipes, found.files[part].name, kind.beside.get(part))
    for part, (module, checkpoint, recipes) in opened.items():
        fill(
            module,
            checkpoint,
            recipes,
            dtype=torch.float32 if part == "vq" else dtype,
            device=device,
            what=found.files[part].name,
            progress=progress,
            fingerprint=fingerprint,
            unneeded=kind.beside.get(part),
            ready=partial(pack, ops=ops) if pack_target or part != "target" else None,
        )
        trunk = trunk or fingerprint.hexdigest()  # the target comes first
        kind.place_tables(module, device)
        module.eval().requires_grad_(False)
        loaded[part] = module
    if HEAD in found.files:
        head = read_head(found.manifest, found.files[HEAD], device, trunk)
        assert loaded["target"] is not None  # no head is read without it
        loaded["target"].draft_head = head
    text = kind.text(found, device, text_dtype or dtype, ops.text_encoder)
    if (found.files["target"].parent / "model.json").is_file():
        names = ("target", "drafter", "vq", "text")
        there = [found.files[name] for name in names if name in found.files]
        digest = digest_of(there)[:16]
    else:
        digest = fingerprint.hexdigest()
    return Model(
        manifest=found.manifest,
        **loaded,
        text=text,
        weights_hash=digest,
        family=kind,
        missing=found.missing,
        trunk=trunk,
    )
