"""Fresh drafts: what two sources are mixed to."""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_accel.decoding.fresh import Freshness
from lantern_accel.strategy.values import Fresh

LEFT = torch.tensor([[[0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]])
ABOVE = torch.tensor([[[0.25, 0.0, 0.75, 0.0], [0.0, 0.5, 0.5, 0.0]]])


def blended(kind: Fresh) -> Tensor:
    fresh = Freshness(kind, 2, 16, 4, 4, None, torch.int64, torch.device("cpu"))
    return fresh.blend(LEFT, ABOVE)


def test_the_mean_of_two_sources() -> None:
    torch.testing.assert_close(blended("mean"), (LEFT + ABOVE) / 2)


def test_the_product_of_two_sources_or_else_the_one_above() -> None:
    found = blended("product")
    torch.testing.assert_close(found[0, 0], torch.tensor([1.0, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(found[0, 1], ABOVE[0, 1])
