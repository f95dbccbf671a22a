"""Checkpoint files: named tensors in one or several files, opened without reading their data.

``.safetensors``, ``.pt``, ``.pth`` and ``.bin``; shards with an ``index.json`` or numbered file names;
a bare state dict, or one under the name that a trainer gave it. What wrappers of modules put before and
into keys (``module.``, ``_orig_mod.``) is taken off. Opening a file notes where its tensors lie; they are
read in blocks, so that what was read does not count as this process's memory.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import re
import struct
import sys
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor
from torch.types import Storage

from lantern_accel.errors import CheckpointError, LanternWarning
from lantern_accel.files import read_json_file

#: Bytes that are read at once: a core's cache holds them while they are checked and converted.
BLOCK_BYTES = 2**20
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
#: Where trainers put the state dict; the order is that of LlamaGen's own loader.
WRAPPERS = ("model", "module", "state_dict")
#: What they call others, the running mean of the weights among them: none of these comes before another.
OTHERS = re.compile(r"(?:.*_)?(?:ema|model|module|state_dict|params|weights|net|generator)(?:_.*)?")
#: What torch's wrappers of modules call the module within: these may stand anywhere in a key.
_WITHIN = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
#: Opened files, while they have not changed. What holds tensors in memory is not among them.
_OPENED: dict[tuple[object, ...], HeldFile] = {}
#: How torch's files begin: a zip archive, or before torch 1.6 a pickle.
_TORCH_STARTS = (b"PK\x03\x04", b"\x80")
#: What a folder's weights are called where they are one file; the first counts where both are there.
SINGLE = ("model.safetensors", "pytorch_model.bin")
#: What trainers leave next to weights.
TRAINERS = re.compile(r"(optimizer|scheduler|scaler|rng_state|training_args|random_states)")
_SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.\w+)$")


class HeldFile:
    """Tensors in memory by their keys, in place of a file, and the base of what reads a file.

    ``info`` is what a file says about itself (metadata, training arguments). ``places``: by key the
    first byte of a tensor that stays in the file, and the strides of one that is not contiguous there.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
        self.path = path
        self.info: dict[str, object] = {}
        self.tensors = {key: tensor.detach() for key, tensor in (tensors or {}).items()}
        self.headers = {key: (tuple(t.shape), t.dtype) for key, t in self.tensors.items()}
        self.places: dict[str, tuple[int, tuple[int, ...] | None]] = {}

    def read(self, key: str) -> Tensor:
        """Return a tensor as it is in memory, or read from the file into memory of its own."""
        if key in self.tensors:
            return self.tensors[key]
        (at, strides), (shape, dtype) = self.places[key], self.headers[key]
        if strides is None:
            out = torch.empty(shape, dtype=dtype)
            self.read_into(out.view(-1), at)
            return out
        last = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        self.read_into(span := torch.empty(last + 1, dtype=dtype), at)
        return span.as_strided(shape, strides)

    def read_into(self, out: Tensor, at: int) -> None:
        """Fill a flat tensor with the file's bytes from ``at`` on; raises :class:`CheckpointError`."""
        left = out.view(torch.uint8).numpy().data
        try:
            with self.path.open("rb", buffering=0) as stream:
                stream.seek(at)
                while len(left):
                    if not (count := stream.readinto(left)):
                        raise EOFError(f"it ends {len(left)} bytes early")
                    left = left[count:]
        except (OSError, EOFError) as error:
            raise _unreadable(self.path, error) from error


class _SafetensorsFile(HeldFile):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        from safetensors import safe_open

        # Compares the header with the file's length.
        with safe_open(str(path), framework="pt", device="cpu") as checked:
            self.info = dict(checked.metadata() or {})
        with path.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            listed = json.loads(stream.read(size))
        listed.pop("__metadata__", None)
        for key, said in listed.items():
            if said["dtype"] not in _DTYPES:
                raise quantized_error(path, f"numbers of the format {said['dtype']}")
            self.headers[key] = (tuple(said["shape"]), _DTYPES[said["dtype"]])
            self.places[key] = (8 + size + said["data_offsets"][0], None)


