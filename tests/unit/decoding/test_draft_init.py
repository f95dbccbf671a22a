"""Fresh drafts: the positions that they follow."""

from __future__ import annotations

import torch

from lantern_accel.decoding.draft_init import DraftInitializer


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
        above = fresh.sources(torch.tensor([newest]))[0].tolist()
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
    assert torch.equal(table.sources(newest), plain.sources(newest))
