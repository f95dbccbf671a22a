"""Published settings by name: complete, for the right models, and overridden by what is given."""

from __future__ import annotations

import pytest

from lantern_accel.errors import RequestError
from lantern_accel.families.registry import entry, family
from lantern_accel.memory.plan import Planner
from lantern_accel.strategy.presets import PRESETS, preset_for
from lantern_accel.strategy.rules import validate_model
from lantern_accel.strategy.values import Sampling, Strategy


def manifest(name: str):
    one = entry(name)
    return family(one.family).from_entry(one)


@pytest.mark.parametrize("preset", PRESETS, ids=[f"{p.name}-{i}" for i, p in enumerate(PRESETS)])
def test_every_preset_is_valid_and_has_a_source(preset) -> None:
    assert preset.source and preset.summary
    validate_model(Sampling, preset.sampling, "sampling")
    if preset.family == "llamagen":
        import torch

        planner = Planner(manifest("llamagen-t2i-stage1"), dtype=torch.float32)
        chosen = planner.strategy(preset.strategy, **preset.overrides)
        assert isinstance(chosen, Strategy)


def test_the_papers_settings() -> None:
    text, classes = manifest("llamagen-t2i-stage1"), manifest("llamagen-xl-384")
    lantern = preset_for("paper-lantern", text)
    assert (lantern.sampling["cfg_scale"], lantern.sampling["top_k"]) == (7.5, 1000)
    assert (lantern.overrides["k"], lantern.overrides["drafts"]) == (1000, "dynamic:10,4,59")
    assert preset_for("paper-lantern", classes).sampling["cfg_scale"] == 4.0
    assert preset_for("paper-lantern++", text).overrides["drafts"] == "naive_extend_57"


@pytest.mark.parametrize(
    ("model", "scale"),
    [("llamagen-l-256", 2.0), ("llamagen-xxl-384", 1.75), ("llamagen-3b-384", 1.65)],
)
def test_settings_that_differ_by_size(model: str, scale: float) -> None:
    assert preset_for("llamagen-fid", manifest(model)).sampling["cfg_scale"] == scale


def test_a_preset_for_other_models_is_refused_with_those_for_this_one() -> None:
    with pytest.raises(RequestError, match=r"no settings for the model .*llamagen-cli"):
        preset_for("llamagen-fid", manifest("llamagen-t2i-stage1"))
    with pytest.raises(RequestError, match="unknown preset 'papr'"):
        preset_for("papr", manifest("llamagen-b-256"))
