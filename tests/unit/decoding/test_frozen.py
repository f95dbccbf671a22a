"""Images of every source of drafts, family and batch against the hashes of :mod:`support.frozen`."""

from __future__ import annotations

import json

import pytest
import torch
from support import native
from support.frozen import FILE, STRATEGIES, Case, cases, drawn, few, made

from lantern_accel.device.operations import TensorOps
from lantern_accel.device.plugins import open_backend
from lantern_accel.strategy.values import SelfDrafts

FROZEN = json.loads(FILE.read_text())
EVERY = list(cases())


def check(case: Case, ops: TensorOps, *what: str) -> None:
    frozen = FROZEN[case.name]
    with torch.inference_mode():
        found = drawn(case, made(case, ops), ops, frozen["seed"])
    assert [found[name] for name in what] == [frozen[name] for name in what]


def test_no_frozen_case_is_left_out() -> None:
    assert list(FROZEN) == [case.name for case in EVERY]


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if few(c) else pytest.mark.long, id=c.name) for c in EVERY],
)
def test_images_are_the_frozen_ones(case: Case) -> None:
    check(case, TensorOps(), "tokens", "steps")


@pytest.mark.long
@native.needs_native
@pytest.mark.parametrize("case", EVERY, ids=lambda one: one.name)
def test_native_steps_draw_the_frozen_images(case: Case) -> None:
    with open_backend("cpu", {"native": "on", "threads": 2}) as ops:
        # Products with a copy in fewer bits are of whole numbers here: other drafts, same tokens.
        copied = isinstance(STRATEGIES[case.strategy].drafts, SelfDrafts)
        check(case, ops, "tokens", *(() if copied else ("steps",)))
