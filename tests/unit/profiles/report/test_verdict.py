"""The first screen: what helps, what it costs, how sure that is, and which device is faster."""

from __future__ import annotations

from typing import Any

import pytest
from support.runs import (
    ROUNDED,
    change_samples,
    invented_cell,
    invented_price,
    invented_run,
    strategies,
)

from lantern_accel_profiles.measure.record import Run
from lantern_accel_profiles.report.advice import headline
from lantern_accel_profiles.report.comparison import compare
from lantern_accel_profiles.report.names import readable_names, short_device
from lantern_accel_profiles.report.points import Terms
from lantern_accel_profiles.report.record import Comparison
from lantern_accel_profiles.report.rows import SAME_ALGORITHM
from lantern_accel_profiles.report.verdict import (
    DeviceSentences,
    device_sentences,
    equal_quality,
    first_setting,
)
from lantern_accel_profiles.report.writing import reason


def device_of(*runs: Run) -> DeviceSentences:
    found = compare(runs, profiles=[])
    return device_sentences(found.models[0])[0]


def at_speeds(speeds: dict[str, float], noise: float = 0.0, **changes: Any) -> Run:
    """Return a run whose strategies are so many times as fast as plain decoding, give or take."""
    cells = []
    for strategy in strategies(["vanilla", *speeds]):
        cell = invented_cell(strategy, 1, 300.0)
        for i, sample in enumerate(cell.samples):
            swing = 1 + noise * (-1) ** i if strategy.name != "vanilla" else 1
            seconds = 1.0 / speeds.get(strategy.name, 1.0) * swing
            cell.samples[i] = sample.model_copy(
                update={"prefill": 0.0, "decode": seconds, "total": seconds, "wall": seconds}
            )
        cells.append(cell)
    quality = [invented_price(c.strategy) for c in cells if c.relaxed]
    return invented_run(cells=cells, quality=quality, contact_sheet=[], **changes)


# --- what helps ----------------------------------------------------------------------------------


PLAIN = "plain decoding (exact): no drafts were faster"


@pytest.mark.parametrize(
    ("speeds", "noise", "helps", "best", "fragments"),
    [
        ({"eagle": 1.5, "eagle2": 1.2}, 0.0, "yes", "eagle", ("Yes", "1.50x", "exact")),
        ({"eagle": 1.2, "lantern++": 1.6}, 0.0, "yes", "eagle", ("1.20x", "exact")),
        ({"eagle": 0.8, "lantern++": 1.6}, 0.0, "only relaxed", "lantern++", ("1.60x", "TV 0.080")),
        # Noise neither shows nor denies a speed-up.
        ({"eagle": 1.0}, 0.4, "not shown", "eagle", ("1.00x (", "not shown to be faster")),
        ({"eagle": 0.7, "eagle2": 1.0}, 0.0, "no", "eagle2", ("1.00x", "the same speed")),
        ({}, 0.0, "unknown", None, ("no drafts were compared",)),
    ],
)  # fmt: skip
def test_the_answer_is_the_fastest_exact_strategy_or_says_why_not(
    speeds: dict[str, float], noise: float, helps: str, best: str | None, fragments: tuple[str, ...]
) -> None:
    run = at_speeds(speeds, noise)
    (answer,) = compare([run], profiles=[]).models[0].answers
    assert (answer.helps, answer.best) == (helps, best)
    device = device_of(run)
    assert all(one in device.short for one in fragments)
    drafts = best if helps in ("yes", "only relaxed") else "plain decoding"
    assert device.lines[0].startswith(f"With {drafts}, seconds per image: ")
    assert "memory: 324 MiB; J per image: not measured" in device.lines[0]


def test_plain_decoding_that_auto_chose_is_not_the_nearest_draft() -> None:
    run = at_speeds({"eagle2": 1.04, "eagle": 0.7})
    chosen = next(cell for cell in run.cells if cell.strategy.name == "eagle2")
    chosen.stands_for = PLAIN
    assert "eagle: 0.70x" in device_of(run).short
    best = equal_quality([run], compare([run], profiles=[]).models[0].rows)
    assert {(one.strategy, one.verdict) for one in best} == {("vanilla", "same")}


def test_plain_decoding_is_not_judged_against_itself() -> None:
    """Cells of the same work are one point, with the samples of both and no verdict."""
    run = at_speeds({"eagle2": 0.9})
    plain, chosen = run.cells
    chosen.stands_for = PLAIN
    change_samples(run.cells, steps=plain.samples[0].tokens - plain.samples[0].images)
    section = compare([run], profiles=[]).models[0]
    assert [reason(row.verdict) for row in section.rows][1] == SAME_ALGORITHM
    (point,) = section.points
    assert (point.strategy, point.requests) == ("vanilla", 2 * len(plain.samples))
    chosen.samples[0] = chosen.samples[0].model_copy(update={"steps": 9})
    assert len(compare([run], profiles=[]).models[0].points) == 2


def test_another_run_of_the_first_device_gets_no_verdict() -> None:
    found = []
    for number, commit in enumerate(("0" * 40, "0" * 40, "1" * 40)):
        found.append(at_speeds({"eagle": 1.5}))
        found[-1].name = f"abacus-20261128-18{number:02}-0123abcd"
        where = found[-1].environment.model_copy(update={"commit": commit})
        found[-1].environment = where
    first, again, other = compare(found, profiles=[]).models[0].offers
    assert first.measured == "quick run, 8 requests"
    assert reason(again.verdict) == "another run of the first device" and other.verdict == "same"
    text = headline(compare(found[:2], profiles=[]).models[0], Terms())
    assert "makes" in text and "choose" not in text and "another run" not in text


