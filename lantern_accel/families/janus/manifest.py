"""The manifest of a Janus model: which generation's prompt, and the ids around a picture."""

from __future__ import annotations

from typing import Literal

from lantern_accel.families.janus.model import JanusConfig
from lantern_accel.families.janus.text import SpecialIds, Variant
from lantern_accel.families.manifest import ModelDefaults
from lantern_accel.families.prompted_drafter import PromptedManifest
from lantern_accel.nn.vq import VQConfig
from lantern_accel.strategy.values import Sampling

#: ``generation_inference.py``: guidance 5, temperature 1, no filter.
DEFAULTS = ModelDefaults(sampling=Sampling(cfg_scale=5.0))


class JanusManifest(PromptedManifest):
    """``model.json`` of Janus's family."""

    family: Literal["janus"] = "janus"
    variant: Variant = "pro"
    ids: SpecialIds = SpecialIds()
    target: JanusConfig
    vq: VQConfig

    @property
    def pad(self) -> int:
        """The id that pads prompts."""
        return self.ids.pad
