"""Runs that are not what they seem: each is refused, or kept apart by its name."""

from __future__ import annotations

from typing import Any

import pytest
from support.runs import invented_load, invented_run

from lantern_accel_profiles.commands.profiles import faults
from lantern_accel_profiles.measure.reading import check_comparable
from lantern_accel_profiles.measure.record import Run
from lantern_accel_profiles.report.advice import headline, points_table
from lantern_accel_profiles.report.comparison import compare
from lantern_accel_profiles.report.points import Terms
from lantern_accel_profiles.report.render import to_markdown
from lantern_accel_profiles.report.rows import clock_jumps


def test_another_dtype_stands_in_every_name() -> None:
    runs = [invented_run("a"), invented_run("b", settings={"dtype": "float32"}, speed=100)]
    check_comparable(runs, ["a.json", "b.json"])
    found = compare(runs, profiles=[])
    assert [one.run for one in found.models[0].offers] == ["a, bfloat16", "b, float32"]
    assert "b, float32" in headline(found.models[0], found.terms)


@pytest.mark.parametrize(
    "change", [{"total": 90.0}, {"wall": 90.0}, {"at": -5.0}, {"total": 0.001, "wall": 40.0}]
)
def test_a_clock_that_jumps_leaves_the_cell_unjudged(change: dict[str, float]) -> None:
    run = invented_run(names=["vanilla", "eagle"])
    eagle = run.cells[1]
    eagle.samples[3] = eagle.samples[3].model_copy(update=change)
    assert clock_jumps(eagle.samples) == 1 and clock_jumps(run.cells[0].samples) == 0
    found = compare([run], profiles=[]).models[0]
    said = "a clock jumped in 1 of 8 samples of eagle"
    assert {p.strategy: said in p.doubt for p in found.points} == {"vanilla": False, "eagle": True}
    assert found.offers[0].point is not None and found.offers[0].point.strategy == "vanilla"
    assert any(said in fault for fault in faults(run))


# --- services under load ------------------------------------------------------------------------


def loaded(name: str, levels: dict[int, float], **cell: Any) -> Run:
    """Return a run of a service: by requests at once, the seconds from one image to the next."""
    run = invented_run(name, cells=[], quality=[], contact_sheet=[])
    for clients, every in levels.items():
        spans = [
            (max(0.0, (n - clients + 1) * every), (n + 0.5) * every, (n + 1) * every)
            for n in range(40)
        ]
        run.loads.append(invented_load(clients, spans, **{"slots": 1} | cell))
    return run


def test_two_loads_are_held_against_each_other_at_their_best_within_the_bound() -> None:
    slow, fast = loaded("slow", {1: 0.5, 4: 0.4}), loaded("fast", {1: 0.25, 8: 0.2}, joules=800.0)
    check_comparable([slow, fast], ["a.json", "b.json"])
    terms = Terms(latency_s=1.0)
    section = compare([slow, fast], profiles=[], terms=terms).models[0]
    first, second = section.offers
    assert first.point is not None and second.point is not None
    # 8 at once take 1.6 s, and 4 at once of the slow one as long.
    assert (first.run, first.point.setting) == ("fast", "1 at once")
    assert (second.run, second.point.setting) == ("slow", "1 at once")
    assert first.point.images_per_second.value == pytest.approx(4.0)
    assert first.point.joules_per_image == pytest.approx(20.0)
    assert headline(section, terms).startswith("Within 1 s per image, choose fast: 4.00 images")
    assert "first partial image after" in points_table(section.points, False).rows[0][-1]


def test_a_load_and_a_run_stand_side_by_side_without_a_ratio() -> None:
    run, load = invented_run("run"), loaded("load", {2: 0.1})
    section = compare([run, load], profiles=[]).models[0]
    assert [one.verdict for one in section.offers] == [None, None]
    assert "no strategy was compared with plain" in to_markdown(compare([load], profiles=[]))
    slow = invented_run("slow", speed=100)
    section = compare([load, run, slow], profiles=[]).models[0]
    assert headline(section, Terms()).startswith("load makes ")
    assert [one.behind is None for one in section.offers] == [True, True, False]
    both = invented_run("both")
    both.loads = load.loads
    offers = compare([both], profiles=[]).models[0].offers
    assert {one.point.service for one in offers if one.point} == {True, False}


def test_requests_without_a_picture_are_late_and_busy_loads_are_not_judged() -> None:
    failing, jumped = loaded("failing", {1: 0.5}), loaded("jumped", {1: 0.5})
    for sample in failing.loads[0].samples[:4]:
        sample.outcome = "failed"
    jumped.loads[0].samples[5].began = 1e6
    for run, fragment in (
        (failing, "90 %"),
        (loaded("busy", {1: 0.5}, others_cpu=0.6), "the machine was busy"),
        (jumped, "a clock jumped"),
    ):
        (offer,) = compare([run], profiles=[]).models[0].offers
        assert fragment in offer.reason
    pytest.importorskip("jinja2")
    assert "jumped" in to_markdown(compare([jumped], profiles=[]))