def test_the_screen_is_about_the_smallest_common_batch() -> None:
    one, other = invented_run("a", batches=(1, 4)), invented_run("b", batches=(4, 8))
    rows = compare([one, other], profiles=[]).models[0].rows
    assert first_setting(rows) == (4, 1.0)
    assert first_setting([]) is None
    assert {row.batch for row in device_of(one, other).rows} == {4}


def test_energy_and_missing_times_are_told_as_they_are() -> None:
    run = at_speeds({"eagle": 2.0})
    change_samples(run.cells, energy_mj=9000.0)
    change_samples(run.cells[1:], energy_mj=3000.0)
    assert "J per image: 3.00" in device_of(run).lines[0]
    change_samples(run.cells, total="not measured: no pixels")
    assert "seconds per image: not measured;" in device_of(run).lines[0]


# --- names --------------------------------------------------------------------------------------


def named(name: str, **changes: Any) -> Run:
    run = invented_run(name, device="Intel(R) Xeon(R) Processor @ 2.50GHz")
    run.environment = run.environment.model_copy(update={"threads": 2} | changes)
    return run


def test_a_device_s_name_has_no_marks_and_no_runtime() -> None:
    names = ("Intel(R) Xeon(R) Processor @ 2.50GHz", "Slate 9", "TPU v9 through XLA")
    assert [short_device(one) for one in names] == ["Intel Xeon @ 2.50GHz", "Slate 9", "TPU v9"]


def test_runs_that_nobody_named_are_called_after_their_device() -> None:
    first = named("cpu-20261123-0800-89fa3cbb")
    assert readable_names([named("mine"), first])[0].name == "mine"
    one = named("cpu-20261123-0900-89fa3cbc", threads=1)
    rounded = named("cpu-20261123-0900-89fa3cbe")
    rounded.settings = rounded.settings.model_copy(update={"rounding": ROUNDED})
    xla = named("xla-20261123-0800-89fa3cbb")
    facts = xla.environment.device
    other = {"backend": "xla", "name": f"{facts.name} through XLA"}
    xla.environment.device = facts.model_copy(update=other)
    later = named("cpu-20261123-0901-89fa3cbd")
    tiles = named("cpu-20261123-0900-89fa3cbf")
    facts = tiles.environment.device
    noted = facts.model_copy(update={"notes": ("units: AVX512", "kernels: AMX")})
    tiles.environment.device = noted
    twins = [named(f"cpu-20261123-0800-{i:08x}") for i in range(3)]
    for runs, tails in (
        ([first], [""]),
        ([first, one], [", threads 2", ", threads 1"]),
        ([first, rounded], [", full weights", ", int8 weights"]),
        ([first, later], ["", " (2)"]),
        (twins, ["", " (2)", " (3)"]),
        ([first, tiles], [", unnamed kernels", ", AMX kernels"]),
        ([first, xla], [", through abacus", ", through xla"]),
    ):
        found = [run.name for run in readable_names(runs)]
        assert found == [f"Intel Xeon @ 2.50GHz{tail}" for tail in tails]


def test_every_batch_size_has_its_answer() -> None:
    """What helps alone need not pay in the batches that the first screen offers."""
    run, large = at_speeds({"eagle": 1.5}), at_speeds({"eagle": 0.7})
    run.cells += [cell.model_copy(update={"batch": 4}) for cell in large.cells]
    device = device_of(run)
    assert device.short.startswith("Yes at batch 1") and "1.50x" in device.short
    (second,) = device.lines[1:]
    assert second.startswith("No at batch 4") and "0.70x" in second


def test_equal_quality_is_the_fastest_within_each_budget() -> None:
    run = at_speeds({"eagle": 1.2, "lantern": 1.5, "lantern++": 1.8})
    for quality_loss, moved in zip(run.quality, (0.015, 0.03), strict=True):
        quality_loss.total_variation_per_token = quality_loss.total_variation_per_token.model_copy(
            update={"value": moved, "low": moved, "high": moved}
        )
    found = equal_quality([run], compare([run], profiles=[]).models[0].rows, 0.05)
    assert [(one.budget, one.strategy) for one in found] == [
        (0.0, "eagle"), (0.01, "eagle"), (0.02, "lantern"), (0.05, "lantern++")
    ]  # fmt: skip
    change_samples(run.cells, others_cpu=0.6)
    busy = equal_quality([run], compare([run], profiles=[]).models[0].rows)
    assert all("the machine was busy" in str(one.speedup) for one in busy)


def test_a_report_keeps_the_name_that_the_file_has() -> None:
    found = compare([named("cpu-20261123-0800-89fa3cbb")], profiles=[])
    assert [(r.name, r.recorded_as) for r in found.runs] == [
        ("Intel Xeon @ 2.50GHz", "cpu-20261123-0800-89fa3cbb")
    ]
    assert {row.run for row in found.models[0].rows} == {"Intel Xeon @ 2.50GHz"}
    assert Comparison.model_validate_json(found.model_dump_json()) == found
