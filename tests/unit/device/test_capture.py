"""Watching a block: what it takes from outside and writes to, without holding what it makes."""

from __future__ import annotations

import gc

import torch
from torch.utils.weak import TensorWeakRef

from lantern_accel.device.changes import Arguments, changed_by


def test_what_a_block_makes_is_not_held() -> None:
    # A lazy runtime may take a result that somebody holds for one that is still to be filled.
    outside = torch.ones(3)
    with Arguments() as seen:
        made = TensorWeakRef(outside + 1)
        gc.collect()
        assert made() is None
    assert [id(one) for one in seen.given.values()] == [id(outside)]


def test_a_write_through_a_view_is_a_write_to_what_it_is_a_view_of() -> None:
    whole, other = torch.zeros(4), torch.zeros(4)
    with Arguments() as seen:
        for _ in range(50):  # views whose ids are used again
            whole[1:3].add_(1)
        other.add_(1)
    assert seen.written.keys() == {id(whole), id(other)}
    assert seen.through_views == {id(whole)}


def test_what_a_step_changes_is_found() -> None:
    buffer, weight = torch.zeros(2), torch.ones(2)

    def step() -> None:
        made = weight * 2
        made.add_(1)  # the step's own
        buffer.add_(made)

    assert [id(one) for one in changed_by(step)] == [id(buffer)]
