"""Files of training: a trainer's settings, what it writes, and a model folder with that in it."""

from __future__ import annotations

import filecmp
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch
from pydantic import ValidationError
from safetensors.torch import save
from torch import Tensor

from lantern_accel.errors import DataError, LanternError
from lantern_accel.families.base import Parts
from lantern_accel.files import (
    check_target,
    read_json_file,
    read_toml_file,
    write_json,
    write_whole,
)
from lantern_accel.models.bundle import HEAD, folder_parts, with_head
from lantern_accel.models.locate import TRAINED, TrainedParts, trained_parts
from lantern_accel.records import Frozen, first_wrong

Config = TypeVar("Config", bound=Frozen)


def read_config(kind: type[Config], path: Path | None, **overrides: object) -> Config:
    """Read a trainer's configuration from JSON or TOML; overrides that are None are ignored.

    Raises :class:`DataError` naming the field that is wrong.
    """
    values: dict[str, object] = {}
    if path is not None:
        try:
            toml = path.suffix == ".toml"
            values = read_toml_file(path) if toml else read_json_file(path)
            if not isinstance(values, dict):
                raise ValueError("it holds no settings by name")
        except (OSError, ValueError) as error:
            raise DataError(f"the configuration {path} cannot be read: {error}") from None
    values.update({k: v for k, v in overrides.items() if v is not None})
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise DataError(f"{path or 'the configuration'}: {first_wrong(error)}") from None


def write_weights(
    weights: Mapping[str, Tensor], path: Path, said: dict[str, str] | None = None
) -> None:
    """Write tensors as bf16 safetensors; ``said``: what the file says about itself."""
    # A copy each: what was cut out of one matrix may not share its memory.
    kept = {
        k: v.detach().to("cpu", torch.bfloat16, copy=True).contiguous() for k, v in weights.items()
    }
    write_whole(path, save(kept, said))


def check_copy(model: Path, to: Path) -> None:
    """Raise DataError where ``to`` has files that are not those of the model in ``model``."""
    check_target(to / "model.json")
    differ = ("model.json", "drafter.safetensors", f"{HEAD}.safetensors")
    found = to.iterdir() if to.is_dir() and not to.samefile(model) else ()
    names = [one.name for one in found if one.is_file() and one.name not in differ]
    names = [name for name in names if not name.startswith(".")]
    if len(filecmp.cmpfiles(to, model, names, shallow=False)[0]) < len(names):
        raise DataError(f"{to} has other files than the model in {model}; name a new folder")


def with_parts(model: Path, parts: Parts, to: Path) -> Path:
    """Write ``to``, a copy of the model folder ``model`` with a newly trained drafter or draft head."""
    try:
        found = with_head(folder_parts(model, parts), parts)
    except LanternError as error:
        raise DataError(f"what was trained does not fit the model in {model}: {error}") from None
    written = {
        f"{part}.safetensors": found.files[part].read_bytes()
        for part, path in (("drafter", parts.drafter), (HEAD, parts.head))
        if path is not None
    }
    to.mkdir(parents=True, exist_ok=True)
    for path in sorted(model.iterdir()):
        if path.is_file() and path.name not in ("model.json", *written):
            write_whole(to / path.name, path.read_bytes())
    for name, content in written.items():
        write_whole(to / name, content)
    write_json(to / "model.json", found.manifest.model_dump(mode="json"))
    return to


def check_named(to: Path) -> None:
    """Raise DataError where ``to`` has files that :func:`with_named` did not write."""
    check_target(to / TRAINED)
    if to.is_dir() and not (to / TRAINED).is_file() and any(to.iterdir()):
        raise DataError(f"{to} has other files than parts that were trained; name a new folder")


def with_named(model: str, part: str, trained: Path, to: Path) -> Path:
    """Write ``to``, a folder that names the official files of ``model`` and has the trained ``part``."""
    said, _, rest = model.partition("=")
    if Path(model).exists():
        model = str(Path(model).resolve())
    elif rest and Path(rest).exists():
        model = f"{said}={Path(rest).resolve()}"
    found = trained_parts(model) or TrainedParts(model=model)
    (to / part).mkdir(parents=True, exist_ok=True)
    for path in sorted(trained.iterdir()):
        if path.is_file() and path.name != "checkpoint.pt":
            write_whole(to / part / path.name, path.read_bytes())
    made = found.model_copy(update={part: Path(part)})
    write_json(to / TRAINED, made.model_dump(mode="json", exclude_none=True))
    return to