class _PickleFile(HeldFile):
    """A torch file, unpickled once with ``weights_only``: nothing in it runs."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        #: Bytes of the file's storages by their addresses, while it is mapped.
        self._storages: dict[int, int] = {}
        first: int | None = None
        with suppress(RuntimeError):  # of a compressed file, and of the format before torch 1.6
            content = self._unpickle(mapped=True)
            first = self._first_byte()
        if first is None:
            content = self._unpickle(mapped=False)
        for key, tensor in self._state(content).items():
            if tensor.is_meta or tensor.layout != torch.strided:
                held = "no numbers" if tensor.is_meta else "sparse numbers"
                raise CheckpointError(f"{path} holds {held} of {key}; save dense tensors with data")
            self.headers[key] = (tuple(tensor.shape), tensor.dtype)
            storage = tensor.untyped_storage().data_ptr()
            if first is None or storage not in self._storages:
                self.tensors[key] = tensor.detach()
                continue
            at = tensor.data_ptr() - first
            self.places[key] = (at, None if tensor.is_contiguous() else tensor.stride())

    def _note(self, storage: Storage, location: str) -> Storage:
        if storage.nbytes():
            self._storages[storage.data_ptr()] = storage.nbytes()
        return storage

    def _unpickle(self, mapped: bool) -> object:
        place = self._note if mapped else "cpu"
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the age of a pickle; the file is judged below
            return torch.load(self.path, map_location=place, weights_only=True, mmap=mapped)

    def _state(self, content: object) -> dict[str, Tensor]:
        state = content
        if isinstance(content, Mapping):
            state = _within(content, self.path)
            arguments = content.get("args")
            if isinstance(arguments, argparse.Namespace):
                self.info = dict(vars(arguments))
        if not isinstance(state, Mapping):
            raise CheckpointError(
                f"{self.path} holds a {type(state).__name__}, not a state dict; name a file with "
                "a model's weights"
            )
        if any(isinstance(one, Mapping) and "W_q" in one for one in state.values()):
            raise quantized_error(self.path, "HQQ")
        tensors = {k: v for k, v in state.items() if isinstance(v, Tensor)}
        foreign = next((key for key in tensors if not isinstance(key, str)), None)
        if foreign is not None:
            raise CheckpointError(
                f"{self.path} names a tensor {str(foreign)[:40]!r}, of the "
                f"type {type(foreign).__name__}, not text; save the model's state_dict() again"
            )
        return tensors

    def _first_byte(self) -> int | None:
        """Return where the mapped file begins in memory, by its members; None where none fit."""
        members = dict[int, int]()
        with zipfile.ZipFile(self.path) as archive, self.path.open("rb") as stream:
            for one in archive.infolist():
                folder, _, name = one.filename.rpartition("/")
                if name == "byteorder" and archive.read(one).decode() != sys.byteorder:
                    return None
                if folder.rpartition("/")[2] == "data" and one.file_size:
                    stream.seek(one.header_offset + 26)
                    lengths = struct.unpack("<HH", stream.read(4))
                    members[one.header_offset + 30 + sum(lengths)] = one.compress_size
        first = min(self._storages, default=0) - min(members, default=0)
        return first if {at - first: n for at, n in self._storages.items()} == members else None


def _holds_weights(value: object) -> bool:
    """Return whether a value is a state dict: named tensors, of which one at least is of real numbers."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        return False
    return any(isinstance(one, Tensor) and one.is_floating_point() for one in value.values())


def _within(content: Mapping[object, object], path: Path) -> object:
    """Return the state dict of what a trainer wrote: the content itself, or one under a name of it.

    Of the usual names the first is taken, and what else there is stands in a warning. Raises
    :class:`CheckpointError` for several other names, of which none comes before another.
    """
    inner = [name for name, value in content.items() if _holds_weights(value)]
    usual = [name for name in WRAPPERS if name in inner]
    others = [name for name in inner if name not in usual]
    named = [name for name in others if OTHERS.fullmatch(str(name))]
    flat = any(isinstance(one, Tensor) and one.dim() for one in content.values())
    if not usual and (flat or not inner):
        there = (content[name] for name in WRAPPERS if isinstance(content.get(name), Mapping))
        return next(there, content)
    found = [*usual, *named] or others
    if len(found) > 1:
        held = f"{path} holds {len(found)} sets of weights, under {', '.join(map(repr, found))}"
        how = (
            "to take another, write it into a file of its own: torch.save(torch.load(FILE, "
            f"weights_only=True)[{found[-1]!r}], 'weights.pt')"
        )
        if not usual:
            raise CheckpointError(f"{held}, and nothing says which is the model's; {how}")
        warnings.warn(f"{held}; {found[0]!r} is read; {how}", LanternWarning, stacklevel=2)
    return content[found[0]]


