"""A model of ours around the weights of a module that another library has loaded: ids in, codes out.

What has one layout in both is one tensor. Matrices that we keep stacked are made once, and the module's
own become views of them; rows that are in another order here are copied. Nothing of the module's values
changes.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lantern_accel.checkpoints.kinds import OTHER, PLAIN, kind_of
from lantern_accel.checkpoints.loading import (
    Fingerprint,
    check_tensors,
    mismatch,
    replace_tensor,
    without_data,
)
from lantern_accel.checkpoints.weights import Checkpoint, HeldFile
from lantern_accel.device.backend import Backend
from lantern_accel.device.plugins import open_backend
from lantern_accel.families.base import Family, Model, Rows
from lantern_accel.families.manifest import Manifest
from lantern_accel.families.prompted_family import TokenFamily
from lantern_accel.families.registry import family
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.integrations.adapter import Adapter, SampledTokens
from lantern_accel.integrations.watch import Watch
from lantern_accel.models.bundle import named_head, read_head
from lantern_accel.nn.transformer import Projection, pack
from lantern_accel.records import format_bytes
from lantern_accel.strategy.rules import validate_model
from lantern_accel.strategy.sampling import named_once
from lantern_accel.strategy.values import Sampling


class ModuleWeights(Checkpoint):
    """A module's tensors, as a checkpoint reads them."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        held = HeldFile(Path(type(module).__name__), module.state_dict(keep_vars=True))
        self.tensors = held.tensors
        super().__init__(held.path, [held])

    def become(self, key: str, value: Tensor) -> None:
        """Let a parameter of the module be this tensor, which has its values.

        Where one of the two was made in inference mode and the other was not, both stay.
        """
        path, _, leaf = key.rpartition(".")
        owner = self.module.get_submodule(path)
        parameter = owner._parameters.get(leaf)
        if parameter is not None and parameter.is_inference() == value.is_inference():
            parameter.data = value


@dataclass(frozen=True)
class Memory:
    """Bytes of our weights: those that are the module's own, and those held next to it."""

    shared: int
    beside: int

    def __str__(self) -> str:
        shared, beside = format_bytes(self.shared), format_bytes(self.beside)
        return f"{shared} shared with the module, {beside} next to it"


def _share(
    weights: ModuleWeights,
    kind: Family,
    manifest: Manifest,
    part: str,
    ops: Backend,
    known: Fingerprint,
) -> nn.Module:
    """Build a part around a module's tensors; raises :class:`CheckpointError` where they do not fit."""
    what = weights.path.name
    with without_data():
        module = kind.build(manifest, part, ops)
    recipes = kind.recipes(part, weights, manifest)
    own = check_tensors(module, weights, recipes, what, kind.beside.get(part))
    for name, parameter in own.items():
        recipe = recipes[name]
        sources = [(key, weights.tensors[key]) for key in recipe.sources]
        for key, tensor in sources:
            known.update(key, tensor)
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
        replace_tensor(module, name, value)
    return module.eval()


def shared_pipeline(
    weights: ModuleWeights, kind: Family, manifest: Manifest, codebook: bool, watch: Watch,
    head: Path | None = None,
) -> tuple[Pipeline, Memory]:  # fmt: skip
    """Return a pipeline on the module's device and in its dtype, and what it holds next to the module.

    ``codebook``: its image tokenizer is needed too, for the neighbours of relaxed acceptance. ``watch``
    notes what the module is then. ``head``: a draft head's file or folder.
    """
    first = next(iter(weights.module.parameters()))
    if head is not None:
        manifest, head = named_head(head, manifest)
    with torch.no_grad():
        backend = open_backend(str(first.device))
        known = Fingerprint()
        target = _share(weights, kind, manifest, "target", backend, known)
        if head is not None:
            target.draft_head = read_head(manifest, head, first.device, known.hexdigest())
        turns = next((t for path, t in watch.tensors() if path.endswith(".inv_freq")), None)
        if turns is not None:
            target.frequencies = turns.detach().cpu().float()
        kind.place_tables(target, first.device)
        pack(target, backend)
        vq = None
        if codebook:
            vq = _share(weights, kind, manifest, "vq", backend, known).float()
            kind.place_tables(vq, first.device)
    # Values in the whole tell a model from itself with another adapter merged.
    shapes = [f"{key} {list(tensor.shape)}" for key, tensor in weights.tensors.items()]
    values = f"{shapes} {first.dtype} {watch.note()}"
    digest = hashlib.sha256(values.encode()).hexdigest()[:16]
    model = Model(manifest, target, None, vq, None, digest, kind)
    theirs = {t.untyped_storage().data_ptr() for t in weights.module.parameters()}
    shared = beside = 0
    for one in (target, *([] if vq is None else [vq])):
        packed = (m.packed for m in one.modules() if isinstance(m, Projection))
        held = [*one.parameters(), *one.buffers(), *(t for t in packed if isinstance(t, Tensor))]
        for tensor in {id(t): t for t in held}.values():
            nbytes = tensor.numel() * tensor.element_size()
            if not tensor.is_mkldnn:  # whose storage cannot be asked for
                if not tensor.untyped_storage().nbytes() > tensor.element_size():
                    continue  # given up when it was packed
                if tensor.untyped_storage().data_ptr() in theirs:
                    shared += nbytes
                    continue
            beside += nbytes
    return Pipeline(model, backend, first.dtype), Memory(shared, beside)


