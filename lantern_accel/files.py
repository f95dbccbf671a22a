"""Writes files whole or not at all, and keeps caches.

Every entry of a cache carries the checksum of what it holds, and none is trusted without: one that is
absent, no regular file, damaged or not what it should be is None to its reader, who makes it again. One
that cannot be written costs time, not the request.
"""

from __future__ import annotations

import atexit
import codecs
import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import shutil
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import methodcaller
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import platformdirs

from lantern_accel.errors import DiskFullError, LanternWarning, RequestError, show

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from torch import Tensor

#: Where an entry keeps its checksum.
CHECKSUM = "checksum"
#: Larger files than this are not entries.
MOST_BYTES = 2**30
#: The variable that names the cache folder.
CACHE = "LANTERN_ACCEL_CACHE"
#: Files of text or JSON are not larger.
MOST_TEXT = 256 * 2**20
#: What no file's name has on Windows: signs, ends, and the names of devices, whatever follows them.
_NOT_IN_NAMES = re.compile(
    r"""[<>:"/\\|?*\x00-\x1f]|[. ]$|^(con|prn|aux|nul|(com|lpt)[0-9])(?=[ .]|$)""", re.IGNORECASE
)


def cache_dir() -> Path:
    """Return the cache folder: ``$LANTERN_ACCEL_CACHE``, else where the platform keeps caches.

    On Linux that is ``$XDG_CACHE_HOME/lantern_accel`` or ``~/.cache/lantern_accel``. Where it cannot be
    used (no home, not ours, no space), one warning says so, and a folder that lasts as long as this
    process takes its place.
    """
    found = _try_folder(*_read_variables())
    return found if isinstance(found, Path) else _in_its_place(os.environ.get(CACHE), found)


def persistent_dir(name: str) -> Path | None:
    """Return a folder of the cache that outlives this process; None, without a word, where none does."""
    cache = _try_folder(*_read_variables())
    with contextlib.suppress(OSError):
        return None if isinstance(cache, str) else _usable(cache / name)
    return None


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Keep other processes, and threads, from the block; a file system without locks keeps none."""
    from filelock import FileLock  # it loads asyncio, and every command imports this module

    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, NotImplementedError):
            path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(FileLock(path))
        yield


def _usable(folder: Path) -> Path:
    """Return a folder that can be written to, made where it is absent; raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        return folder


def _read_variables() -> tuple[str | None, str | None, str | None]:
    given, home, caches = (os.environ.get(name) for name in (CACHE, "HOME", "XDG_CACHE_HOME"))
    return given, home, caches


@functools.cache
def _try_folder(given: str | None, home: str | None, caches: str | None) -> Path | str:
    """Return the folder that was named, or the user's; else why it cannot be written."""
    try:
        path = Path(given or platformdirs.user_cache_path("lantern_accel", appauthor=False))
        if not path.is_absolute() and not given:  # without HOME, where the list of users has none
            return "there is no home folder"
        return _usable(path)
    except (OSError, RuntimeError) as error:
        return (error.strerror if isinstance(error, OSError) else None) or str(error)


