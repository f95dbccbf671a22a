"""Models with random weights: tiny ones to check devices with, and ones of real sizes to time.

What a step costs does not depend on the weights. Every family's models are made in the same way: from a
manifest, part by part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from lantern_accel.checkpoints.loading import without_data
from lantern_accel.decoding.engine import Engine
from lantern_accel.device.operations import TensorOps
from lantern_accel.errors import ModelError, did_you_mean
from lantern_accel.families.base import Model
from lantern_accel.families.manifest import Manifest, ManifestT
from lantern_accel.families.registry import entry, families, family, is_published, list_published
from lantern_accel.files import read_json_file
from lantern_accel.nn.draft_head import empty_head, usual_head
from lantern_accel.nn.rounding import Rounding
from lantern_accel.nn.transformer import pack
from lantern_accel.records import first_wrong
from lantern_accel.strategy.values import Sampling, Strategy

#: From a parameter's name and shape to its values, on the device where it will stay.
Draw = Callable[[str, torch.Size], Tensor]
#: The family of a file of sizes that does not say.
USUAL_FAMILY = "llamagen"


@dataclass
class RandomModel(Model):
    """A model with random weights, and a neighbour table (int32 ``[V, k]``), on a device."""

    neighbours: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def name(self) -> str:
        """The name of its sizes."""
        return str(self.manifest.name)

    def engine(
        self, ops: TensorOps, strategy: Strategy, sampling: Sampling, batch: int = 1
    ) -> Engine:
        """Return an engine on these weights; a copy to draft with is the target itself."""
        return Engine(
            self.target,
            self.drafter,
            ops,
            strategy,
            sampling,
            batch=batch,
            neighbours=self.neighbours[:, : strategy.neighbours] if strategy.neighbours else None,
            copy=self.target,
        )


def manifest_of_size(name: str) -> Manifest:
    """Return the manifest of a published model, of a size that a family knows, or of a JSON file.

    The file has the fields of a target's configuration, and ``family`` where it is not LlamaGen's. A
    model without a published drafter gets one that fits. Raises :class:`ModelError` for an unknown name
    or field.
    """
    made: Manifest | None
    path = Path(name)
    try:
        if is_published(name):
            known = entry(name)
            kind = family(known.family)
            made = kind.fitting_drafter(kind.from_entry(known))
        elif path.suffix == ".json":
            values = read_json_file(path)
            if not isinstance(values, dict):
                raise ValueError("it holds no sizes by name")
            kind = family(values.pop("family", USUAL_FAMILY))
            made = kind.manifest_of_size(path.stem, values)
        else:
            made = next(
                (m for kind in families() if (m := kind.manifest_of_size(name)) is not None), None
            )
    except ValidationError as error:
        said = first_wrong(error)
        raise ModelError(f"{path}: {said if ': ' in said else f'the sizes: {said}'}") from None
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from None
    if made is None:
        names = [one.name for one in list_published()]
        raise ModelError(
            f"no size is named {name!r}{did_you_mean(name, names)} (also llamagen-SIZE-PIXELS with b, "
            "l, xl, xxl or 3b and a multiple of 16 pixels, or a JSON file of a configuration)"
        )
    return made


def with_head(manifest: ManifestT) -> ManifestT:
    """Return a manifest with a draft head that fits, where it has none."""
    if manifest.draft_head is not None:
        return manifest
    return manifest.model_copy(update={"draft_head": usual_head(manifest.target)})


def fill_random(
    manifest: Manifest,
    ops: TensorOps,
    device: torch.device,
    draw: Draw,
    how: Rounding | None = None,
) -> RandomModel:
    """Build target, drafter and draft head, and give every parameter what ``draw`` makes for it.

    A draft head's parameters are float32, as a loaded one's. ``how``: the target's weights are quantized.
    """
    kind = family(manifest.family)
    names = ("target", "drafter") if manifest.drafter is not None else ("target",)
    # In inference mode torch cannot build on fake tensors, which have no data either.
    with torch.inference_mode(False), without_data():
        parts = {part: kind.build(manifest, part, ops) for part in names}
    for name, part in parts.items():
        for path, module in part.named_modules():
            for key, weight in list(module.named_parameters(recurse=False)):
                # Replaced, not moved: Module.to cannot move fake tensors.
                made = draw(f"{path}.{key}", weight.shape)
                setattr(module, key, nn.Parameter(made, requires_grad=False))
        kind.place_tables(part, device)
        pack(part.eval(), ops, how if name == "target" else None)
    target = parts["target"]
    with torch.inference_mode(False):
        head = empty_head(manifest.draft_head)
    if head is not None:
        for key, weight in list(head.named_parameters()):
            made = draw(f"draft_head.{key}", weight.shape).float()
            setattr(head, key, nn.Parameter(made, requires_grad=False))
        target.draft_head = head.eval()
    return RandomModel(manifest, target, parts.get("drafter"), None, None, "random", kind)


def random_model(
    manifest: Manifest,
    ops: TensorOps,
    dtype: torch.dtype,
    *,
    neighbours: int = 64,
    how: Rounding | None = None,
) -> RandomModel:
    """Make seeded random weights of a real size on the device of ``ops``, never elsewhere first.

    ``how``: the target's are quantized.
    """
    device = ops.device
    shapes = device.type == "meta"  # without memory there are no numbers to sample
    generator = None if shapes else torch.Generator(device).manual_seed(0)

    def random_tensor(name: str, shape: torch.Size) -> Tensor:
        made = torch.empty(shape, dtype=dtype, device=device)
        if shapes:
            return made
        if "norm" in name:
            return made.fill_(0.0 if name.endswith("bias") else 1.0)
        return made.normal_(0.0, 0.02, generator=generator)

    model = fill_random(manifest, ops, device, random_tensor, how)
    vocab = manifest.target.vocab_size
    wide = min(neighbours, vocab - 1)
    steps = torch.arange(1, wide + 1, dtype=torch.int32, device=device)
    codes = torch.arange(vocab, dtype=torch.int32, device=device).unsqueeze(1)
    model.neighbours = (codes + steps) % vocab
    return model
