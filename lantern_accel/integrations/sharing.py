"""A model of ours around the weights of a module that another library has loaded.

What has one layout in both is one tensor. Matrices that we keep stacked are made once, and the module's
own become views of them; rows that are in another order here are copied. Nothing of the module's values
changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lantern_accel.checkpoints.loading import (
    check_dtypes,
    check_keys,
    check_shapes,
    mismatch,
    without_data,
)
from lantern_accel.device.backend import Backend
from lantern_accel.device.plugins import open_backend
from lantern_accel.errors import RequestError
from lantern_accel.families.base import Family, Model
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.memory.limits import size
from lantern_accel.nn.transformer import pack


class ModuleWeights:
    """A module's tensors under the names that its checkpoint has, as a checkpoint reads them."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.path = Path(type(module).__name__)
        self.tensors: dict[str, Tensor] = {
            name: tensor.detach() for name, tensor in module.state_dict(keep_vars=True).items()
        }

    def __contains__(self, key: object) -> bool:
        return key in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return tuple(self.tensors[key].shape)

    def dtype(self, key: str) -> torch.dtype:
        """Return a tensor's dtype."""
        return self.tensors[key].dtype

    def become(self, key: str, value: Tensor) -> None:
        """Let a parameter of the module be this tensor, which has its values."""
        path, _, leaf = key.rpartition(".")
        owner = self.module.get_submodule(path)
        parameter = owner._parameters.get(leaf)
        if parameter is not None:
            parameter.data = value


@dataclass(frozen=True)
class Memory:
    """Bytes of our weights: those that are the module's own, and those held beside it."""

    shared: int
    beside: int

    def __str__(self) -> str:
        return f"{size(self.shared)} shared with the module, {size(self.beside)} beside it"


def _share(weights: ModuleWeights, kind: Family, manifest: Any, part: str, ops: Backend) -> Any:
    """Build a part around a module's tensors; raises :class:`CheckpointError` where they do not fit."""
    given: Any = weights
    what = weights.path.name
    with without_data():
        module = kind.build(manifest, part, ops)
    recipes = kind.recipes(part, given, manifest)
    own = dict(module.state_dict())
    check_shapes(own, recipes, given, what)
    check_keys(own, recipes, given, what, kind.unneeded(part))
    check_dtypes(own, recipes, given, what)
    for name, parameter in own.items():
        recipe = recipes[name]
        sources = [(key, weights.tensors[key]) for key in recipe.sources]
        made = [
            (k, t, t if recipe.transform is None else recipe.transform(k, t)) for k, t in sources
        ]
        value = made[0][2]
        if len(made) > 1:
            value = torch.cat([ready for _, _, ready in made])
            row = 0
            for key, tensor, ready in made:
                if ready is tensor:
                    weights.become(key, value[row : row + len(tensor)])
                row += len(tensor)
        if value.shape != parameter.shape:
            raise mismatch(what, name, list(value.shape), list(parameter.shape))
        path, _, leaf = name.rpartition(".")
        module.get_submodule(path)._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    return module.eval()


def shared_pipeline(
    weights: ModuleWeights, kind: Family, manifest: Any, codebook: bool
) -> tuple[Pipeline, Memory]:
    """Return a pipeline on the module's device and in its dtype, and what it holds beside the module.

    ``codebook``: its image tokenizer is needed too, for the neighbours of relaxed acceptance.
    """
    if hasattr(weights.module, "_hf_hook") or any(
        tensor.is_meta for tensor in weights.tensors.values()
    ):
        raise RequestError(
            "the module is offloaded, so that its weights are not on its device while tokens are drawn; "
            "load it without offloading (device_map, enable_model_cpu_offload)"
        )
    head = next(iter(weights.module.parameters()))
    with torch.no_grad():
        backend = open_backend(str(head.device))
        target = _share(weights, kind, manifest, "target", backend)
        kind.place_tables(target, head.device)
        pack(target, backend)
        vq = None
        if codebook:
            vq = _share(weights, kind, manifest, "vq", backend).float()
            kind.place_tables(vq, head.device)
    model = Model(manifest, target, None, vq, None, _fingerprint(weights), kind)
    theirs = {t.untyped_storage().data_ptr() for t in weights.module.parameters()}
    shared = beside = 0
    for one in (target, *([] if vq is None else [vq])):
        packed = [m.packed for m in one.modules() if getattr(m, "packed", None) is not None]
        for tensor in {id(t): t for t in (*one.parameters(), *one.buffers(), *packed)}.values():
            if not tensor.untyped_storage().nbytes() > tensor.element_size():
                continue  # given up when it was packed
            nbytes = tensor.numel() * tensor.element_size()
            if tensor.untyped_storage().data_ptr() in theirs:
                shared += nbytes
            else:
                beside += nbytes
    return Pipeline(model, backend, head.dtype), Memory(shared, beside)


def _fingerprint(weights: ModuleWeights) -> str:
    """Return a hash of names, shapes and the first numbers of every tensor."""
    digest = hashlib.sha256()
    for key, tensor in weights.tensors.items():
        digest.update(f"{key} {list(tensor.shape)} {tensor.dtype}\n".encode())
        few = tensor.reshape(-1)[:64].float().cpu().contiguous()
        digest.update(few.numpy().tobytes())
    return digest.hexdigest()[:16]
