"""Published settings by name, each with its source, so that a number can be reproduced by name.

A preset fills in what a request leaves open; options that are given win. Presets of one name may differ
by model: the first that suits the model is taken.
"""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from lantern_accel.errors import RequestError, did_you_mean
from lantern_accel.files import read_toml_file
from lantern_accel.records import Frozen


class Preset(Frozen):
    """Settings that somebody published, and where.

    ``sampling`` has fields of :class:`~lantern_accel.strategy.values.Sampling`; ``overrides`` has what
    ``Pipeline.strategy`` takes besides a name (``drafts``, ``k``, ``delta``, ``lam``, ``residual``,
    ``neighbour_space``). ``models`` are patterns of names; ``conditioning`` distinguishes
    LlamaGen's kinds, ``variant`` the models of a family that has several.
    """

    name: str
    summary: str
    source: str
    family: str
    conditioning: Literal["class", "text"] | None = None
    variant: str | None = None
    models: tuple[str, ...] = ("*",)
    strategy: str
    sampling: dict[str, Any] = Field(default_factory=dict)
    overrides: dict[str, object] = Field(default_factory=dict)

    def suits(self, manifest: Any) -> bool:
        """Return whether these settings are for a model."""
        return (
            manifest.family == self.family
            and self.conditioning in (None, manifest.conditioning)
            and self.variant in (None, manifest.variant)
            and any(fnmatch.fnmatch(manifest.name, pattern) for pattern in self.models)
        )


PRESETS: tuple[Preset, ...] = tuple(
    Preset.model_validate(one)
    for one in read_toml_file(Path(__file__).with_name("presets.toml"))["preset"]
)


def preset_for(name: str, manifest: Any) -> Preset:
    """Return the preset of a name that suits a model.

    Raises :class:`RequestError` for a name that is unknown, or that has no settings for this model.
    """
    named = [one for one in PRESETS if one.name == name]
    if not named:
        raise RequestError(
            f"unknown preset {name!r}{did_you_mean(name, {one.name for one in PRESETS})}"
        )
    for one in named:
        if one.suits(manifest):
            return one
    suitable = sorted({one.name for one in PRESETS if one.suits(manifest)})
    raise RequestError(
        f"the preset {name!r} has no settings for the model {manifest.name!r} ("
        f"{'for it: ' + ', '.join(suitable) if suitable else 'none is published for it'})"
    )
