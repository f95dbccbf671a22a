"""Filling a module from a checkpoint, tensor by tensor, straight to its device and dtype.

The module is built on torch's ``meta`` device, so that it holds nothing until a tensor arrives; at no
time is more than one tensor held twice.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lantern_accel.checkpoints.kinds import PLAIN, kind_of
from lantern_accel.checkpoints.weights import Checkpoint, quantized_error
from lantern_accel.errors import CheckpointError

#: Keys that released files may carry and that hold nothing we need.
HARMLESS = re.compile(
    r"(^|\.)(freqs_cis|rope\.freqs|rotary_emb\.inv_freq|codebook_used|num_batches_tracked)$|^loss\."
)
#: Bytes of every tensor that go into a fingerprint.
SAMPLE_BYTES = 4096


class _Unfilled(TorchFunctionMode):
    """Leaves out random initialisation, which on ``meta`` imports a compiler's worth of code."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _FILLING:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


_FILLING = {"uniform_", "normal_", "kaiming_uniform_", "xavier_uniform_", "trunc_normal_"}


@contextmanager
def without_data() -> Iterator[None]:
    """Build modules in this block without memory: their parameters lie on torch's ``meta`` device."""
    with torch.device("meta"), _Unfilled():
        yield


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch compute on this thread alone: on a busy machine it waits for others at every block."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


#: Called while a part is loaded: its name, bytes read, bytes in all.
LoadingProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Recipe:
    """How one parameter comes from a checkpoint: sources stacked along dimension 0.

    ``transform`` gets every source's key and tensor on its own (to permute rows, or to repeat a norm).
    ``rows``: it takes these rows of its one source, and changes nothing else.
    """

    sources: tuple[str, ...]
    transform: Callable[[str, Tensor], Tensor] | None = None
    rows: Tensor | None = None


