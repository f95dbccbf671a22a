"""One list of settings, which Python, the command and presets share."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import lantern_accel
from lantern_accel.errors import LanternError, RequestError
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.generation.request import build_request
from lantern_accel.generation.settings import Asked, Settings, read_settings
from lantern_accel.models.locate import find_model
from lantern_accel.strategy.choose import choose_strategy
from lantern_accel.strategy.rules import LanternPP
from lantern_accel.strategy.values import Sampling

MANIFEST = find_model("lantern-emoji").manifest


def built(**given: Any) -> Any:
    return build_request(MANIFEST, "pizza", given)


def test_python_is_answered_before_anything_is_loaded() -> None:
    with pytest.raises(RequestError, match="not a prompt"):
        lantern_accel.generate(None, model="nowhere")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="did you mean seed"):
        lantern_accel.generate("pizza", model="nowhere", sede=3)


def test_signatures_show_every_setting() -> None:
    for function in (lantern_accel.generate, Pipeline.generate):
        shown = set(inspect.signature(function).parameters)
        assert shown >= {*Settings.model_fields, "decision"}
    assert list(Asked.__annotations__) == [*Settings.model_fields, "guidance_scale"]


def test_guidance_has_two_names_and_one_value() -> None:
    assert (
        read_settings({"guidance_scale": 3}).cfg_scale == 3 == Sampling(guidance_scale=3).cfg_scale
    )
    assert read_settings({"guidance_scale": None, "cfg_scale": 2}).cfg_scale == 2
    for both in ({"guidance_scale": 3, "cfg_scale": 2}, {"guidance_scale": 0, "cfg_scale": 0}):
        with pytest.raises(RequestError, match="leave one out"):
            read_settings(both)
        with pytest.raises(RequestError, match="leave one out"):
            Sampling(**both)


def test_sampling_as_one_value_or_one_by_one() -> None:
    whole = Sampling(temperature=0.5, top_k=7, cfg_scale=2)
    assert built(sampling=whole).sampling == whole
    assert built(sampling=whole, top_k=9).sampling == whole.model_copy(update={"top_k": 9})
    assert built(top_k=9).sampling == MANIFEST.defaults.sampling.model_copy(update={"top_k": 9})


def test_a_rule_over_a_named_tree_says_so_in_the_name() -> None:
    chosen = choose_strategy(MANIFEST.defaults, "eagle", accept="lantern++:k=3,lambda=4")
    assert (chosen.name, chosen.acceptance) == ("eagle with lantern++", LanternPP(k=3, lam=4))
    same = choose_strategy(MANIFEST.defaults, "lantern++", accept="lantern++:k=3", lam=5.0)
    assert (same.name, same.acceptance) == ("lantern++", LanternPP(k=3, lam=5.0))
    assert built(strategy="lantern++", accept="lantern++:k=3").strategy.acceptance.k == 3
    with pytest.raises(LanternError, match="drafts nothing that could be relaxed"):
        built(strategy="vanilla", accept="lantern++:k=3")


def test_every_field_has_help() -> None:
    assert all(field.description for field in Settings.model_fields.values())
    assert read_settings({}) == Settings()
