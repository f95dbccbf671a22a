"""Lists what a model folder holds and lacks, for ``lantern-accel models check``; loads nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from lantern_accel.checkpoints.loading import check_tensors
from lantern_accel.checkpoints.weights import open_checkpoint
from lantern_accel.device.operations import TensorOps
from lantern_accel.errors import CheckpointError, LanternError, ModelError
from lantern_accel.families.base import PARTS, Found, Parts
from lantern_accel.families.registry import family
from lantern_accel.models.bundle import HEAD, open_part
from lantern_accel.models.locate import find_model
from lantern_accel.records import Frozen

NAMES = {
    "target": "model",
    "vq": "image tokenizer",
    "drafter": "drafter",
    HEAD: "draft head",
    "t5": "text encoder",
    "text": "text encoder",
    "text_tokenizer": "word tokenizer",
}


class ModelPart(Frozen):
    """One part: where it is, or what is missing, or what is wrong with it."""

    part: str
    state: Literal["found", "missing", "unusable"]
    path: str = ""
    parameters: int = 0
    dtypes: tuple[str, ...] = ()
    nbytes: int = 0
    detail: str = ""


class Checked(Frozen):
    """A folder's parts; ``usable`` says whether plain decoding would work."""

    path: str
    model: str = ""
    summary: str = ""
    family: str = ""
    parts: tuple[ModelPart, ...]

    @property
    def usable(self) -> bool:
        """Whether what decoding cannot do without is there, and nothing is broken."""
        found = {one.part for one in self.parts if one.state == "found"}
        needed = family(self.family).needs if self.family else ("target",)
        return found.issuperset(needed) and all(one.state != "unusable" for one in self.parts)


def check(path: Path, parts: Parts | None = None) -> Checked:
    """Say what lies at ``path``: headers, keys and shapes are checked, weights are not read.

    Raises :class:`ModelError` only where there is nothing at all.
    """
    if not path.exists():
        raise ModelError(f"there is no {path}; check the path")
    try:
        found = find_model(path, parts)
    except LanternError as error:
        wrong = ModelPart(part="target", state="unusable", path=str(path), detail=str(error))
        return Checked(path=str(path), parts=(wrong,))
    ours = (*PARTS, HEAD)
    rows = [_part(found, part) for part in ours if part in found.files]
    rows += [_other(part, file) for part, file in found.files.items() if part not in ours]
    rows += [ModelPart(part=p, state="missing", detail=text) for p, text in found.missing.items()]
    manifest = found.manifest
    return Checked(
        path=str(path),
        model=manifest.name,
        summary=manifest.summary,
        family=manifest.family,
        parts=tuple(rows),
    )


def _part(found: Found, part: str) -> ModelPart:
    """Compare a part's keys and shapes with what its module needs."""
    path = found.files[part]
    kind = family(found.manifest.family)
    try:
        module, checkpoint, recipes = open_part(found, part, TensorOps())
        own = check_tensors(module, checkpoint, recipes, path.name, kind.beside.get(part))
    except LanternError as error:
        return ModelPart(part=part, state="unusable", path=str(path), detail=str(error))
    used = {key for name in own for key in recipes[name].sources}
    return ModelPart(
        part=part,
        state="found",
        path=str(path),
        parameters=sum(value.numel() for value in own.values()),
        dtypes=tuple(sorted({str(checkpoint.dtype(k)).removeprefix("torch.") for k in used})),
        nbytes=sum(checkpoint.size_of(key) for key in used),
        detail=_sizes(dict(found.manifest)[part]),
    )


def _sizes(config: object) -> str:
    """Return a part's configuration as text, the parts that tell models apart."""
    names = (
        "conditioning", "dim", "n_layer", "n_head", "vocab_size", "grid", "prefix_length",
        "codebook_size", "codebook_dim", "downsample", "hidden", "rank", "depths",
    )  # fmt: skip
    sizes = [f"{name} {getattr(config, name)}" for name in names if hasattr(config, name)]
    return ", ".join(sizes)


def _other(part: str, path: Path) -> ModelPart:
    """Say whether the files of a part that is not a module of ours are all there."""
    try:
        if path.is_dir() or path.suffix == ".safetensors":
            open_checkpoint(path)
        elif not path.is_file():
            raise CheckpointError(f"there is no {path}; check the path")
    except CheckpointError as error:
        return ModelPart(part=part, state="unusable", path=str(path), detail=str(error))
    files = [path] if path.is_file() else [p for p in path.iterdir() if p.is_file()]
    size = sum(file.stat().st_size for file in files)
    return ModelPart(part=part, state="found", path=str(path), nbytes=size)
