"""The base of families whose targets are :class:`~lantern_accel.families.prompted.PromptedTarget`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from lantern_accel.checkpoints.layouts import OWN_WEIGHTS, drafter_weights, first_wrong, read_json
from lantern_accel.checkpoints.loading import Recipe
from lantern_accel.checkpoints.weights import Checkpoint
from lantern_accel.errors import CheckpointError
from lantern_accel.families.base import DrafterFiles, Family, Model, Parts
from lantern_accel.families.manifest import Manifest
from lantern_accel.families.prompted import PromptedTarget
from lantern_accel.families.prompted_drafter import (
    PromptedDrafter,
    PromptedDrafterConfig,
    fitting_config,
    mark_of,
    misfit,
)

#: The configuration beside a drafter's weights.
OWN_CONFIG = "drafter.json"
#: What to say where there is none: nobody has published one.
NO_DRAFTER = "a drafter: none is published, train one with `lantern-accel train drafter`"
_HINT = "name another with --drafter, or decode without one: --drafter none"


def read_drafter(path: Path, target: Any) -> tuple[PromptedDrafterConfig, Path]:
    """Return the sizes and the weights of a trained drafter; ``path`` is its folder or its weights.

    Raises :class:`CheckpointError` where it is of another model than ``target``'s configuration says.
    """
    weights = drafter_weights(path)
    said = weights.parent / OWN_CONFIG
    if not weights.is_file() or not said.is_file():
        raise CheckpointError(
            f"{path} is no drafter for this model: it lacks {OWN_WEIGHTS} or {OWN_CONFIG}, which "
            f"`lantern-accel train drafter` writes; {_HINT}"
        )
    try:
        config = PromptedDrafterConfig.model_validate(read_json(said))
    except ValidationError as error:
        raise CheckpointError(
            f"{said} is no configuration of a drafter for this model ({first_wrong(error)}); {_HINT}"
        ) from None
    wrong = misfit(config, target)
    if wrong is not None:
        raise CheckpointError(f"the drafter {path} is of another model: {wrong}; {_HINT}")
    return config, weights


ManifestT = TypeVar("ManifestT", bound=Manifest)


def add_drafter(
    manifest: ManifestT, folder: Path, parts: Parts, files: dict[str, Path], missing: dict[str, str]
) -> ManifestT:
    """Return a manifest with the drafter that was named, or that lies in ``folder`` as ``drafter``.

    ``files`` gets its weights; ``missing`` says how to get one where there is none.
    """
    beside = folder / "drafter"
    path = parts.drafter or (beside if (beside / OWN_WEIGHTS).is_file() else None)
    if parts.no_drafter:
        return manifest
    if path is None:
        missing["drafter"] = NO_DRAFTER
        return manifest
    config, files["drafter"] = read_drafter(path, manifest.target)
    return manifest.model_copy(update={"drafter": config})


def check_drafter(drafter: PromptedDrafterConfig | None, target: Any) -> None:
    """Raise ValueError for a drafter that is of another target, for a manifest's validator."""
    wrong = None if drafter is None else misfit(drafter, target)
    if wrong is not None:
        raise ValueError(f"the drafter is of another target: {wrong}")


class PromptedFamily(Family):
    """Trains, reads and pairs drafters; a family has ``manifest.drafter`` and builds the rest."""

    def drafter_recipes(self, checkpoint: Checkpoint) -> Mapping[str, Recipe]:
        """Return our own names: what :meth:`drafter_files` wrote."""
        return {key: Recipe((key,)) for key in checkpoint}

    def fitting_drafter(self, manifest: Any) -> Any:
        """Return a manifest with a drafter of one block as the target's are."""
        if manifest.drafter is not None:
            return manifest
        return manifest.model_copy(update={"drafter": fitting_config(manifest.target)})

    def fresh_drafter(
        self, target: PromptedTarget, layers: int = 1, taps: Sequence[int] = ()
    ) -> PromptedDrafter:
        """Return blocks as the target's are, which read its tables."""
        drafter = PromptedDrafter(fitting_config(target.config, layers, taps, mark_of(target)))
        drafter.start()
        drafter.read(target)
        drafter.teacher = (target,)
        return drafter.train()

    def drafter_files(self, drafter: PromptedDrafter) -> DrafterFiles:
        """Return what was trained, under our own names, and its configuration."""
        config = drafter.config.model_dump(mode="json")
        return DrafterFiles(dict(drafter.state_dict()), OWN_CONFIG, config)

    def with_drafter(self, manifest: Any, path: Path) -> tuple[Any, Path]:
        """Take a drafter that was trained for this model."""
        config, weights = read_drafter(path, manifest.target)
        return manifest.model_copy(update={"drafter": config}), weights

    def pair(self, model: Model) -> None:
        """Let the drafter read its target's tables."""
        if model.drafter is not None:
            model.drafter.read(model.target)

    def sized_parts(self, model: Model, **sizes: int) -> tuple[Any, Any]:
        """Return target and drafter for a prompt length or a picture size; weights are shared."""
        target = model.target.fitted(**sizes)
        return target, None if model.drafter is None else model.drafter.beside(target)