def bare_names(keys: Iterable[str]) -> dict[str, str]:
    """Return keys as the module within its wrappers has them, each with the key that it comes from.

    ``module.`` is taken off where all keys begin with it: otherwise it is a name of the model's own.
    """
    there = list(keys)
    bare = [_WITHIN.sub("", key) for key in there]
    while bare and all(key.startswith("module.") for key in bare):
        bare = [_WITHIN.sub("", key.removeprefix("module.")) for key in bare]
    names = dict(zip(bare, there, strict=True))
    # Two keys that become one do not come from a wrapper.
    return names if len(names) == len(there) else dict(zip(there, there, strict=True))


def _open_file(path: Path) -> HeldFile:
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint file {path}; check the path")
    try:
        with path.open("rb") as stream:
            start, state = stream.read(24), os.fstat(stream.fileno())
    except OSError as error:  # no right to read it, a broken disk, another process's memory
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}); name a file of weights that can"
        ) from None
    known = (path, path.absolute(), state.st_ino, state.st_size, state.st_mtime_ns)
    if known in _OPENED:
        return _OPENED[known]
    if not start:
        raise CheckpointError(f"{path} is empty, so it was truncated; fetch it again")
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` in its folder, or "
            "download the file"
        )
    if start.startswith(b"GGUF"):
        raise quantized_error(path, "GGUF")
    try:
        made = (_SafetensorsFile if path.suffix == ".safetensors" else _PickleFile)(path)
        if not made.tensors:
            _OPENED[known] = made
        return made
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)|function (\S+)", str(error))
        if named is None:
            # torch's own words advise to read the file as code.
            raise _foreign(path) from None
        wanted = named.group(1) or named.group(2)
        if library := re.match("torchao|bitsandbytes|optimum.quanto|hqq", wanted):
            raise quantized_error(path, library[0]) from None
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint: its pickle wants to run code ({wanted}), which is "
            "refused; get the weights as .safetensors, or save the bare state dict again where you "
            "trust the file"
        ) from None
    except Exception as error:
        if path.suffix != ".safetensors" and not start.startswith(_TORCH_STARTS):
            raise _foreign(path) from None
        if "TorchScript" in str(error):
            raise CheckpointError(
                f"{path} is a TorchScript program; save its state_dict()"
            ) from None
        raise _unreadable(path, error) from error


def quantized_error(path: Path, kind: str) -> CheckpointError:
    """Return the error for weights of a quantized ``kind``."""
    return CheckpointError(
        f"{path} is quantized ({kind}), and only bfloat16, float16 and float32 can be read; load the "
        "plain checkpoint: --weights int8 (in Python weights='int8') quantizes it meanwhile"
    )


def _foreign(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is not a PyTorch checkpoint; it may be a pickle that torch.save did not write, or a "
        "page that says why a download failed: fetch it again"
    )


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    text = " ".join(str(error).split())
    return CheckpointError(
        f"{path} cannot be read as a checkpoint ({type(error).__name__}: {text[:200]}); it may be "
        "truncated or of another format: fetch it again and compare its size"
    )


class Checkpoint:
    """Named tensors of one model part; reads on demand, and only what is asked for."""

    def __init__(self, path: Path, files: list[HeldFile]) -> None:
        self.path = path
        self._files = files
        self._home = {key: file for file in files for key in file.headers}
        #: The files' own keys, where they are others.
        self._theirs: dict[str, str] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def __contains__(self, key: object) -> bool:
        return key in self._home

    def __iter__(self) -> Iterator[str]:
        return iter(self._home)

    def unwrap(self) -> Checkpoint:
        """Return this checkpoint with keys as the module within its wrappers has them."""
        names = bare_names(self)
        self._home = {bare: self._home[key] for bare, key in names.items()}
        self._theirs = {bare: key for bare, key in names.items() if bare != key}
        return self

    @property
    def info(self) -> dict[str, object]:
        """What the files say about themselves: safetensors metadata, a trainer's arguments."""
        return {name: value for file in self._files for name, value in file.info.items()}

    def shape(self, key: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it; raises :class:`CheckpointError` if it is absent."""
        return self._header(key)[0]

    def dtype(self, key: str) -> torch.dtype:
        """Return a tensor's dtype without reading it; raises :class:`CheckpointError` if it is absent."""
        return self._header(key)[1]

    def _header(self, key: str) -> tuple[tuple[int, ...], torch.dtype]:
        if key not in self._home:
            raise CheckpointError(
                f"{self.path} lacks {key}: a part of the checkpoint is absent; fetch it again"
            )
        return self._home[key].headers[self._theirs.get(key, key)]

    def size_of(self, key: str) -> int:
        """Return a tensor's bytes without reading it."""
        return self.dtype(key).itemsize * math.prod(self.shape(key))

    def read(self, key: str) -> Tensor:
        """Return a tensor on the host; raises as :meth:`HeldFile.read_into` does."""
        return self._home[key].read(self._theirs.get(key, key))

    def start(self, key: str) -> Tensor:
        """Return a tensor's first numbers, float32."""
        file, theirs, dtype = self._home[key], self._theirs.get(key, key), self.dtype(key)
        if theirs not in file.places:
            return self.read(key).flatten()[:64].float()
        out = torch.empty(min(64, math.prod(self.shape(key))), dtype=dtype)
        file.read_into(out, file.places[theirs][0])
        return out.float()

    def blocks(
        self, key: str, row: int = 1, into: Tensor | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Go through a tensor's numbers in order, in flat blocks of whole rows of ``row`` numbers.

        Returns each block with the number of its first; it is valid until the next. ``into``: flat
        memory, where blocks lie at once if it is the host's and of the file's dtype. Raises as
        :meth:`read` does.
        """
        file, theirs, dtype = self._home[key], self._theirs.get(key, key), self.dtype(key)
        count = math.prod(self.shape(key))
        size = max(BLOCK_BYTES // dtype.itemsize // row, 1) * row
        at, strides = file.places.get(theirs, (0, ()))
        whole = None if strides is None else self.read(key).reshape(-1)
        for first in range(0, count, size):
            end = min(first + size, count)
            if whole is not None:
                yield first, whole[first:end]
                continue
            if into is not None and into.is_cpu and into.dtype == dtype:
                block = into[first:end]
            else:
                if len(self._buffer) < (nbytes := (end - first) * dtype.itemsize):
                    self._buffer = torch.empty(nbytes, dtype=torch.uint8)
                block = self._buffer[:nbytes].view(dtype)
            file.read_into(block, at + first * dtype.itemsize)
            yield first, block


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint file, or the folder that holds one (sharded or not).

    Raises :class:`CheckpointError` naming what is missing, truncated or foreign; pickles that want to
    run code are refused.
    """
    if not path.is_dir():
        return Checkpoint(path, [_open_file(path)]).unwrap()
    names, listed = shard_names(path)
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{path} lacks {' and '.join(missing)} of the {len(names)} files that hold its weights; "
            "fetch what is missing again"
        )
    files = [_open_file(path / name) for name in names]
    checkpoint = Checkpoint(path, files)
    for key, name in listed.items():
        if key not in checkpoint:
            raise CheckpointError(
                f"{path / name} lacks {key}, which the folder's index says it holds; fetch that file "
                "again"
            )
    _warn_of_others(checkpoint, names)
    return checkpoint.unwrap()


def _warn_of_others(checkpoint: Checkpoint, names: list[str]) -> None:
    """Warn where a folder has its weights in the other format as well, with other values."""
    folder, suffix = checkpoint.path, Path(names[0]).suffix
    usual = (p for p in folder.iterdir() if p.name in SINGLE or _SHARD.match(p.name))
    others = sorted(p for p in usual if p.suffix != suffix and p.suffix in SUFFIXES)
    try:
        other = Checkpoint(folder, [_open_file(path) for path in others])
    except CheckpointError:  # what is not read may be broken
        return
    both = [k for k in checkpoint if k in other and checkpoint.shape(k) == other.shape(k)]
    if not others or all(torch.allclose(checkpoint.start(k), other.start(k), 0.02) for k in both):
        return
    warnings.warn(
        f"{folder} holds {names[0]} and {others[0].name} with other values; {names[0]} is read, and to "
        "read the other, move this one out of the folder",
        LanternWarning,
        stacklevel=2,
    )


def shard_names(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the file names that hold a folder's weights, and the index's keys with their files.

    The names are those that should be there, whether or not they are. Raises :class:`CheckpointError`
    for a folder without weights, or with those of several models.
    """
    listed = _read_index(folder)
    found = [p.name for p in sorted(folder.iterdir()) if p.suffix in SUFFIXES and p.is_file()]
    single = [[name] for name in SINGLE if name in found]
    if listed:  # in another format it is the same model once more, as repositories have it
        names = sorted(set(listed.values()))
        stray = [
            [n] for (n,) in single if n not in names and Path(n).suffix == Path(names[0]).suffix
        ]
        sets = [names, *stray]
    else:
        sets = [*single[:1], *_shard_sets(found)] or [[name] for name in found]
    if not sets:
        raise CheckpointError(
            f"the folder {folder} holds no weights ({', '.join(SUFFIXES)}); name the one that does"
        )
    if len(sets) > 1:
        held = "; ".join(f"{one[0]} and so on" if len(one) > 1 else one[0] for one in sets)
        raise CheckpointError(
            f"the folder {folder} holds {len(sets)} sets of weights ({held}), and nothing says which is "
            "the model's; move the others out of the folder, or name one file of it"
        )
    return sets[0], listed


def _read_index(folder: Path) -> dict[str, str]:
    """Return the keys of a folder's index with their files; {} without one."""
    indexes = sorted(folder.glob("*.index.json"))
    # Safetensors first: they are complete by their own header, and map without unpickling.
    indexes.sort(key=lambda p: "safetensors" not in p.name)
    if not indexes:
        return {}
    index = indexes[0]
    try:
        listed = dict(read_json_file(index)["weight_map"].items())
        foreign = [n for n in listed.values() if Path(n).name != n or not Path(n).suffix]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} cannot be read as an index of shards ({type(error).__name__}: {error}); "
            "fetch it again"
        ) from None
    if foreign or not listed:
        raise CheckpointError(
            f"{index} names {foreign[0]!r}, which is not a file in its folder; fetch it again"
            if foreign
            else f"{index} lists no shards; fetch it again"
        )
    return listed


def _shard_sets(names: Iterable[str]) -> list[list[str]]:
    """Return the sets of numbered files that names are of, each whole, whether or not all are there."""
    matches = filter(None, map(_SHARD.match, names))
    kinds = dict.fromkeys((m["stem"], int(m["count"]), m["suffix"]) for m in matches)
    return [
        [f"{stem}-{i:05d}-of-{count:05d}{suffix}" for i in range(1, count + 1)]
        for stem, count, suffix in kinds
    ]


def list_other_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoint files in a folder of weights that are none of the folder's own."""
    there = [p for p in sorted(folder.iterdir()) if p.suffix in SUFFIXES and p.is_file()]
    no = re.compile(rf"\.|{TRAINERS.pattern}|{_SHARD.pattern}")
    return [path for path in there if path.name not in SINGLE and not no.match(path.name)]


def has_weights(folder: Path) -> bool:
    """Return whether a folder is one checkpoint by its file names: an index, or a usual single file."""
    return (
        any(folder.glob("*.index.json"))
        or any((folder / name).is_file() for name in SINGLE)
        or any(_SHARD.match(p.name) for p in folder.iterdir())
    )
