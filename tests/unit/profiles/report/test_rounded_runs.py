"""Runs with the target's weights quantized: no figure without its quality loss, and none called exact."""

from __future__ import annotations

import pytest
from support.runs import ROUNDED, SHAPES, invented_run

from lantern_accel_profiles.measure.record import Run
from lantern_accel_profiles.report import render
from lantern_accel_profiles.report.comparison import compare
from lantern_accel_profiles.report.rows import Row, row_of
from lantern_accel_profiles.report.verdict import device_sentences


def rounded(name: str = "abacus-8", **more: float) -> Run:
    return invented_run(name, settings={"rounding": ROUNDED}, **more)  # type: ignore[arg-type]


def rows_of(run: Run) -> dict[str, Row]:
    return {cell.strategy.name: row_of(run, cell) for cell in run.cells}


def test_every_row_has_the_price_of_the_weights() -> None:
    plain, fewer = rows_of(invented_run()), rows_of(rounded())
    for name, row in fewer.items():
        assert row.rounding is not None and row.rounding.value == pytest.approx(0.012)
        assert row.moved == pytest.approx((plain[name].moved or 0) + 0.012)
        assert (
            row.total_variation_per_token is not None and row.total_variation_per_token.low >= 0.005
        )
        assert row.fidelity.startswith("TV 0.0") and "int8 weights" in row.detail
    assert plain["vanilla"].fidelity == "exact" and plain["vanilla"].moved == 0
    assert plain["vanilla"].rounding is None and "weights" not in plain["vanilla"].detail
    assert fewer["vanilla"].fidelity == "TV 0.012 per token"


def test_relaxed_rows_without_their_own_price_have_none() -> None:
    relaxed = next(name for name in SHAPES if name.startswith("lantern"))
    run = rounded()
    run.quality = []
    row = rows_of(run)[relaxed]
    assert row.moved is None and row.total_variation_per_token is None
    assert row.fidelity == "quality loss not measured"


@pytest.mark.parametrize("exact", [True, False])
def test_reports_call_nothing_exact_that_is_rounded(exact: bool) -> None:
    found = compare([invented_run() if exact else rounded()], profiles=[])
    markdown, page = render.to_markdown(found), render.page(found)
    line = next(line for line in markdown.splitlines() if line.startswith("| vanilla"))
    assert ("| exact |" in line) == exact
    assert ("TV 0.012" in markdown) != exact
    assert (">of its weights<" in page) != exact and ("int8 weights" in page) != exact
    assert device_sentences(found.models[0])[0].short.endswith("exact.") == exact


def test_what_is_rounded_does_not_race_with_what_is_exact() -> None:
    found = compare([invented_run("full"), rounded("rounded", speed=700)], profiles=[]).models[0]
    assert [(one.run, bool(one.reason)) for one in found.offers] == [
        ("full, full weights", False),
        ("rounded, int8 weights", True),
    ]


def test_a_resumed_run_keeps_its_weights() -> None:
    from lantern_accel_profiles.measure.run import identity

    assert identity(rounded()) != identity(invented_run())
    again = Run.model_validate_json(rounded().model_dump_json())
    assert again.settings.rounding == ROUNDED
