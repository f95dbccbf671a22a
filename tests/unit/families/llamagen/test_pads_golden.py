"""Padded captions as LANTERN's code has them, where a drafter was trained to see the pads."""

from __future__ import annotations

import pytest
import torch
from support.engines import engine_of
from support.golden import golden
from support.recorded import lantern_drafter, lantern_target
from torch.testing import assert_close

from lantern_accel.decoding.engine import Engine
from lantern_accel.strategy.sources import AnyKind
from lantern_accel.strategy.trees import EAGLE2_TREE, NAIVE_EXTEND_57
from lantern_accel.strategy.values import Sampling, Strategy

PREFIX = 120


def prefilled(cap: str, tree: AnyKind, mask_padding: bool) -> tuple[Engine, torch.Tensor]:
    """Return an engine after a recorded caption, and the target's states over the prompt."""
    recorded, target = golden("lantern/pads"), lantern_target()
    caption = recorded[f"{cap}.caption"]
    mask = torch.arange(PREFIX) >= PREFIX - len(caption)
    condition = torch.zeros(PREFIX, caption.shape[1]).masked_scatter(mask.unsqueeze(1), caption)
    models = target, lantern_drafter(mask_padding=mask_padding)
    engine = engine_of(models, Strategy(drafts=tree), Sampling(temperature=0, cfg_scale=3.0))
    rows = torch.stack((condition, target.unconditional(1)[0]))
    engine.session.load(rows, mask.unsqueeze(0), engine.randomness(0, [0]))
    with torch.inference_mode():
        states, _ = engine.verifying.prefill(engine.state)
        engine.prefill()
    return engine, states


@pytest.mark.parametrize("cap", ["cap0", "cap2"])
def test_pads_hold_what_was_recorded(cap: str) -> None:
    recorded = golden("lantern/pads")
    places = recorded[f"{cap}.places"].long()
    _, states = prefilled(cap, EAGLE2_TREE, mask_padding=False)
    assert_close(states[:, places], recorded[f"{cap}.hidden"], rtol=0, atol=1e-4)
    _, hidden = prefilled(cap, EAGLE2_TREE, mask_padding=True)
    assert (hidden[:, places] - recorded[f"{cap}.hidden"]).abs().max() > 0.1
    # What is drawn does not depend on what pads hold.
    assert_close(hidden[:, -1], states[:, -1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("cap", ["cap0", "cap2"])
@pytest.mark.parametrize(("tree", "name"), [(EAGLE2_TREE, "tree"), (NAIVE_EXTEND_57, "drafts")])
def test_drafts_after_a_padded_caption_are_the_recorded_ones(
    cap: str, tree: AnyKind, name: str
) -> None:
    recorded = golden("lantern/pads")
    engine, _ = prefilled(cap, tree, mask_padding=False)
    assert engine.state.root.tolist() == recorded[f"{cap}.root"].tolist()
    with torch.inference_mode():
        drafted = engine.source.draft(engine.state)
    assert drafted.tokens[0].tolist() == recorded[f"{cap}.{name}"].tolist()
