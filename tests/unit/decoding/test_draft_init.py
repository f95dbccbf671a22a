"""Fresh drafts: the positions that they follow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from lantern_accel.decoding.draft_init import DraftInitializer
from lantern_accel.decoding.geometry import Geometry
from lantern_accel.device.operations import TensorOps


def above(count: int, tokens: int, width: int, up: list[int] | None = None) -> DraftInitializer:
    """Return the fresh drafts of ``count`` positions of an image whose rows are ``width`` wide."""
    config = SimpleNamespace(num_tokens=tokens, row_tokens=width, above=up)
    target: Any = SimpleNamespace(config=config, weight=torch.zeros(1), allowed_codes=lambda: None)
    g = Geometry(1, 1, 2, tokens, count + 1, count, 4, 8)
    return DraftInitializer("above", g, target, TensorOps())


def two_grids() -> tuple[DraftInitializer, list[int]]:
    """Return drafts of a picture of two grids, 2 x 3 and then 3 x 4, and the tokens above."""
    small, large = (2, 3), (3, 4)
    up, first = [], 0
    for rows, columns in (small, large):
        up += [-1] * columns + [first + n for n in range((rows - 1) * columns)]
        first += rows * columns
    return above(6, len(up), 4, up), up


def test_rows_of_two_widths_have_their_own_tokens_above() -> None:
    fresh, up = two_grids()
    assert fresh.width == 4
    for newest in range(len(up)):
        sources = fresh.sources(torch.tensor([newest]))[0].tolist()
        for place, source in enumerate(sources, start=newest + 1):
            wanted = up[min(place, len(up) - 1)]
            while wanted > newest:  # a row that no pass has seen
                wanted = up[wanted]
            assert source == (newest if wanted < 0 else wanted), (newest, place)


def test_rows_of_one_width_need_no_table() -> None:
    up = [-1] * 4 + list(range(12))
    table, plain = above(9, 16, 4, up), above(9, 16, 4)
    newest = torch.arange(16)
    assert torch.equal(table.sources(newest), plain.sources(newest))
