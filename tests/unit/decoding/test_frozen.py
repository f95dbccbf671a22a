"""Images of every source of drafts, family and batch against the hashes of :mod:`support.frozen`."""

from __future__ import annotations

import json

import pytest
import torch
from support import native
from support.frozen import BATCHES, FILE, STRATEGIES, Case, cases, drawn, few, made

from lantern_accel.device.operations import TensorOps
from lantern_accel.device.plugins import open_backend
from lantern_accel.strategy.values import SelfDrafts

FROZEN = json.loads(FILE.read_text())
LONG = pytest.mark.long
EVERY = list(cases())


def check(case: Case, ops: TensorOps, batches: tuple[int, ...], what: set[str]) -> None:
    """Draw a case's images in each batch, and compare."""
    frozen, model = FROZEN[case.name], made(case, ops)
    with torch.inference_mode():
        for batch in batches:
            found = drawn(case, model, ops, batch, frozen["seed"])
            for name in what:
                assert found[name] == frozen[str(batch)][name], (name, batch)


def test_every_case_is_frozen_and_nothing_else() -> None:
    assert list(FROZEN) == [case.name for case in EVERY]


@pytest.mark.parametrize("case", [one for one in EVERY if few(one)], ids=lambda one: one.name)
def test_an_image_in_a_batch_is_the_frozen_one(case: Case) -> None:
    check(case, TensorOps(), (3,), {"tokens", "steps"})


@LONG
@pytest.mark.parametrize("case", EVERY, ids=lambda one: one.name)
def test_images_are_the_frozen_ones_in_every_batch(case: Case) -> None:
    check(case, TensorOps(), BATCHES, {"tokens", "steps"})


@LONG
@native.needs_native
@pytest.mark.parametrize("case", EVERY, ids=lambda one: one.name)
def test_native_steps_draw_the_frozen_images(case: Case) -> None:
    with open_backend("cpu", {"native": "on", "threads": 2}) as ops:
        # Products with a copy in fewer bits are of whole numbers here: other drafts, same tokens.
        copied = isinstance(STRATEGIES[case.strategy].drafts, SelfDrafts)
        check(case, ops, BATCHES, {"tokens"} if copied else {"tokens", "steps"})
