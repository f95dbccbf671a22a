"""Lengths and sizes that nobody chose follow from what rows cost, not from the device's kind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lantern_accel.decoding.engine import Engine
from lantern_accel.device.backend import Backend
from lantern_accel.device.plugins import open_backend
from lantern_accel.device.preferences import Preferences
from lantern_accel.generation import row_costs as rows
from lantern_accel.generation.row_costs import RowCosts, auto_lengths, tree_of, window_tokens
from lantern_accel.strategy.lengths import usual_tokens_per_step
from lantern_accel.strategy.trees import EAGLE2_TREE, NAIVE_EXTEND_57
from lantern_accel.strategy.values import AUTO_LENGTHS
from lantern_accel.testing import tiny

#: Vectors (an EPYC), tiles (a Xeon), and rows that nothing is known of.
VECTORS = RowCosts(costs={2: 1.0, 4: 1.06, 8: 1.24, 16: 1.6, 32: 3.1, 64: 6.2, 128: 12.4})
TILES = RowCosts(costs={2: 1.0, 4: 1.0, 8: 1.0, 16: 1.02, 32: 1.08, 64: 1.45, 128: 2.6})
UNKNOWN = RowCosts.free(64)
#: Tokens per step by length, as known of the bundled model's windows by its head.
KNOWN = {1: 1.0, 2: 1.44, 4: 1.94, 8: 2.56, 16: 3.4}
#: What :func:`~row_costs.measure` is outside the tests, which give costs in its place.
MEASURE = rows.measure


def test_costs_lie_on_lines_and_go_on_behind_what_was_measured() -> None:
    assert VECTORS.of(2, 2) == 1.0 and VECTORS.of(12, 2) == pytest.approx(1.42)
    assert VECTORS.of(256, 2) == pytest.approx(24.8)
    assert TILES.of(8, 8) == 1.0 and TILES.of(64, 8) == 1.45, "in passes of a batch"
    assert VECTORS.of(1, 2) == 1.0 and VECTORS.of(1, 1) == 1.0
    assert UNKNOWN.of(64, 2) == 1.0 and UNKNOWN.of(128, 16) == 2.0 and UNKNOWN.of(256, 2) == 4.0
    noisy = RowCosts.of_times({2: 4.0, 4: 3.0, 8: 3.5, 16: 6.0})
    assert noisy.costs == {2: 1.0, 4: 1.0, 8: 3.5 / 3.0, 16: 2.0}, (
        "no pass costs more than a longer"
    )


@pytest.mark.parametrize(
    ("costs", "lengths"),
    [(VECTORS, [8, 4, 4, 4, 4]), (TILES, [16, 16, 4, 4, 4]), (UNKNOWN, [16, 16, 8, 4, 4])],
    ids=["vectors", "tiles", "unknown"],
)
def test_windows_are_as_long_as_their_rows_pay(costs: RowCosts, lengths: list[int]) -> None:
    assert [window_tokens(costs, 2 * n, n, 16) for n in (1, 2, 4, 8, 16)] == lengths
    assert [window_tokens(costs, 2, 1, n) for n in (2, 3)] == [2, 3], "the strategy's own"


def test_auto_times_longer_windows_where_rows_are_cheap() -> None:
    assert auto_lengths(VECTORS, 2, 1, 256, KNOWN) == AUTO_LENGTHS
    assert auto_lengths(UNKNOWN, 2, 1, 256, KNOWN) == AUTO_LENGTHS
    assert auto_lengths(TILES, 2, 1, 256, KNOWN) == (*AUTO_LENGTHS, 32)
    assert auto_lengths(TILES, 1, 1, 256, KNOWN) == (*AUTO_LENGTHS, 32, 64), "without guidance"
    assert auto_lengths(TILES, 8, 4, 256, KNOWN) == AUTO_LENGTHS, "images share a pass's rows"
    assert auto_lengths(TILES, 2, 1, 16, KNOWN) == AUTO_LENGTHS, "an image of 16 tokens"
    assert auto_lengths(TILES, 2, 1, 3, {}) == (1, 2)
    flat = RowCosts(costs={2: 1.0, 128: 1.0})
    assert auto_lengths(flat, 2, 1, 256, {})[-1] == 64


def test_unknown_lengths_are_as_good_as_the_known_ones() -> None:
    usual = {n: usual_tokens_per_step(n) for n in rows.auto.TOKENS}
    assert rows.complete_tokens_per_step({}) == pytest.approx(usual)
    found = rows.complete_tokens_per_step(KNOWN)
    assert {n: found[n] for n in KNOWN} == KNOWN
    assert found[16] < found[32] < found[64] and found[32] > usual_tokens_per_step(32)


def test_trees_are_as_large_as_their_rows_pay() -> None:
    assert [rows.tree_tokens(n) for n in (1, 2, 3, 5, 8)] == [1.0, 1.5, 1.75, 2.0, 2.1875]
    sizes = {
        name: (tree_of(costs, 2, NAIVE_EXTEND_57).size[0], tree_of(costs, 2, EAGLE2_TREE).size[0])
        for name, costs in (("vectors", VECTORS), ("tiles", TILES))
    }
    assert sizes == {"vectors": (5, 5), "tiles": (13, 13)}
    flat = RowCosts(costs={2: 1.0, 128: 1.0})
    assert tree_of(flat, 2, NAIVE_EXTEND_57) is NAIVE_EXTEND_57
    assert tree_of(UNKNOWN, 2, NAIVE_EXTEND_57) is NAIVE_EXTEND_57, "nothing was measured"
    small = tree_of(VECTORS, 2, NAIVE_EXTEND_57)
    assert tree_of(TILES, 2, small) is small


# --- measuring ------------------------------------------------------------------------------------


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Backend]:
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path))
    with open_backend("cpu") as backend:
        yield backend


def test_windows_are_timed_by_their_rows(cpu: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.tiny_model(cpu, cpu.device, torch.float32)
    tokens, branches = (
        model.manifest.target.num_tokens,
        model.manifest.defaults.sampling.branches,
    )
    counts = [n for n in rows.auto.TOKENS if n < tokens]
    found = MEASURE(cpu, model)
    assert found.timed and min(found.costs.values()) == 1.0
    assert set(found.costs) <= {n * branches for n in counts} and branches in found.costs
    seen: dict[int, float | None] = {}

    def calibrate(engine: Engine, *given: object) -> dict[int, list[float]]:
        seen.update({one.length: one.tokens_per_step for one in engine.draft_lengths})
        return {n: [2.0 * n, 3.0 * n] for n in engine.lengths}

    monkeypatch.setattr(rows, "calibrate", calibrate)
    assert MEASURE(cpu, model).costs == {n * branches: n for n in counts}
    assert all((seen[n] or 0) > usual_tokens_per_step(n) for n in counts[1:]), "an easy prompt"


def test_what_was_measured_is_kept(cpu: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.tiny_model(cpu, cpu.device, torch.float32)
    measured: list[object] = []

    def measure(*given: object) -> RowCosts:
        measured.append(given)
        return TILES

    monkeypatch.setattr(rows, "measure", measure)
    for _ in range(2):
        assert rows.row_costs(model, cpu, torch.float32) == TILES
    assert len(measured) == 1
    rows.row_costs(model, cpu, torch.bfloat16)
    assert len(measured) == 2, "another dtype's passes cost something else"
    from lantern_accel.files import cache_dir

    for path in (cache_dir() / "rows").glob("*.json"):
        path.write_text(json.dumps({"measured": {"costs": {}}}))
    assert rows.row_costs(model, cpu, torch.float32) == TILES and len(measured) == 3
    monkeypatch.setattr(cpu, "preferences", Preferences(free_rows=32))
    assert rows.row_costs(model, cpu, torch.float32) == RowCosts.free(32) and len(measured) == 3
