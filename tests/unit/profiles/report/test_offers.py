"""A buyer's comparison: which device to choose on stated terms, and what its images cost."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.runs import change_samples, invented_cell, invented_run, strategies

from lantern_accel.errors import RequestError
from lantern_accel_profiles.commands.compare import NARROW, read_terms
from lantern_accel_profiles.measure.record import Run
from lantern_accel_profiles.report import render
from lantern_accel_profiles.report.advice import ReportTable, headline, notes, offers_table
from lantern_accel_profiles.report.comparison import compare
from lantern_accel_profiles.report.offers import Offer
from lantern_accel_profiles.report.points import Terms
from lantern_accel_profiles.report.record import Comparison


def timed(
    name: str, seconds: list[float], batch: int = 1, energy: float | None = None, **more: Any
) -> Run:
    """Return a run of plain decoding whose requests took these seconds and millijoules."""
    cell = invented_cell(strategies(["vanilla"])[0], batch, 300.0, samples=len(seconds))
    cell.samples = [
        s.model_copy(
            update={"total": t, "wall": t, "prefill": 0.0, "decode": t, "energy_mj": energy}
        )
        for s, t in zip(cell.samples, seconds, strict=True)
    ]
    return invented_run(name, cells=[cell], quality=[], contact_sheet=[], **more)


def offers_of(*runs: Run, **terms: object) -> list[Offer]:
    return compare(runs, profiles=[], terms=Terms.model_validate(terms)).models[0].offers


def offered(run: Run, **terms: object) -> Offer:
    (found,) = offers_of(run, **terms)
    assert found.point is not None and not found.reason
    return found


def said(*runs: Run, **terms: object) -> str:
    asked = Terms.model_validate(terms)
    return headline(compare(runs, profiles=[], terms=asked).models[0], asked)


def table_of(*runs: Run, **terms: object) -> ReportTable:
    asked = Terms.model_validate(terms)
    return offers_table(compare(runs, profiles=[], terms=asked).models[0], asked)


def column(table: ReportTable, name: str) -> list[str]:
    return [row[table.head.index(name)] for row in table.rows]


# --- the best of a device -----------------------------------------------------------------------


def test_a_batch_counts_all_its_images() -> None:
    found = offered(timed("gpu", [0.5] * 8, batch=4)).point
    assert found is not None and found.images_per_second.value == pytest.approx(8.0)
    assert (found.seconds, found.batch) == (0.5, 4)
    many = offered(invented_run("a", names=["vanilla", "eagle"], batches=(1, 4))).point
    assert many is not None and (many.strategy, many.batch) == ("eagle", 4)


def test_a_run_of_one_request_has_a_report() -> None:
    run = timed("gpu", [2.0], batch=4)
    known = run.environment.device.model_copy(update={"cores": 2, "memory_bytes": 24 * 2**30})
    run.environment.device = known
    found = offered(run)
    assert found.point is not None and found.point.seconds == 2.0
    assert found.hardware == "2 cores, 24 GiB"
    for page in (render.page, render.to_markdown):
        assert not re.search(r"\bnan\b", page(compare([run], profiles=[])))


def test_a_bound_is_kept_by_95_of_100_requests() -> None:
    kept = offered(timed("gpu", [1.0] * 38 + [3.0] * 2), latency_s=2.0).point
    assert kept is not None and kept.in_time == 0.95
    (late,) = offers_of(timed("gpu", [1.0] * 36 + [3.0] * 4), latency_s=2.0)
    assert late.point is None and "90 %" in late.reason
    assert said(timed("gpu", [1.0] * 8), latency_s=0.5).startswith("No device is recommended")
    both = timed("gpu", [1.0] * 36 + [3.0] * 4)
    both.cells += timed("gpu", [3.0] * 40, batch=4).cells
    (late,) = offers_of(both, latency_s=2.0)
    assert "at most 90 %" in late.reason
    (row,) = table_of(timed("gpu", [1.0] * 39 + [3.0]), latency_s=2.0).rows
    assert "; 98 % in time" in row[3]


def test_a_short_bound_makes_a_smaller_batch_the_better_offer() -> None:
    small, large = timed("gpu", [1.0] * 8), timed("gpu", [2.5] * 8, batch=4)
    small.cells += large.cells
    for bound, batch in ((None, 4), (2.0, 1)):
        point = offered(small, latency_s=bound).point
        assert point is not None and point.batch == batch


def test_quality_is_what_the_buyer_says() -> None:
    run = invented_run()
    for budget, name, fidelity in (
        (0.0, "eagle", "exact"),
        (0.07, "eagle", "exact"),
        (0.1, "lantern++", "TV 0.080 per token"),
    ):
        point = offered(run, tv_budget=budget).point
        assert point is not None and (point.strategy, point.fidelity) == (name, fidelity)
    bare = invented_run(names=["lantern++"], state="interrupted", quality=[])
    (none,) = offers_of(bare, tv_budget=1.0)
    assert "TV within the bound" in none.reason


def test_auto_says_what_it_stood_for() -> None:
    run = invented_run(names=["vanilla"])
    only = run.cells[0]
    only.strategy = only.strategy.model_copy(update={"name": "auto"})
    only.stands_for = "windows of up to 8 tokens, mostly 4 (exact); predicted 1.4x, not measured"
    (words,) = column(table_of(run), "Strategy")
    assert "windows of up to 8 tokens, mostly 4" in words
    assert "predicted" not in compare([run], profiles=[]).models[0].rows[0].detail


# --- which device -------------------------------------------------------------------------------


def test_the_fastest_device_is_named_with_its_lead_over_the_next() -> None:
    slow, fast = timed("slow", [1.0] * 8), timed("fast", [0.5] * 8, batch=2)
    words = said(slow, fast, latency_s=2.0)
    assert words.startswith("Within 2 s") and "choose fast: 4.00 images/s, 4.00x" in words
    assert "slow makes 1.00" in said(slow) and "2 s" not in said(slow)
    assert column(table_of(slow, fast), "Slower than #1 by") == ["first", "4.00x"]


@pytest.mark.parametrize(
    ("first", "second", "fragment"),
    [
        ([1.0] * 8, [1.01] * 8, "a and b (1.01x"),
        ([0.5, 1.0, 1.5, 2.0, 1.1, 0.7], [0.5, 1.0, 1.5, 2.0, 1.1, 0.7], "not shown to be"),
        ([1.0] * 3, [3.0] * 3, "no verdict: too few samples"),
    ],
)
def test_devices_that_noise_does_not_tell_apart_are_not_ranked(
    first: list[float], second: list[float], fragment: str
) -> None:
    words = said(timed("a", first), timed("b", second))
    assert fragment in words and " times " not in words


def test_what_else_differs_between_runs_is_said() -> None:
    a, b = timed("a", [1.0] * 8), timed("b", [2.0] * 8)
    a.environment = a.environment.model_copy(update={"threads": 1, "commit": "a" * 40})
    b.environment = b.environment.model_copy(update={"threads": 2})
    section = compare([a, b], profiles=[]).models[0]
    assert section.differences == {"threads": ["1", "2"], "commit": ["aaaaaaa", "0000000"]}
    assert "threads (1 and 2) and commit" in " ".join(notes(section, Terms()))


def test_a_busy_run_is_not_judged_and_has_no_lead() -> None:
    quiet, busy = timed("quiet", [1.0] * 8), timed("busy", [0.1] * 8)
    change_samples(busy.cells, others_cpu=0.6)
    found = compare([busy, quiet], profiles=[])
    words = headline(found.models[0], found.terms)
    assert words.startswith("quiet makes") and " times " not in words
    assert said(busy).startswith("No device is recommended")
    text = render.answer(found)
    assert "busy: other programs used 60 %" in text
    assert "choose" not in text and " times " not in text


# --- cost ---------------------------------------------------------------------------------------


def test_a_rent_becomes_the_cost_of_a_thousand_images() -> None:
    found = offered(timed("gpu", [0.5] * 8), rent={"gpu": 3.6}, power=9.0).cost
    assert found is not None and found.of_1000.value == pytest.approx(0.5)
    assert (found.covers, found.without) == ("rent", "")  # power is in a rent
    bare = timed("gpu", [0.5] * 8)
    assert offered(bare).cost is None
    assert column(table_of(bare), "Device time of 1,000 images") == ["8.33 minutes"]


def test_a_purchase_is_spread_over_its_years_and_power_comes_from_joules() -> None:
    run = timed("gpu", [0.5] * 8, energy=36_000.0)
    terms = {"buy": {"gpu": 8760 * 3.6}, "years": 1, "power": 0.5, "overhead": 2.0}
    bought = offered(run, **terms)
    assert bought.cost is not None
    # 1,000 images: 0.5 of purchase, and 0.01 kWh, doubled by the site, of 0.5 each.
    assert bought.cost.of_1000.value == pytest.approx(0.5 + 0.01 * 2 * 0.5)
    assert (bought.cost.covers, bought.cost.without) == ("purchase and power", "")
    assert column(table_of(run, **terms), "Images per kWh") == ["100,000"]


def test_without_a_meter_power_is_left_out_by_name() -> None:
    terms = {"buy": {"a": 900.0}, "power": 0.3, "currency": "EUR"}
    bare = timed("a", [0.5] * 8)
    found = offered(bare, **terms)
    assert found.cost is not None and found.cost.without == "power: no meter was read"
    asked = Terms.model_validate(terms)
    section = compare([bare], profiles=[], terms=asked).models[0]
    table = offers_table(section, asked)
    assert "Images per kWh" not in table.head
    assert "without power: no meter was read" in column(table, "Cost of 1,000 images")[0]
    assert "no meter" in column(table, "Not measured")[0]
    assert offered(bare, power=0.3).cost is None


def test_costs_are_ranked_only_where_they_have_the_same_parts() -> None:
    slow, fast = timed("slow", [1.0] * 8, energy=9e3), timed("fast", [0.5] * 8)
    dear = {"slow": 100.0, "fast": 1000.0}
    assert [one.run for one in offers_of(slow, fast)] == ["fast", "slow"]
    cheap = offers_of(slow, fast, buy=dear)
    assert [one.run for one in cheap] == ["slow", "fast"]
    assert ", 5.00x cheaper than fast." in said(slow, fast, buy=dear)
    # The power of one alone is known: costs are not compared.
    assert [one.run for one in offers_of(slow, fast, buy=dear, power=0.3)] == ["fast", "slow"]
    assert [one.run for one in offers_of(slow, fast, rent={"slow": 0.1})] == ["fast", "slow"]
    assert "no cost given" in str(table_of(slow, fast, rent={"slow": 0.1}).rows)
    # A device that nobody gave an amount for is not the cheapest because its power alone is known.
    terms = {"rent": {"fast": 3.6}, "power": 0.3, "currency": "EUR"}
    assert [one.run for one in offers_of(slow, fast, **terms)] == ["fast", "slow"]
    assert "on slow" not in said(fast, slow, **terms)
    assert "EUR of power, without the device" in str(table_of(slow, fast, **terms).rows)


def test_a_narrow_terminal_keeps_columns_that_tables_have() -> None:
    runs = timed("slow", [1.0] * 8), timed("fast", [0.5] * 8)
    text = render.to_markdown(compare(runs, profiles=[]))
    heads = {*table_of(*runs, rent={"fast": 1.0}).head}
    heads |= {cell.strip() for line in text.splitlines() for cell in line.split("|")}
    assert set(NARROW) <= heads
    assert {"Device time of 1,000 images", "Slower than #1 by"} <= set(NARROW)


def test_the_report_states_the_terms_and_the_currency() -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    runs = [timed("slow", [1.0] * 8), timed("fast", [0.5] * 8)]
    terms = Terms(latency_s=0.8, tv_budget=0.02, rent={"fast": 3.6}, currency="EUR")
    found = compare(runs, profiles=[], terms=terms)
    words = (
        "TV of at most 0.02",
        "requests within 0.8 s",
        "1,000 for 0.500 EUR of rent",
        "at most 0 %",
    )
    for text in (render.to_markdown(found), render.page(found)):
        assert all(one in text for one in words)
    assert Comparison.model_validate_json(found.model_dump_json()).terms == terms
    bare = render.to_markdown(compare(runs, profiles=[]))
    assert "Cost of 1,000 images" not in bare and "no cost of a device given" in bare


# --- amounts from the command line --------------------------------------------------------------


def amounts(*words: str) -> tuple[dict[str, float], str]:
    runs = [invented_run("cpu-20261123-0800-89fa3cbb"), invented_run("gpu")]
    terms = read_terms(runs, [{runs[0].name, "cpu"}, {"gpu", "other"}], words, [], None)
    return terms.rent, terms.currency


def test_an_amount_is_of_a_run_or_of_all() -> None:
    assert amounts("cpu=0.2EUR", "gpu=2.10 EUR") == (
        {"cpu-20261123-0800-89fa3cbb": 0.2, "gpu": 2.1},
        "EUR",
    )
    assert amounts("other=3$", "2$") == ({"cpu-20261123-0800-89fa3cbb": 2.0, "gpu": 3.0}, "$")


@pytest.mark.parametrize(
    "word",
    [
        "gpu=cheap",
        "gpu=-1EUR",
        "gpu=0",
        "gpu=",
        "=3",
        "gpu=1e3",
        "gpu=nan",
        "gpu=900",
        f"gpu={10**10}EUR",
    ],
)
def test_what_is_no_amount_is_refused(word: str) -> None:
    with pytest.raises(RequestError, match="not an amount"):
        amounts(word)


def test_names_and_currencies_are_checked() -> None:
    with pytest.raises(RequestError, match="names 0 runs; did you mean gpu"):
        amounts("gpy=1EUR")
    with pytest.raises(RequestError, match="in EUR and USD"):
        read_terms([], [], ["1EUR"], ["2USD"], None)
    assert read_terms([], [], [], [], "0.30€").power == 0.3
    with pytest.raises(RequestError, match=r"--power '0,30EUR' is not an amount"):
        read_terms([], [], [], [], "0,30EUR")
