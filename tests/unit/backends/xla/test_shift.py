"""Shifting words on a device that divides in place of it."""

from __future__ import annotations

import pytest
import torch

from lantern_accel_xla.backend import shifted


@pytest.mark.parametrize("by", [3, 6, 15, 16, 17, 19, 26])
def test_words_are_shifted_where_a_shift_is_a_division(by: int) -> None:
    words = torch.randint(-(2**31), 2**31, (4096,), dtype=torch.int64).to(torch.int32)
    words = torch.cat((words, torch.tensor([-(2**31), -1, 0, 1, 2**31 - 1], dtype=torch.int32)))
    cleared = words & -(1 << by)
    divided = torch.div(cleared, 1 << by, rounding_mode="trunc").to(torch.int32)
    assert torch.equal(shifted(words, by), words >> by)
    assert torch.equal(divided, words >> by)
