"""Neighbour tables: the official order, the space they are measured in, and their cache."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch
from support.growth import growth, measurable
from torch.nn import functional as F

from lantern_accel.errors import StrategyError
from lantern_accel.nn import neighbours
from lantern_accel.nn.neighbours import cached_neighbour_table, neighbour_table


def test_every_row_is_sorted_by_distance_and_leaves_its_own_code_out() -> None:
    book = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    table = neighbour_table(book, 39).long()
    for code in range(40):
        row = table[code]
        assert sorted([code, *row.tolist()]) == list(range(40))
        distance = (book[row] - book[code]).norm(dim=-1)
        assert (distance.diff() > -1e-6).all()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbours, "AT_ONCE", 1)  # eight rows
        assert torch.equal(table, neighbour_table(book, 39).long())
    assert torch.equal(table[:, :4], neighbour_table(book, 4).long())


@pytest.mark.long
@measurable
def test_a_table_is_made_in_little_memory() -> None:
    # A square of distances would take 500 MB; rows that were kept between those once took 260 MB.
    setup = """
import torch
from lantern_accel.nn.neighbours import neighbour_table
neighbour_table(torch.randn(5000, 8), 100)  # loads the code that it runs
"""
    assert growth(setup, "neighbour_table(torch.randn(8192, 8), 100)") < 30e6


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize("k", [1, 6, 200, 299])
def test_many_equal_distances_are_ordered_as_a_stable_sort_orders_them(
    k: int, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:  # codebooks have a way of their own
        monkeypatch.setattr(neighbours, "SORTED", 0)
    book = torch.randint(0, 3, (300, 3), generator=torch.Generator().manual_seed(3)).float()
    distance = torch.cdist(book.double(), book.double()).square().round()
    distance.fill_diagonal_(float("inf"))
    expected = distance.sort(dim=-1, stable=True).indices[:, :k].int()
    assert torch.equal(neighbour_table(book, k), expected)


@pytest.mark.parametrize("k", [0, -1, 8, 100])
def test_k_that_the_codebook_cannot_give_is_refused(k: int) -> None:
    with pytest.raises(StrategyError, match=rf"k = {k} .*8 codes; k must be between 1 and 7"):
        neighbour_table(torch.randn(8, 2), k)
    assert neighbour_table(torch.randn(8, 2), 7).shape == (8, 7)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    plain = neighbours.neighbour_table

    def counting(book: torch.Tensor, k: int) -> torch.Tensor:
        calls.append(k)
        return plain(book, k)

    monkeypatch.setattr(neighbours, "neighbour_table", counting)
    return calls


def test_a_cached_table_is_read_back(tmp_path: Path, counted: list[int]) -> None:
    book = torch.randn(30, 4)
    first = cached_neighbour_table(book, 5, normalise=True, cache=tmp_path)
    again = cached_neighbour_table(book, 5, normalise=True, cache=tmp_path)
    assert torch.equal(first, again) and counted == [5]
    # The space, k and the codebook each make another entry; a scaled book is the same on a sphere.
    cached_neighbour_table(book, 5, normalise=False, cache=tmp_path)
    cached_neighbour_table(book, 6, normalise=True, cache=tmp_path)
    cached_neighbour_table(book + 1, 5, normalise=True, cache=tmp_path)
    assert counted == [5, 5, 6, 5]
    assert len(list(tmp_path.glob("neighbours/*.safetensors"))) == 4


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "neighbours").write_text("a file where the folder should be")
    book = torch.randn(30, 4)
    table = cached_neighbour_table(book, 5, normalise=False, cache=tmp_path)
    assert torch.equal(table, neighbour_table(book, 5))
    assert stat.S_ISREG((tmp_path / "neighbours").stat().st_mode)


def test_half_precision_codebooks_are_measured_in_full() -> None:
    book = F.normalize(torch.randn(30, 4), dim=-1).half()
    table = cached_neighbour_table(book, 5, normalise=False, cache=None)
    assert torch.equal(table, neighbour_table(book.float(), 5))