#: From a module's weights and its configuration to the manifest of our model of it.
Describe = Callable[[Checkpoint, dict[str, Any]], Manifest]


@dataclass(kw_only=True)
class Accelerated(Adapter):
    """Our decoder around one loaded module; made when it is first needed.

    ``memory`` says what it holds next to the module's own weights, once it was made.
    """

    module: nn.Module
    family: str
    describe: Describe
    head: Path | None = None
    memory: Memory | None = None
    _watch: Watch | None = None

    def __getstate__(self) -> dict[str, object]:
        """Return what a copy is made of: it makes a decoder of its own, around the copied module."""
        return {**vars(self), "memory": None, "last": None, "pipeline": None, "_watch": None}

    @property
    def relaxed(self) -> bool:
        """Whether the strategy reads which codes are alike."""
        if isinstance(self.strategy, str):
            return self.strategy.startswith("lantern")
        return bool(self.strategy.neighbours)

    def ready(self) -> Pipeline:
        """Return the pipeline of the module as it is now; where it has changed, another is made.

        Raises :class:`ModelError` where a part of the module computes something else, by a hook or
        since it was replaced, and names the part.
        """
        kind = family(self.family)
        parts = ("target", "vq") if self.relaxed else ("target",)
        beside = [kind.beside[part] for part in parts if part in kind.beside]
        if self._watch is not None and self._watch.beside != beside:
            self.close()
        self._watch = watch = self._watch or Watch(self.module, beside)
        if self.pipeline is not None and not watch.has_changed():
            return self.pipeline
        config: Any = self.module.config
        said = config.to_dict()
        held = HeldFile(Path(type(self.module).__name__), dict(watch.tensors()))
        if any(t.dtype not in (*PLAIN, *OTHER) for t in held.tensors.values()) and (
            wrong := kind_of(Checkpoint(held.path, [held]), said)
        ):
            raise wrong
        watch.check()
        self.close()
        weights = ModuleWeights(self.module)
        manifest = self.describe(weights, said)
        made = shared_pipeline(weights, kind, manifest, self.relaxed, watch, self.head)
        self._watch, (self.pipeline, self.memory) = watch, made
        logging.getLogger("lantern_accel").info("weights: %s", self.memory)
        return self.pipeline

    def close(self) -> None:
        """Free what is held next to the module."""
        if self.pipeline is not None:
            self.pipeline.close()
        self.pipeline = self._watch = None

    def generate_ids(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[tuple[int, int]],
        *,
        others: Sequence[Sequence[int]] = (),
        grid: tuple[int, int] | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> SampledTokens:
        """Generate the images of prompts that are token ids; :meth:`ready` comes first.

        ``others``: where it is guided, what guidance leads away from; else the family's own. ``grid``:
        rows and columns.
        """
        assert self.pipeline is not None
        model, device = self.pipeline.model, self.pipeline.backend.device
        assert isinstance(model.family, TokenFamily)
        given = others if sampling.branches == 2 else ()
        made = model.family.conditions_of(model, [*prompts, *given], device, grid)
        if given:
            shared = None if model.target.own_prompts else len(prompts)
            rows = Rows(made.condition, made.mask[:shared])
        else:
            rows = model.family.rows(model, made, sampling)
        return self.generate_rows(rows, made.shape, sampling, seeds, on_progress)

    def sampling(self, found: Sampling) -> Sampling:
        """Return the library's settings with the overrides."""
        return validate_model(
            Sampling, {**found.model_dump(), **named_once(self.overrides)}, "sampling"
        )