@functools.cache
def _in_its_place(given: str | None, reason: str) -> Path:
    warnings.warn(
        f"the cache {str(given or 'in your home folder')[:200]} cannot be used ({reason}), "
        f"so nothing is kept; set {CACHE} to a folder that can be written",
        LanternWarning,
        stacklevel=3,
    )
    temporary = Path(tempfile.mkdtemp(prefix="lantern-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary


def is_regular(path: Path) -> bool:
    """Return whether a path is a file of its own, or nothing yet; not a device, a pipe or a folder."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return True


class UnreadableFile(OSError, ValueError):
    """A file's content is not what its reader takes; ``strerror`` says why."""


def read_bytes_file(path: Path, most: int = MOST_TEXT) -> bytes:
    """Return what a file holds; raises OSError for a device, a pipe, or more than ``most`` bytes."""
    if not is_regular(path):
        raise OSError(errno.EINVAL, "it is a folder, a device or a pipe, not a file", str(path))
    # Not blocking: some files of /proc wait for news.
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as stream:
        found = stream.read(most + 1)
    if found is None or len(found) > most:
        raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB", str(path))
    return found


def read_text_file(path: Path) -> str:
    """Return a text file's content; raises OSError, :class:`UnreadableFile` for another encoding.

    It is UTF-8, or UTF-16 with its byte order mark.
    """
    held = read_bytes_file(path)
    wide = held.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = held.decode("utf-16" if wide else "utf-8-sig")
        if "\0" not in text:  # UTF-16 without its mark has them, and no text
            return text.replace("\r\n", "\n")
    except UnicodeDecodeError:
        pass
    raise UnreadableFile(errno.EINVAL, "it is not text in UTF-8; save it as UTF-8", str(path))


def read_lines(path: Path) -> list[str]:
    """Return a text file's lines without the blanks around them; raises as above."""
    # splitlines would part a prompt, and a line of JSON, at U+2028.
    return [line.strip() for line in read_text_file(path).replace("\r", "\n").split("\n")]


def read_json_file(path: Path) -> Any:
    """Return a JSON file's value; raises OSError, and ValueError where it is not whole JSON."""
    try:
        return json.loads(read_text_file(path))
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"it is not whole JSON: see {where}") from None
    except RecursionError:
        raise UnreadableFile(errno.EINVAL, "it is nested too deep", str(path)) from None


def read_toml_file(path: Path) -> dict[str, Any]:
    """Return a TOML file's tables; raises OSError, and ValueError where it is not whole TOML."""
    try:
        return tomllib.loads(read_text_file(path))
    except RecursionError:
        raise UnreadableFile(errno.EINVAL, "it is nested too deep", str(path)) from None


def digest_of(paths: Iterable[Path]) -> str:
    """Return the SHA-256 of what files hold, one after another, read a piece at a time."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def disk_is_full(error: OSError) -> bool:
    """Return whether an error says that the disk is full, a quota used up, or a file too large for it."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_name(name: str) -> None:
    """Raise RequestError for a name that a file cannot have on every system."""
    if found := _NOT_IN_NAMES.search(name):
        raise RequestError(
            f"{show(name)} names no file on Windows, because of {show(found[0])}; "
            "choose another name"
        )


def check_target(path: Path) -> None:
    """Raise RequestError where a file could not be written, before the work that makes its content.

    Folders above it may be absent: :func:`write_whole` makes them.
    """
    try:
        if len(os.fsencode(path.name)) > 255:
            raise RequestError(f"the name {path.name[:40]}... is longer than 255 bytes; shorten it")
        if path.is_dir():
            raise RequestError(f"{path} is a folder; name a file in it")
        if not is_regular(path):  # a device or a pipe, which is written to as it is
            return
        check_name(path.name)
        folder = path.resolve().parent
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        if not folder.is_dir():
            raise RequestError(f"{path} cannot be written: {folder} is not a folder; choose one")
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL in the name
        if isinstance(error, OSError) and disk_is_full(error):
            raise DiskFullError(
                f"{path} cannot be written ({error.strerror}); free some space or choose another disk"
            ) from None
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise RequestError(
            f"{str(path)[:100]!r} cannot be written ({reason}); choose another file"
        ) from None


def check_targets(*paths: Path | None, certificate: Path | None = None) -> None:
    """Check every path that is given as :func:`check_target` does.

    ``certificate``: a page, which is written with JSON of the same name next to it.
    """
    for path in (*paths, certificate):
        if path is not None:
            check_target(path)
    if certificate is not None:
        check_target(certificate.with_suffix(".json"))


def write_whole(path: Path, content: bytes | str | Callable[[IO[bytes]], object]) -> None:
    """Fill a temporary file, then put it at ``path``: whole or not at all.

    ``content``: bytes, text for UTF-8, or what writes into the stream that it is given. What a symbolic
    link points to is replaced, the link stays. A device or a pipe is written to.
    """
    held = content.encode() if isinstance(content, str) else content
    write = methodcaller("write", held) if isinstance(held, bytes) else held
    try:
        path = path.resolve()
    except RuntimeError:  # Python before 3.13
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None
    if not is_regular(path):
        with path.open("wb") as stream:
            write(stream)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # A short name of its own: one made from the file's would be longer than a name may be.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".lantern-", suffix=".part")
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
        with contextlib.suppress(OSError):
            Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: object) -> None:
    """Write ``value`` as indented JSON, whole or not at all."""
    write_whole(path, json_text(value))


def json_text(value: object) -> str:
    """Return ``value`` as indented JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True) + "\n"


# --- caches --------------------------------------------------------------------------------------


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
            stored = (file.metadata() or {}).get(CHECKSUM)
            names = file.keys()  # the file is not a dictionary: it has no iterator
            # Copied: a mapped entry would change with its file.
            found = {name: file.get_tensor(name).clone() for name in names}
        return found if stored == checksum(found) and fits(found) else None
    except Exception:  # whatever a damaged file makes its reader raise
        return None


def write_tensors(path: Path, tensors: Mapping[str, Tensor], *, must: bool = False) -> None:
    """Keep tensors with their checksum, where the folder can be written; ``must``: else raise OSError."""
    from safetensors.torch import save

    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with contextlib.nullcontext() if must else contextlib.suppress(OSError):
        write_whole(path, save(whole, {CHECKSUM: checksum(whole)}))


def _digest(record: Mapping[str, object]) -> str:
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


def write_record(path: Path, record: Mapping[str, object]) -> None:
    """Keep a JSON object with its checksum, where the folder can be written."""
    # As it will be read: tuples come back as lists.
    whole = json.loads(json.dumps(record))
    with contextlib.suppress(OSError):
        write_json(path, {**whole, CHECKSUM: _digest(whole)})
