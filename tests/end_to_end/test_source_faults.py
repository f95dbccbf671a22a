"""Drafts that a stranger's package brings, and what is said where they fail."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

import lantern_accel
from lantern_accel.errors import StrategyError
from lantern_accel.strategy.sources import SOURCES

PACKAGE = """
from typing import Literal
import torch
from lantern_accel.decoding.sources import CertainDrafts, register
from lantern_accel.strategy.sources import DraftConfig, chain_paths

class Repeats(DraftConfig):
    kind: Literal["repeats"] = "repeats"
    length: int = 2

    @property
    def shape(self):
        return chain_paths(self.length)

@register(Repeats)
class Repeated(CertainDrafts[Repeats]):
    def guess(self, state):
        if self.given.config.length == 3:
            raise RuntimeError("stack expects a non-empty TensorList")
        return state.root.unsqueeze(1).repeat(1, self.given.config.length)
"""


@pytest.fixture
def brought(tmp_path, monkeypatch):
    (tmp_path / "their_drafts.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("their_drafts")
    sys.modules.pop("their_drafts")
    SOURCES.pop("repeats", None)


def test_a_package_s_drafts_need_no_strategy_beside_their_tree(brought, tiny_model):
    with lantern_accel.load(tiny_model, device="cpu", dtype="float32") as pipeline:
        whole = pipeline.generate("red heart", seed=3, strategy="vanilla").tokens
        drawn = pipeline.generate("red heart", seed=3, drafts="repeats:length=1")
    assert torch.equal(drawn.tokens, whole)
    assert drawn.stats.strategy.name == "repeats"


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_drafts_that_fail_are_blamed_and_not_the_device(brought, tiny_model, device):
    with lantern_accel.load(tiny_model, device=device) as pipeline:
        with pytest.raises(StrategyError, match=r"'repeats' failed in .*their_drafts\.py, line 19"):
            pipeline.generate("red heart", seed=3, drafts="repeats:length=3")
        with pytest.raises(StrategyError, match=r"takes no drafts"):
            pipeline.generate("red heart", drafts="chain:2")
        assert pipeline.generate("red heart", seed=3, strategy="vanilla").images


def test_a_caller_s_own_error_is_nobody_s_drafts(brought, tiny_model, monkeypatch):
    def progress(known, count):
        raise ZeroDivisionError

    # A package that brings drafts, and draws in another of its modules.
    monkeypatch.setattr(brought.Repeats, "__module__", f"{__name__}.drafts")
    with (
        lantern_accel.load(tiny_model, device="cpu") as pipeline,
        pytest.raises(ZeroDivisionError),
    ):
        pipeline.generate("red heart", seed=3, on_progress=progress)
