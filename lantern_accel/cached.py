"""Caches that are read: every entry carries the checksum of what it holds, and none is trusted without.

An entry that is absent, no regular file, damaged or not what it should be is None to the reader, who
makes it anew. An entry that cannot be written costs time, not the request.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_accel.files import is_regular, read_json_file, write_json, write_whole

if TYPE_CHECKING:
    from torch import Tensor

#: Where an entry keeps its checksum.
CHECKSUM = "checksum"
#: Larger files than this are no entry.
MOST_BYTES = 2**30


def _there(path: Path) -> bool:
    # A pipe would be waited for, and a device never ends.
    return path.is_file() and is_regular(path) and 0 < path.stat().st_size <= MOST_BYTES


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of named tensors: names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        import torch

        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(flat.numpy().tobytes())
    return digest.hexdigest()


def read_tensors(
    path: Path, fits: Callable[[Mapping[str, Tensor]], bool]
) -> dict[str, Tensor] | None:
    """Return an entry's tensors where they are whole and ``fits`` says that they can be; else None."""
    from safetensors import safe_open

    try:
        if not _there(path):
            return None
        with safe_open(str(path), framework="pt", device="cpu") as file:
            said = (file.metadata() or {}).get(CHECKSUM)
            # Copied: a mapped entry would change with its file. The file has keys, but no iterator.
            found = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        return found if said == checksum(found) and fits(found) else None
    except Exception:  # whatever a damaged file makes its reader raise
        return None


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Keep tensors with their checksum, where the folder can be written."""
    from safetensors.torch import save

    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with contextlib.suppress(OSError):
        stored = save(whole, {CHECKSUM: checksum(whole)})
        write_whole(path, stored)


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def read_record(path: Path) -> dict[str, Any] | None:
    """Return an entry's JSON object, without its checksum, where it is whole; else None."""
    try:
        if not _there(path):
            return None
        found = read_json_file(path)
        if not isinstance(found, dict) or found.pop(CHECKSUM, None) != _digest(found):
            return None
        return found
    except (OSError, ValueError, RecursionError):
        return None


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Keep a JSON object with its checksum, where the folder can be written."""
    # As it will be read: tuples come back as lists.
    whole = json.loads(json.dumps(record))
    with contextlib.suppress(OSError):
        write_json(path, {**whole, CHECKSUM: _digest(whole)})
