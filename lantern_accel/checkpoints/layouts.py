"""Looking through folders: which checkpoints lie in one, and the configurations next to them.

The layouts are those of the official READMEs: LlamaGen's ``pretrained_models/*.pt`` with a
``t5-ckpt`` folder, and LANTERN's ``ckpts/llamagen`` with one folder a model, ``vq_ds16_t2i.pt``, ``t5``
and ``trained_drafters``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

from pydantic import ValidationError

from lantern_accel.checkpoints.weights import (
    SUFFIXES,
    Checkpoint,
    has_weights,
    list_other_checkpoints,
    open_checkpoint,
)
from lantern_accel.errors import CheckpointError, show
from lantern_accel.files import read_json_file
from lantern_accel.records import first_wrong

#: What ``lantern-accel train drafter`` leaves, next to its checkpoint: weights and their sizes.
OWN_WEIGHTS, OWN_CONFIG = "drafter.safetensors", "drafter.json"


def drafter_weights(path: Path) -> Path:
    """Return where the weights of a drafter lie: what training left in a folder, else ``path``.

    Raises :class:`CheckpointError` where that training has not ended.
    """
    if (path / OWN_WEIGHTS).is_file():
        return path / OWN_WEIGHTS
    if (path / "draft_head.safetensors").is_file() or path.name == "draft_head.safetensors":
        raise CheckpointError(
            f"{path} has a draft head, and no drafter; use it with --use head={path}"
        )
    if (path / "checkpoint.pt").is_file():
        raise CheckpointError(
            f"the training of the drafter in {path} has not ended; run the same `lantern-accel train "
            "drafter` again to go on, or decode without one: --use drafter=none"
        )
    return path


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder: itself where it is one, its files, and its sub-folders."""
    if has_weights(folder):
        return [folder, *list_other_checkpoints(folder)]
    there = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
    return [p for p in there if (has_weights(p) if p.is_dir() else p.suffix in SUFFIXES)]


def search(
    paths: Iterable[Path], classify: Callable[[Checkpoint], str | None]
) -> dict[Path, str | CheckpointError | None]:
    """Say of every checkpoint at or in these paths what part of a model it is, each once, in order.

    None: of something else. An error says why it cannot be opened.
    """
    out, seen = dict[Path, str | CheckpointError | None](), set[Path]()
    for place in paths:
        for path in checkpoints_in(place) if place.is_dir() else [place] if place.is_file() else []:
            if path.resolve() in seen:
                continue
            seen.add(path.resolve())
            try:
                out[path] = classify(open_checkpoint(path))
            except CheckpointError as error:
                out[path] = error
    return out


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


#: What a value has to be, and the names in configurations that hold such ones, in whatever table.
_HELD: tuple[tuple[str, Callable[[object], bool], tuple[str, ...]], ...] = (
    (
        "a table",
        lambda value: isinstance(value, Mapping),
        ("text_config", "language_config", "vision_config", "vq_config", "rope_parameters"),
    ),
    (
        "a table of ids",
        lambda value: isinstance(value, Mapping) and all(map(_is_whole, value.values())),
        ("vocabulary_map",),
    ),
    (
        "an integer above 0",
        lambda value: _is_whole(value) and value > 0,
        (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings", "num_embeddings",
            "num_image_tokens", "image_area", "temporal_downsample_factor", "resolution",
            "d_model", "d_kv", "d_ff", "num_heads", "num_layers", "relative_attention_num_buckets",
            "n_head", "block_size", "image_size", "downsample_size",
        ),
    ),
    (
        "an id",
        _is_whole,
        ("bos_token_id", "pad_token_id", "eoi_token_id", "image_start_token_id", "image_end_token_id"),
    ),
    (
        "a finite number above 0",
        lambda value: (_is_whole(value) or isinstance(value, float)) and 0 < value < math.inf,
        ("rms_norm_eps", "norm_eps", "rope_theta", "partial_rotary_factor"),
    ),
    (
        "a list of integers",
        lambda value: isinstance(value, list | tuple) and all(map(_is_whole, value)),
        ("mrope_section", "ch_mult", "channel_multiplier", "attn_resolutions"),
    ),
    ("true or false", lambda value: isinstance(value, bool), ("swin_norm", "tie_word_embeddings")),
)  # fmt: skip


def check_kinds(path: Path, said: Mapping[str, object]) -> None:
    """Raise :class:`CheckpointError` for a value of another kind than its name has; null is none."""
    for what, fits, names in _HELD:
        for name in names:
            if said.get(name) is not None and not fits(said[name]):
                raise CheckpointError(
                    f"{path} says {name} {show(said[name])}, which is not {what}; fetch it again, or "
                    "correct it"
                )
    for name, inner in said.items():
        if isinstance(inner, Mapping) and name != "vocabulary_map":
            check_kinds(path, inner)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises :class:`CheckpointError`, for values of another kind too."""
    try:
        content = read_json_file(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); fetch it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path} holds a {type(content).__name__}, not a configuration; fetch it again"
        )
    check_kinds(path, content)
    return content


def config_of(path: Path, *, alone: bool = True) -> dict[str, Any]:
    """Return the configuration next to a checkpoint; {} where there is none.

    For a folder its ``config.json``; for a file ``NAME.json``, or ``config.json`` where the file is
    ``alone`` in its folder.
    """
    near = [path / "config.json"] if path.is_dir() else [path.with_suffix(".json")]
    near += [path.parent / "config.json"] * (alone and not path.is_dir())
    return next((read_json(one) for one in near if one.is_file()), {})


@contextmanager
def explain_sizes(what: object, advice: str) -> Iterator[None]:
    """Raise CheckpointError of ``what``, its fault and advice where sizes in the block are invalid."""
    try:
        yield
    except ValidationError as error:
        raise CheckpointError(f"{what}: {first_wrong(error)}; {advice}") from None


#: Names that configurations have for our sizes: transformers', Meta's.
SIZE_NAMES = {
    "hidden_size": "dim",
    "intermediate_size": "ffn_dim",
    "max_position_embeddings": "max_positions",
    "n_heads": "n_head",
    "n_layers": "n_layer",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_base",
}


def our_sizes(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a configuration says, under our names; what it has as null is left out."""
    flat = {**said, **(said.get("rope_parameters") or {})}
    return {SIZE_NAMES.get(name, name): v for name, v in flat.items() if v is not None}


def check_sizes(what: object, said: Mapping[str, object], sizes: Mapping[str, object]) -> None:
    """Raise CheckpointError where a configuration has other ``sizes`` than ``what`` by its shapes."""
    for name, value in said.items():
        ours = SIZE_NAMES.get(name, name)
        if ours in sizes and value != sizes[ours]:
            raise CheckpointError(
                f"{what} has {name} {sizes[ours]} by its shapes, but its configuration says {value!r}; "
                "the two are not of one model"
            )


def find_file(places: Iterable[Path], name: str) -> Path | None:
    """Return the first of the places that is a file, or that has a file of this name."""
    for place in places:
        for path in (place, place / name):
            if path.is_file():
                return path
    return None


def folder_json(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """Return a folder's configuration of this name; {} where there is none."""
    return read_json(folder / name) if (folder / name).is_file() else {}
