"""Writing files whole or not at all, and where caches live."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any


def cache_dir() -> Path:
    """Return the cache folder: ``$LANTERN_ACCEL_CACHE``, else ``~/.cache/lantern_accel``."""
    given = os.environ.get("LANTERN_ACCEL_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "lantern_accel"


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Let ``write`` fill a temporary file, then put it at ``path``: whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        # mkstemp makes private files; give ours the permissions any other file would get.
        mask = os.umask(0)
        os.umask(mask)
        Path(temporary).chmod(0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, whole or not at all."""
    text = json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True) + "\n"
    write_whole(path, lambda stream: stream.write(text.encode()))
