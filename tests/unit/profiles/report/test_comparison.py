"""Rows, verdicts and gaps: no speed-up without its quality loss, nothing missing without its command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import ValidationError
from support.runs import change_samples, invented_cell, invented_run, strategies

from lantern_accel.device.conformance import Report as ConformanceReport
from lantern_accel.device.datasheets import DeviceProfile, Figure
from lantern_accel.strategy.rules import Exact
from lantern_accel.strategy.values import ChainTree, Strategy
from lantern_accel_profiles.measure.record import PHASES, Interval, Run, not_measured
from lantern_accel_profiles.report import render
from lantern_accel_profiles.report.comparison import compare
from lantern_accel_profiles.report.rows import Row, phase_ms, row_of, twin_of
from lantern_accel_profiles.report.verdict import device_sentences


def rows_of(run: Run) -> dict[str, Row]:
    return {cell.strategy.name: row_of(run, cell) for cell in run.cells}


def test_a_row_has_the_figures_of_its_samples() -> None:
    run = invented_run()
    row = rows_of(run)["eagle"]
    cell = next(c for c in run.cells if c.strategy.name == "eagle")
    one = cell.samples[0]
    assert row.step_compression.value == pytest.approx(255 / one.steps)
    assert isinstance(row.tokens_per_second, Interval)
    assert row.tokens_per_second.n == len(cell.samples)
    assert isinstance(row.speedup, Interval)
    assert row.verdict == "faster"
    assert isinstance(row.images_per_second, Interval)
    assert isinstance(row.latency["p50"], Interval)
    assert row.images_per_second.value == pytest.approx(1 / row.latency["p50"].value, rel=1e-6)
    assert isinstance(row.seconds_per_image, Interval)
    assert row.seconds_per_image.value == pytest.approx(row.latency["p50"].value)
    assert "`--samples 20`" in str(row.latency["p95"])
    assert row.quality is None


def test_the_seconds_of_a_row_give_its_speedup() -> None:
    """Fast cells have more rounds than slow ones, and text and pixels take a part of each request."""
    counts = {"vanilla": 9, "eagle": 14, "eagle2": 12, "lantern": 11, "lantern++": 13}
    cells = [invented_cell(s, 1, 300.0, samples=counts[s.name]) for s in strategies()]
    section = compare([invented_run(cells=cells)], profiles=[]).models[0]
    rows = {row.strategy: row for row in section.rows}
    assert {row.samples for row in rows.values()} == {9}
    seconds = {name: row.seconds_per_image for name, row in rows.items()}
    assert not any(isinstance(one, str) for one in seconds.values())
    for name, row in rows.items():
        assert isinstance(row.speedup, Interval) and isinstance(row.images_per_second, Interval)
        assert row.speedup.value == seconds["vanilla"].value / seconds[name].value
        assert row.images_per_second.value == 1 / seconds[name].value
    # Every view has the same figures.
    assert {p.strategy: p.images_per_second for p in section.points} == {
        name: row.images_per_second for name, row in rows.items()
    }


def test_a_cell_that_is_not_complete_costs_the_others_no_sample() -> None:
    cells = [invented_cell(s, 1, 300.0, samples=20) for s in strategies()]
    cells[1].samples = cells[1].samples[:3]
    run = invented_run(cells=cells, state="interrupted")
    rows = {row.strategy: row for row in compare([run], profiles=[]).models[0].rows}
    assert (rows["eagle"].samples, rows["eagle2"].samples) == (3, 20)


def test_a_speedup_is_of_decoding_where_requests_were_not_timed_whole() -> None:
    run = invented_run()
    change_samples(run.cells, total=not_measured("x"))
    rows = rows_of(run)
    speedup = rows["eagle"].speedup
    assert isinstance(speedup, Interval)
    ratio = rows["eagle"].tokens_per_second.value / rows["vanilla"].tokens_per_second.value
    assert speedup.value == pytest.approx(ratio, rel=1e-3)
    assert compare([run], profiles=[]).models[0].points == []


def test_a_run_that_ended_before_its_first_sample_is_reported_as_such() -> None:
    for cells in ([], [invented_cell(s, 1, 300.0, samples=0) for s in strategies()]):
        run = invented_run(cells=cells, state="running", quality=[], contact_sheet=[])
        found = compare([run])
        assert device_sentences(found.models[0]) == []
        pytest.importorskip("jinja2")
        text = render.to_markdown(found)
        assert "Nothing was measured yet." in text
        assert "not complete; `lantern-accel profile -o abacus-1.json --resume`" in text


def test_without_vanilla_there_is_no_speedup() -> None:
    row = rows_of(invented_run(names=["eagle"]))["eagle"]
    assert row.speedup.startswith("not measured: vanilla")
    assert row.verdict == row.speedup


def test_a_relaxed_cell_is_held_against_exact_decoding_with_its_drafts() -> None:
    run = invented_run(names=["lantern", "eagle", "eagle2"])
    found = twin_of(run, run.cells[0])
    assert found is not None and found.strategy.name == "eagle2"


def test_a_point_that_is_not_believed_puts_no_other_behind_it() -> None:
    run = invented_run(names=["vanilla", "eagle"])
    fronts = {p.strategy: p.front for p in compare([run], profiles=[]).models[0].points}
    assert fronts == {"vanilla": False, "eagle": True}
    change_samples(run.cells[1:], others_cpu=0.9)
    fronts = {p.strategy: p.front for p in compare([run], profiles=[]).models[0].points}
    assert fronts["vanilla"]


def test_energy_is_an_image_and_a_joule() -> None:
    cell = invented_cell(strategies(["vanilla"])[0], 2, 300.0)
    change_samples([cell], energy_mj=8000.0)
    assert row_of(invented_run(cells=[cell]), cell).joules_per_image == 4.0
    assert "no energy meter" in str(rows_of(invented_run())["vanilla"].joules_per_image)


def test_phases_add_up_to_the_request() -> None:
    cell = invented_cell(strategies(["eagle"])[0], 2, 300.0)
    found = phase_ms(cell)
    assert list(found) == list(PHASES)
    whole = sorted(1e3 * float(s.total) / 2 for s in cell.samples)
    assert whole[0] <= sum(v for v in found.values() if isinstance(v, float)) <= whole[-1]


# --- the planted speed-up without its quality loss -----------------------------------------------------


def test_an_unpriced_relaxed_strategy_shows_no_speedup() -> None:
    run, lost = invented_run(state="interrupted", quality=[]), invented_run()
    gap = {"total_variation_per_token": not_measured("lost")}
    lost.quality = [one.model_copy(update=gap) for one in lost.quality]
    for rows in (rows_of(run), rows_of(lost)):
        for name in ("lantern", "lantern++"):
            assert str(rows[name].speedup).startswith("not measured: the quality loss")
            assert rows[name].verdict == rows[name].speedup
        assert isinstance(rows["eagle"].speedup, Interval)
    assert "--resume" in str(rows_of(run)["lantern"].quality)
    section = compare([run], profiles=[]).models[0]
    assert section.offers[0].point is not None and section.offers[0].point.moved == 0


def test_a_row_cannot_be_made_with_a_speedup_and_no_price() -> None:
    row = rows_of(invented_run())["lantern++"]
    with pytest.raises(ValidationError, match="speed-up without its quality loss"):
        Row.model_validate(row.model_dump() | {"quality": not_measured("forgotten")})


def test_a_missing_feature_distance_is_told_beside_the_speedup() -> None:
    run = invented_run()
    reason = not_measured("no package; `pip install 'lantern-accel[quality]'`")
    run.quality = [q.model_copy(update={"distance": reason}) for q in run.quality]
    assert isinstance(rows_of(run)["lantern++"].speedup, Interval)
    found = compare([run], profiles=[])
    gap = next(g for g in found.gaps if "no package" in g.reason)
    assert gap.command.startswith("pip install 'lantern-accel[quality]' && lantern-accel profile")


# --- pairs, rankings, gaps ----------------------------------------------------------------------


def test_an_unsettled_cell_gets_the_reason_and_no_verdict() -> None:
    run = invented_run()
    for cell in run.cells:
        cell.settled = cell.strategy.name != "eagle"
    rows = rows_of(run)
    assert "did not settle" in str(rows["eagle"].verdict)
    assert rows["lantern++"].verdict == "faster"
    for cell in run.cells:
        cell.settled = False
    (offer,) = compare([run], profiles=[]).models[0].offers
    assert "did not settle" in offer.measured


def test_too_few_samples_are_told_instead_of_a_verdict() -> None:
    cells = [invented_cell(s, 1, 300.0, samples=2) for s in strategies()]
    found = compare([invented_run(cells=cells)], profiles=[])
    rows = {row.strategy: row for row in found.models[0].rows}
    (device,) = device_sentences(found.models[0])
    for text in (str(rows["eagle"].verdict), device.short):
        assert "too few samples, 2 of 5" in text
    assert device.short.startswith("Unknown") and "TV 0.080" in device.short


def test_models_are_sections_that_do_not_meet() -> None:
    other = invented_run("two", settings={"model": "large", "weights_hash": "f" * 16})
    found = compare([invented_run("one"), other], profiles=[])
    assert [section.model for section in found.models] == ["tiny", "large"]
    assert all(one.behind is None for section in found.models for one in section.offers)


def test_gaps_name_the_reason_and_what_fills_them() -> None:
    run = invented_run(state="interrupted")
    found = {gap.reason: gap for gap in compare([run], profiles=[]).gaps}
    for fragment, command in (
        ("does not read it", "lantern-accel profile -o abacus-1.json --resume"),
        ("95th percentile", "lantern-accel profile -o abacus-1.json --samples 20 --resume"),
        ("a test has none", "lantern-accel conform abacus"),
    ):
        (gap,) = [gap for reason, gap in found.items() if fragment in reason]
        assert gap.command == command
    assert found["backend 'abacus' does not read it"].what == ["power_w"]
    bare = DeviceProfile(
        name="slate",
        backend="slate",
        vendor="S",
        model="1",
        peak_flops={"float32": Figure(value=1e12, kind="datasheet", source="a test")},
    )
    (gap,) = [g for g in compare([run], profiles=[bare]).gaps if g.where == "S 1"]
    assert gap.device and gap.command.startswith("lantern-accel profile --device slate")


def test_a_conformance_file_of_the_device_fills_its_gap() -> None:
    run = invented_run()
    device = run.environment.device
    report = ConformanceReport(
        backend=device.backend,
        backend_version="1",
        device=device.device,
        device_name=device.name,
        torch="2",
        outcomes=[],
    )
    for given, left in (
        (report, False),
        (report.model_copy(update={"device_name": "another"}), True),
        (report.model_copy(update={"simulated": True}), True),
    ):
        gaps = compare([run], [given], profiles=[]).gaps
        assert any(gap.what == ["conformance"] for gap in gaps) == left


def test_details_name_the_tree_and_the_rule() -> None:
    texts = {s.name: s.detail for s in strategies()}
    assert texts["vanilla"] == "one token per step"
    assert texts["lantern++"] == "static, 3 drafts, 2 deep, k 10, λ 2"
    assert texts["lantern"] == "dynamic, 4 drafts, 2 deep, k 1000, δ 0.2"
    chain = Strategy(name="x", drafts=ChainTree(length=3), acceptance=Exact())
    assert chain.detail == "chain, 3 drafts, 3 deep"


def test_a_report_runs_no_model() -> None:
    """Nothing that could make or run one is imported: what a model costs is measured in profiles."""
    running = "decoding|families|generation|models|nn|memory|testing|training"
    for path in Path(render.__file__).parent.glob("*.py"):
        found = re.findall(rf"lantern_accel\.(?:{running})\b", path.read_text(encoding="utf-8"))
        assert not found, path.name
