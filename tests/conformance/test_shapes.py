"""What a step may not do with tensors that have no data is refused by the rule that it breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern_accel.testing.static import without_data
from lantern_accel.testing.trace import OpRecorder


@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        ("host_read", lambda t: t.sum().item()),
        ("host_read", lambda t: bool(t.any())),
        ("host_read", lambda t: t.tolist()),
        ("host_read", lambda t: torch.equal(t, t)),
        ("dynamic_shape", torch.nonzero),
        ("dynamic_shape", lambda t: t[t > 0]),
        ("dynamic_shape", torch.unique),
        ("dynamic_shape", torch.bincount),
        ("dynamic_shape", lambda t: t.repeat_interleave(t)),
        ("dynamic_shape", lambda t: t.masked_select(t > 0)),
    ],
)
def test_what_needs_data_is_refused_with_its_rule(
    rule: str, wrong: Callable[[Tensor], Any]
) -> None:
    with without_data(), torch.inference_mode():
        given = torch.zeros(3, dtype=torch.int64)
        recorder = OpRecorder(torch.device("cpu"))
        with pytest.raises(Exception), recorder:  # noqa: B017, torch has one for each
            wrong(given)
    assert {one.rule for one in recorder.violations} == {rule}


def test_a_table_from_outside_is_read() -> None:
    table = torch.arange(4)
    with without_data(), torch.inference_mode():
        assert (table.view(2, 2) + 1).shape == (2, 2)