@dataclass
class Fingerprint:
    """A hash of names, shapes and a sample of every tensor's bytes: tells models apart, reads little."""

    digest: hashlib._Hash = field(default_factory=hashlib.sha256)

    def update(self, key: str, tensor: Tensor, shape: Sequence[int] | None = None) -> None:
        """Add one tensor as the checkpoint has it, or its first numbers and its ``shape``."""
        shape = tensor.shape if shape is None else shape
        self.digest.update(f"{key} {list(shape)} {tensor.dtype}\n".encode())
        flat = tensor.detach().reshape(-1)[: SAMPLE_BYTES // tensor.dtype.itemsize].cpu()
        self.digest.update(flat.contiguous().view(torch.uint8).numpy().tobytes())

    def hexdigest(self) -> str:
        """Return 16 characters."""
        return self.digest.hexdigest()[:16]


def check_values(tensor: Tensor, key: str, dtype: torch.dtype, what: str) -> None:
    """Raise :class:`CheckpointError` for values that ``dtype`` cannot hold, or that are not numbers.

    Bytes that were damaged on their way rarely stay plausible numbers, and an image generated with
    one NaN looks like an image.
    """
    if not tensor.numel():
        return
    low, high = (float(value) for value in torch.aminmax(tensor))
    limit = torch.finfo(dtype).max
    if low >= -limit and high <= limit:
        return
    if torch.finfo(tensor.dtype).max >= max(abs(low), abs(high)):
        kind = str(dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{what}: {key} has values up to {max(abs(low), abs(high)):.3g}, which {kind} cannot hold; "
            "load it as bfloat16 or float32"
        )
    raise CheckpointError(
        f"{what}: {key} has infinite or NaN values, so the file is damaged; fetch it "
        "again and compare its checksum"
    )


def mismatch(what: str, name: str, given: list[int], wanted: list[int]) -> CheckpointError:
    """Return the error for a parameter whose shapes differ."""
    return CheckpointError(
        f"{what}: {name} has shape {given} in the checkpoint, but its config says {wanted}; the "
        "checkpoint and the config are not of one model"
    )


def check_tensors(
    module: nn.Module,
    checkpoint: Checkpoint,
    recipes: Mapping[str, Recipe],
    what: str,
    unneeded: re.Pattern[str] | None = None,
) -> dict[str, Tensor]:
    """Return a module's tensors by name, once a checkpoint has all that they come from.

    Tensors that released files carry and nothing needs (:data:`HARMLESS`) may be left over, and those
    that ``unneeded`` matches (a file may hold several parts). Raises :class:`CheckpointError` where
    keys, shapes or kinds of numbers disagree; no weight is read, so that parameters with a transform
    are compared later.
    """
    own, there = dict(module.state_dict()), set(checkpoint)
    wanted = {name: recipes[name].sources for name in own if name in recipes}
    used = list(itertools.chain(*wanted.values()))
    for key in filter(checkpoint.__contains__, used):
        if checkpoint.dtype(key) not in PLAIN:
            kind = str(checkpoint.dtype(key)).removeprefix("torch.")
            raise kind_of(checkpoint) or quantized_error(checkpoint.path, f"{key} holds {kind}")
    found = {name: keys for name, keys in wanted.items() if there.issuperset(keys)}
    for name, keys in found.items():
        shapes = [checkpoint.shape(key) for key in keys]
        stacked = list(shapes[0])
        if len(shapes) > 1 and all(s and s[1:] == shapes[0][1:] for s in shapes):
            stacked[0] = sum(s[0] for s in shapes)
        if recipes[name].transform is None and stacked != list(own[name].shape):
            raise mismatch(what, name, stacked, list(own[name].shape))
    ignored = [HARMLESS] if unneeded is None else [HARMLESS, unneeded]
    extra = (k for k in there.difference(used) if not any(p.search(k) for p in ignored))
    faults = {"missing": [name for name in own if name not in found], "unknown": sorted(extra)}
    told = [
        f"{'1 key is' if len(keys) == 1 else f'{len(keys)} keys are'} {fault}, the first is {keys[0]!r}"
        for fault, keys in faults.items()
        if keys
    ]
    if told:
        raise kind_of(checkpoint) or CheckpointError(
            f"{what}: {' and '.join(told)}; the checkpoint is of another architecture, or a part of it "
            "is absent: fetch it again, or name another"
        )
    return own


class _Staging:
    """Host memory of a weight, which the next one takes where a backend has packed the first."""

    memory = torch.empty(0, dtype=torch.uint8).numpy()

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an unfilled tensor, in other memory than one that is still there."""
        nbytes = (count := math.prod(shape)) * dtype.itemsize
        # Two refer to it where no tensor does: this object, and the call that counts.
        if len(self.memory) < nbytes or sys.getrefcount(self.memory) > 2:
            self.memory = _Staging.memory  # the old is gone before there is more
            self.memory = torch.empty(nbytes, dtype=torch.uint8).numpy()
        return torch.frombuffer(self.memory, dtype=dtype, count=count).view(shape)


def fill(
    module: nn.Module,
    checkpoint: Checkpoint,
    recipes: Mapping[str, Recipe],
    *,
    dtype: torch.dtype,
    device: torch.device,
    what: str,
    progress: LoadingProgress | None = None,
    fingerprint: Fingerprint | None = None,
    unneeded: re.Pattern[str] | None = None,
    ready: Callable[[nn.Module], None] | None = None,
) -> None:
    """Replace every parameter and persistent buffer of ``module`` by the checkpoint's, in ``dtype``.

    ``what`` names the part in errors and progress. ``ready`` gets the layer of each tensor once it
    is there. Raises :class:`CheckpointError` before anything is
    read where keys, shapes or kinds of numbers disagree with the module's, later where a tensor holds
    values that are not numbers.
    """
    own = check_tensors(module, checkpoint, recipes, what, unneeded)
    total = sum(checkpoint.size_of(key) for name in own for key in recipes[name].sources)
    done, staging = 0, _Staging()
    for name, parameter in own.items():
        path, _, leaf = name.rpartition(".")
        owner, shape = module.get_submodule(path), list(parameter.shape)
        staged = ready and device.type == "cpu" and leaf == "weight" and hasattr(owner, "packed")
        make = staging.tensor if staged else partial(torch.empty, device=device)
        out: Tensor = make(shape, dtype=dtype)
        recipe, row = recipes[name], 0
        for key in recipe.sources:
            tensor: Tensor | None = None
            if recipe.transform is not None and recipe.rows is None:
                tensor = checkpoint.read(key)
                check_values(tensor, key, dtype, what)
                if fingerprint is not None:
                    fingerprint.update(key, tensor)
                tensor = recipe.transform(key, tensor)
            target = out
            if len(recipe.sources) > 1:
                end = row + (checkpoint.shape(key) if tensor is None else tensor.shape)[0]
                target, row = out[row:end], end
            if tensor is None:
                _copy_blocks(target, checkpoint, key, recipe.rows, what, fingerprint)
            elif target.shape == tensor.shape:
                target.copy_(tensor)
            else:
                raise mismatch(f"{what} ({key})", name, list(tensor.shape), shape)
            done += checkpoint.size_of(key)
            if progress is not None:
                progress(what, done, total)
        replace_tensor(module, name, out)
        if ready is not None and not any(owner.children()):
            ready(owner)
        if staged and vars(owner).get("packed") is None and len(staging.memory) > out.nbytes:
            replace_tensor(module, name, out.clone())  # it would hold all of a larger one's
        del out, target, tensor


@_one_thread()
def _copy_blocks(
    out: Tensor,
    checkpoint: Checkpoint,
    key: str,
    rows: Tensor | None,
    what: str,
    fingerprint: Fingerprint | None,
) -> None:
    """Copy a tensor, or some rows of it, in blocks: a table of words may be a sixth of a model."""
    shape = checkpoint.shape(key)
    if out.shape != torch.Size(shape if rows is None else [len(rows), *shape[1:]]):
        raise mismatch(f"{what} ({key})", key, list(shape), list(out.shape))
    width = 1 if rows is None else math.prod(shape[1:])
    flat = out.view(-1, width)
    for first, block in checkpoint.blocks(key, width, out.view(-1) if rows is None else None):
        if fingerprint is not None and not first:
            fingerprint.update(key, block, shape)
        check_values(block, key, out.dtype, what)
        at, block = first // width, block.view(-1, width)
        if rows is None:
            if (there := flat[at : at + len(block)]).data_ptr() != block.data_ptr():
                there.copy_(block)
            continue
        there = ((rows >= at) & (rows < at + len(block))).nonzero().flatten()
        for run in there.tensor_split((there.diff() > 1).nonzero().flatten() + 1):
            if len(run):
                flat[run[0] : run[-1] + 1].copy_(block[rows[run] - at])


def replace_tensor(module: nn.Module, name: str, value: Tensor) -> None:
    """Let a parameter or buffer of a module be this tensor; parameters are not trained."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    else:
        owner._buffers[leaf] = value
