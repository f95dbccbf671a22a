"""Sampled tokens follow the model's law under the grammar, whatever drafts, and whatever the size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.chi_square import misfit

from lantern_accel.decoding.engine import Engine
from lantern_accel.decoding.logits import distribution
from lantern_accel.decoding.rows import Guidance
from lantern_accel.device.operations import TensorOps
from lantern_accel.families.base import Rows
from lantern_accel.strategy.values import Sampling, Strategy, Window
from lantern_accel.testing.tiny import tiny_model

GIVEN = Sampling(temperature=1.1, cfg_scale=2.0, top_k=6)
IMAGES = 600


def drawn(model: Any, shape: tuple[int, int, int], drafts: Any, seed: int) -> tuple[Any, Rows]:
    """Return tokens of many images of one prompt, and the rows that they began with."""
    target, drafter = model.family.target_for_shape(model, shape)
    made = model.family.tiny_conditions(model, 1, 3).pick([0] * IMAGES)
    rows = model.family.rows(model, made, GIVEN)
    one = Engine(target, drafter, TensorOps(), Strategy(drafts=drafts), GIVEN, batch=IMAGES)
    with torch.inference_mode():
        one.start(rows.condition, rows.mask, one.randomness(seed, list(range(IMAGES))))
        return one.run().tokens.long(), rows


@pytest.mark.long
@pytest.mark.parametrize("drafts", [Window(length=4)], ids=["scd"])
def test_tokens_follow_the_law_at_two_sizes(drafts: Any) -> None:
    model = tiny_model(TensorOps(), torch.device("cpu"), torch.float32, "emu3")
    for seed, (rows_of, columns) in ((1, (2, 3)), (2, (3, 2))):
        shape = (model.manifest.target.prefix_length, rows_of, columns)
        tokens, rows = drawn(model, shape, drafts, seed)
        target, _ = model.family.target_for_shape(model, shape)
        c = target.config
        ends = torch.arange(c.num_tokens) % (columns + 1) == columns
        assert bool((tokens[:, ends] == c.image_codes).all())
        assert bool((tokens[:, ~ends] < c.image_codes).all())
        guide = Guidance(torch.full((c.num_tokens,), GIVEN.cfg_scale), None, target.allowed())
        with torch.inference_mode():
            states = target.forward_dense(rows.condition, tokens[:, :-1].repeat(2, 1), rows.mask)
            logits = target.head(states[:, rows.mask.shape[1] - 1 :])
            for at in torch.nonzero(~ends).flatten().tolist():
                place = torch.full((IMAGES,), at)
                law = distribution(guide(logits[:, at : at + 1], place)[:, 0], GIVEN)
                # Each image has a law of its own: the expected counts are their sum.
                seen = torch.bincount(tokens[:, at], minlength=c.vocab_size)
                assert misfit(seen, law.double().sum(0)) < 4.5
                assert bool((law.gather(1, tokens[:, at : at + 1]) > 0).all())
