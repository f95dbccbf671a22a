"""The base of families with published models, whose parts are of three types and whose drafters train."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from lantern_accel.checkpoints.layouts import OWN_CONFIG
from lantern_accel.device.operations import TensorOps
from lantern_accel.errors import ModelError
from lantern_accel.families.base import DrafterFiles, Family
from lantern_accel.families.published import ModelEntry
from lantern_accel.families.target import Target
from lantern_accel.nn.drafter import Drafter


class DraftedFamily(Family):
    """A family whose manifests have ``target``, ``drafter`` and ``vq``, each the sizes of one type."""

    target_type: ClassVar[type[Target]]
    drafter_type: ClassVar[type[Drafter]]
    vq_type: ClassVar[type[nn.Module]]
    #: What can be fetched by name.
    entries: ClassVar[Sequence[ModelEntry]]

    @abstractmethod
    def drafter_sizes(self, config: Any, layers: int = 1, taps: Sequence[int] = ()) -> Any:
        """Return the sizes of a drafter to train for a target of this configuration.

        Raises :class:`ModelError` for blocks or taps that the family's drafters cannot have.
        """

    @abstractmethod
    def read_drafter(self, manifest: Any, path: Path) -> tuple[Any, Path]:
        """Return the sizes of a drafter that lies elsewhere, and the checkpoint of its weights."""

    def build(self, manifest: Any, part: str, ops: TensorOps) -> nn.Module:
        """Build the target, its drafter, or what turns tokens into codes' rows."""
        if part == "vq":
            return self.vq_type(manifest.vq)
        kind: Any = self.target_type if part == "target" else self.drafter_type
        made: nn.Module = kind(getattr(manifest, part), ops=ops)
        return made

    def published(self) -> Sequence[ModelEntry]:
        """Return the family's models that can be fetched by name, with the parts that they use."""
        return self.entries

    def fitting_drafter(self, manifest: Any) -> Any:
        """Return a manifest with a drafter of one block as the target's are."""
        if manifest.drafter is not None:
            return manifest
        return manifest.model_copy(update={"drafter": self.drafter_sizes(manifest.target)})

    def fresh_drafter(self, target: Target, layers: int = 1, taps: Sequence[int] = ()) -> Drafter:
        """Return an untrained drafter of blocks as the target's are."""
        sizes = self.drafter_sizes(target.config, layers, taps)
        if max(taps, default=0) > target.config.n_layer:
            raise ModelError(
                f"the drafter cannot read the states after block {max(taps)} of "
                f"{target.config.n_layer}; name lower taps"
            )
        kind: Any = self.drafter_type
        drafter: Drafter = kind(sizes)
        drafter.start(target)
        return drafter.train()

    def drafter_files(self, drafter: Any) -> DrafterFiles:
        """Return what was trained, under our own names, and its configuration."""
        config = drafter.config.model_dump(mode="json")
        return DrafterFiles(dict(drafter.state_dict()), OWN_CONFIG, config)

    def with_drafter(self, manifest: Any, path: Path) -> tuple[Any, Path]:
        """Return a manifest with a drafter of this model that lies elsewhere, and its weights."""
        config, weights = self.read_drafter(manifest, path)
        return manifest.model_copy(update={"drafter": config}), weights
