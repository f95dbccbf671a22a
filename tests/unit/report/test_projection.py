"""The roofline by hand, its error where it can be known, and no place in a ranking."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.runs import TOKENS, invented_cell, invented_run, strategies

from lantern_accel.device.datasheets import DeviceProfile, Figure, all_profiles, profiles_dir
from lantern_accel.measure.reading import read_run
from lantern_accel.measure.record import Work, not_measured
from lantern_accel.report import projection
from lantern_accel.report.comparison import compare, rank
from lantern_accel.report.projection import (
    Limits,
    Projected,
    ProjectionError,
    limits_of_profile,
    limits_of_run,
    model_errors,
    phase_seconds,
    project,
    projected_rate,
)
from lantern_accel.report.render import to_markdown
from lantern_accel.report.rows import row_of

LIMITS = Limits(flops=1e12, bandwidth=1e11, launch=1e-6, source="by hand")


def figure(value: float, kind: str = "datasheet") -> Figure:
    return Figure(value=value, kind=kind, source="by hand")  # type: ignore[arg-type]


def profile(**changes: object) -> DeviceProfile:
    values: dict[str, object] = {
        "name": "slate",
        "backend": "slate",
        "vendor": "Rules",
        "model": "Slate XL",
        "reports_as": ("Slate*",),
        "peak_flops": {"bfloat16": figure(2e12)},
        "bandwidth_bytes_per_s": figure(2e11),
    }
    return DeviceProfile.model_validate(values | changes)


@pytest.mark.parametrize(
    ("flops", "size", "launches", "seconds"),
    [
        (1e9, 1e6, 0, 1e-3),  # 1 ms of operations, 0.01 ms of bytes
        (1e6, 1e8, 0, 1e-3),  # bytes bind
        (0, 0, 500, 5e-4),  # launches alone
        (1e9, 1e8, 500, 1.5e-3),  # the larger of the two, and the launches
    ],
)
def test_a_phase_takes_the_larger_of_its_needs_and_its_launches(
    flops: float, size: float, launches: int, seconds: float
) -> None:
    work = Work(flops=flops, bytes=size, launches=launches)
    assert phase_seconds(work, LIMITS) == pytest.approx(seconds)


def test_a_rate_is_prefill_and_the_measured_number_of_steps() -> None:
    cell = invented_cell(strategies(["vanilla"])[0], 4, 300.0)
    cell.work = {
        "prefill": Work(flops=0, bytes=1e9, launches=0),  # 10 ms
        "verify": Work(flops=0, bytes=1e8, launches=0),  # 1 ms
    }
    rate, bound = projected_rate(cell, TOKENS, LIMITS)
    assert rate == pytest.approx(4 * TOKENS / (0.010 + 255 * 0.001))
    assert bound == "bytes"


def test_what_was_measured_of_a_device_beats_its_datasheet() -> None:
    assert limits_of_profile(profile(), "float32") is None
    plain = limits_of_profile(profile(), "bfloat16")
    assert plain is not None
    assert (plain.flops, plain.launch) == (2e12, projection.ASSUMED_LAUNCH)
    assert "assumed 2 \N{MICRO SIGN}s per launch" in plain.source
    better = limits_of_profile(
        profile(
            reached_flops={"bfloat16": figure(1.5e12, "measured")},
            launch_seconds=figure(5e-6, "measured"),
        ),
        "bfloat16",
    )
    assert better is not None
    assert (better.flops, better.launch) == (1.5e12, 5e-6)
    assert "measured 1.5 TFLOP/s" in better.source
    assert "measured 5 \N{MICRO SIGN}s per launch" in better.source


def test_a_run_s_own_ceilings_are_taken_or_none() -> None:
    run = invented_run()
    cell = run.cells[0]
    found = limits_of_run(run, cell)
    assert found is not None
    assert (found.flops, found.bandwidth, found.launch) == (5e11, 4e10, 3e-6)
    cell.captured = True  # its launches within a replay were not measured
    assert limits_of_run(run, cell) is None
    assert limits_of_run(run.model_copy(update={"ceilings": not_measured("x")}), cell) is None


def test_the_error_is_projected_over_measured() -> None:
    run = invented_run(names=["vanilla"])
    cell = run.cells[0]
    limits = limits_of_run(run, cell)
    assert limits is not None
    expected, _ = projected_rate(cell, TOKENS, limits)
    assert model_errors([run]) == [expected / cell.tokens_per_second]
    said = to_markdown(compare([run], profiles=[]))
    assert f"promises {expected / cell.tokens_per_second:.2f} times" in said


def test_a_cell_without_its_work_is_not_projected() -> None:
    run = invented_run(names=["vanilla"])
    run.cells[0].work = not_measured("x")
    with pytest.raises(ProjectionError, match="no work"):
        projected_rate(run.cells[0], TOKENS, LIMITS)


# --- the planted projection ---------------------------------------------------------------------


def projected() -> Projected:
    run = invented_run(names=["vanilla"])
    found = project(run, run.cells[0], profile())
    assert found is not None
    return found


def test_a_projected_figure_in_a_ranking_is_refused() -> None:
    run = invented_run()
    rows = [row_of(run, cell) for cell in run.cells]
    assert [place for place, _ in rank(rows)] == [1, 2, 3, 4, 5]
    with pytest.raises(ProjectionError, match="'Rules Slate XL' is projected, not measured"):
        rank([*rows, projected()])


def test_a_projection_cannot_be_called_measured() -> None:
    with pytest.raises(ValueError, match="measured"):
        Projected.model_validate(projected().model_dump() | {"measured": True})


def test_a_device_with_a_run_is_not_projected() -> None:
    run = invented_run(names=["vanilla"])
    section = compare([run], profiles=[profile()]).models[0]
    assert [p.profile for p in section.projections] == ["slate"]
    assert all(place.strategy == "vanilla" for r in section.rankings for place in r.places)
    device = run.environment.device.model_copy(update={"backend": "slate", "name": "Slate 9"})
    run.environment.device = device
    section = compare([run], profiles=[profile()]).models[0]
    assert section.projections == []
    assert len(section.model_errors) == 1


def test_a_relaxed_strategy_without_its_price_is_not_projected_either() -> None:
    run = invented_run(names=["vanilla", "lantern++"], state="interrupted", quality=[])
    section = compare([run], profiles=[profile()]).models[0]
    assert {p.strategy for p in section.projections} == {"vanilla"}


def test_what_only_an_assumed_launch_decides_is_left_out_and_said() -> None:
    run = invented_run(names=["vanilla"])
    run.cells[0].work = {"verify": Work(flops=0, bytes=1, launches=900, operators=900)}
    section = compare([run], profiles=[profile()]).models[0]
    assert (section.projections, section.launch_bound) == ([], ["Rules Slate XL"])


# --- launches -----------------------------------------------------------------------------------


def test_what_a_native_call_hides_is_charged_to_other_devices() -> None:
    run = invented_run(names=["vanilla"])
    hidden = Work(flops=0, bytes=2e8, launches=0, operators=1000)  # 1 ms of bytes
    run.cells[0].work = {"verify": hidden}
    cell, limits = run.cells[0], Limits(flops=1e12, bandwidth=2e11, launch=2e-6, source="")
    at_home, _ = projected_rate(cell, TOKENS, limits)
    elsewhere, bound = projected_rate(cell, TOKENS, limits, elsewhere=True)
    assert at_home == pytest.approx(3 * elsewhere)  # 1 ms, and 1 ms and 1,000 launches of 2 us
    assert bound == "launches"
    found = project(run, cell, profile())
    assert found is not None
    assert found.tokens_per_second == pytest.approx(elsewhere)


@pytest.mark.parametrize("operators", [None, 0])
def test_a_run_that_tells_its_own_launches_alone_is_not_projected(operators: int | None) -> None:
    run = invented_run(names=["vanilla"])
    run.cells[0].work = {"verify": Work(flops=0, bytes=1e8, launches=0, operators=operators)}
    with pytest.raises(ProjectionError, match="measure it again"):
        project(run, run.cells[0], profile())
    section = compare([run], profiles=[profile()]).models[0]
    assert (section.projections, section.uncounted) == ([], [run.name])
    assert f"Not projected from: {run.name}" in to_markdown(compare([run], profiles=[profile()]))


def test_a_run_of_before_promises_no_gpu_thousands_of_tokens() -> None:
    run = read_run(profiles_dir() / "measured" / "cpu-lantern-emoji.json")
    section = compare([run], profiles=all_profiles()).models[0]
    assert max((one.tokens_per_second for one in section.projections), default=0.0) < 2000


def test_a_report_runs_no_model() -> None:
    """Nothing that could make or run one is imported: what a model costs is measured in profiles."""
    running = "decoding|families|generation|models|nn|memory|testing|training"
    for path in Path(projection.__file__).parent.glob("*.py"):
        found = re.findall(rf"lantern_accel\.(?:{running})\b", path.read_text(encoding="utf-8"))
        assert not found, path.name
