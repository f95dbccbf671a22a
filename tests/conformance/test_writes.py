"""What a step changes: watching a block's writes, without holding what it makes."""

from __future__ import annotations

import gc

import torch
from torch.utils.weak import TensorWeakRef

from lantern_accel.testing.trace import Writes


def test_what_a_block_makes_is_not_held() -> None:
    # A lazy runtime may take a result that somebody holds for one that is still to be filled.
    outside = torch.ones(3)
    with Writes() as seen:
        made = TensorWeakRef((outside + 1).add_(1))
        gc.collect()
        assert made() is None
    assert not seen.written


def test_a_write_through_a_view_is_a_write_to_what_it_is_a_view_of() -> None:
    whole, other = torch.zeros(4), torch.zeros(4)
    with Writes() as seen:
        for _ in range(50):  # views whose ids are used again
            whole[1:3].add_(1)
        other.add_(1)
    assert seen.written.keys() == {id(whole), id(other)}
    assert seen.through_views == {id(whole)}
