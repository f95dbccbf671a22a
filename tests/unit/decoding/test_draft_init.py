"""Fresh drafts: what two sources are mixed to."""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_accel.decoding.draft_init import DraftInitializer
from lantern_accel.strategy.values import Fresh

LEFT = torch.tensor([[[0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]])
ABOVE = torch.tensor([[[0.25, 0.0, 0.75, 0.0], [0.0, 0.5, 0.5, 0.0]]])


def blended(kind: Fresh) -> Tensor:
    fresh = DraftInitializer(kind, 2, 16, 4, 4, None, torch.int64, torch.device("cpu"))
    return fresh.blend(LEFT, ABOVE)


def test_the_mean_of_two_sources() -> None:
    torch.testing.assert_close(blended("mean"), (LEFT + ABOVE) / 2)


def test_the_product_of_two_sources_or_else_the_one_above() -> None:
    found = blended("product")
    torch.testing.assert_close(found[0, 0], torch.tensor([1.0, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(found[0, 1], ABOVE[0, 1])


def two_grids() -> tuple[DraftInitializer, list[int]]:
    """Return drafts of a picture of two grids, 2 x 3 and then 3 x 4, and the tokens above."""
    small, large = (2, 3), (3, 4)
    up, first = [], 0
    for rows, columns in (small, large):
        up += [-1] * columns + [first + n for n in range((rows - 1) * columns)]
        first += rows * columns
    cpu = torch.device("cpu")
    return DraftInitializer("above", 6, len(up), 4, 4, None, torch.int64, cpu, up), up


def test_rows_of_two_widths_have_their_own_tokens_above() -> None:
    fresh, up = two_grids()
    assert (fresh.narrowest, fresh.width) == (3, 4)
    for newest in range(len(up)):
        left, above = (one[0].tolist() for one in fresh.sources(torch.tensor([newest])))
        assert left == [newest] * 6
        for place, source in enumerate(above, start=newest + 1):
            wanted = up[min(place, len(up) - 1)]
            while wanted > newest:  # a row that no pass has seen
                wanted = up[wanted]
            assert source == (newest if wanted < 0 else wanted), (newest, place)


def test_rows_of_one_width_need_no_table() -> None:
    up = [-1] * 4 + list(range(12))
    cpu = torch.device("cpu")
    table = DraftInitializer("above", 9, 16, 4, 4, None, torch.int64, cpu, up)
    plain = DraftInitializer("above", 9, 16, 4, 4, None, torch.int64, cpu)
    newest = torch.arange(16)
    for one, other in zip(table.sources(newest), plain.sources(newest), strict=True):
        assert torch.equal(one, other)
