"""A buyer's comparison: images per second, per joule and per currency unit on stated terms."""

from __future__ import annotations

import pytest
from support.runs import invented_cell, invented_run, strategies

from lantern_accel.errors import RequestError
from lantern_accel.measure.record import Run
from lantern_accel.report import render
from lantern_accel.report.comparison import compare
from lantern_accel.report.offers import Offer, Terms, read_prices
from lantern_accel.report.record import Comparison


def timed(name: str, seconds: list[float], batch: int = 1, energy: float | None = None) -> Run:
    """Return a run of plain decoding whose requests took so many seconds."""
    cell = invented_cell(strategies(["vanilla"])[0], batch, 300.0, samples=len(seconds))
    cell.samples = [
        s.model_copy(
            update={"total": t, "wall": t, "prefill": 0.0, "decode": t, "energy_mj": energy}
        )
        for s, t in zip(cell.samples, seconds, strict=True)
    ]
    return invented_run(name, cells=[cell], quality=[], contact_sheet=[])


def offer_of(run: Run, terms: Terms) -> Offer:
    (found,) = compare([run], profiles=[], terms=terms).models[0].offers
    return found


def offered(run: Run, **terms: object) -> Offer:
    found = offer_of(run, Terms.model_validate(terms))
    assert found.images_per_second is not None and not found.reason
    return found


def test_an_hour_s_price_becomes_the_cost_of_a_thousand_images() -> None:
    found = offered(timed("gpu", [0.5] * 8), prices={"gpu": 3.6})
    assert found.images_per_second.value == pytest.approx(2.0)
    assert found.cost_of_1000 is not None
    assert found.cost_of_1000.value == pytest.approx(0.5)
    assert offered(timed("gpu", [0.5] * 8)).cost_of_1000 is None


def test_a_batch_counts_all_its_images() -> None:
    assert offered(timed("gpu", [0.5] * 8, batch=4)).images_per_second.value == pytest.approx(8.0)
    many = invented_run("a", names=["vanilla", "eagle"], batches=(1, 4))
    assert (offered(many).strategy, offered(many).batch) == ("eagle", 4)


def test_requests_that_come_too_late_take_time_and_give_no_image() -> None:
    found = offered(timed("gpu", [1.0] * 6 + [3.0, 3.0]), latency_s=2.0)
    assert found.images_per_second.value == pytest.approx(6 / 12)
    assert found.in_time == 0.75
    late = offer_of(timed("gpu", [1.0] * 8), Terms(latency_s=0.5))
    assert late == Offer(run="gpu", reason="no request took 0.5 s or less")


def test_a_short_bound_makes_a_smaller_batch_the_better_offer() -> None:
    small, large = timed("gpu", [1.0] * 8), timed("gpu", [2.5] * 8, batch=4)
    small.cells += large.cells
    assert offered(small).batch == 4
    assert offered(small, latency_s=2.0).batch == 1


def test_quality_is_what_the_buyer_says() -> None:
    run = invented_run()
    assert offered(run).strategy == "eagle"
    assert offered(run).fidelity == "exact"
    bought = offered(run, tv_budget=0.1)
    assert (bought.strategy, bought.fidelity) == (
        "lantern++",
        "moves 8.0 % of a token's probability",
    )
    assert offered(run, tv_budget=0.07).strategy == "eagle"
    bare = invented_run(names=["lantern++"], state="interrupted", quality=[])
    assert offer_of(bare, Terms(tv_budget=1.0)) == Offer(
        run="abacus-1", reason="nothing that was measured is so exact"
    )


def test_a_meter_gives_images_per_joule() -> None:
    found = offered(timed("gpu", [0.5] * 8, energy=4000.0))
    assert found.images_per_joule == 0.25
    assert str(offered(timed("gpu", [0.5] * 8)).images_per_joule).startswith("not measured")


def test_tails_are_shown_where_enough_samples_lie_beyond_them() -> None:
    few, many = offered(timed("a", [0.5] * 8)), offered(timed("a", [0.5] * 100))
    assert list(few.latency) == ["p50", "p95", "p99"]
    assert str(few.latency["p95"]).startswith("not measured: 8 samples cannot show")
    assert not any(isinstance(one, str) for one in many.latency.values())


def test_the_cheapest_comes_first_and_without_all_prices_the_fastest() -> None:
    slow, fast = timed("slow", [1.0] * 8), timed("fast", [0.5] * 8)

    def order(**prices: float) -> list[str]:
        found = compare([slow, fast], profiles=[], terms=Terms(prices=prices)).models[0].offers
        return [one.run for one in found]

    assert order() == order(slow=1.0) == ["fast", "slow"]
    assert order(slow=1.0, fast=9.0) == ["slow", "fast"]


def test_the_report_states_the_terms_and_the_currency() -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    runs = [timed("slow", [1.0] * 8), timed("fast", [0.5] * 8)]
    terms = Terms(latency_s=0.8, tv_budget=0.02, prices={"fast": 3.6}, currency="EUR")
    found = compare(runs, profiles=[], terms=terms)
    for text in (render.to_markdown(found), render.page(found)):
        assert "strategies that move 2 % of a token&#39;s probability at most" in text.replace(
            "token's", "token&#39;s"
        )
        assert "requests of 0.8 s at most, prices per hour as given" in text
        assert "1,000 images cost 0.500 EUR with vanilla at batch 1." in text
        assert "no request took 0.8 s or less" in text
    assert Comparison.model_validate_json(found.model_dump_json()).terms == terms
    plain = render.to_markdown(compare(runs, profiles=[]))
    assert "1,000 images cost" not in plain
    assert "exact decoding, requests of any length, no price given" in plain


# --- prices from the command line ---------------------------------------------------------------


def prices(*words: str) -> tuple[dict[str, float], str]:
    runs = [invented_run("cpu-20261123-0800-89fa3cbb"), invented_run("gpu")]
    return read_prices(words, runs, [{runs[0].name, "cpu"}, {"gpu", "other"}])


def test_a_price_names_a_run_or_its_file() -> None:
    assert prices("cpu=0.2EUR", "gpu=2.10 EUR") == (
        {"cpu-20261123-0800-89fa3cbb": 0.2, "gpu": 2.1},
        "EUR",
    )
    assert prices("other=3") == ({"gpu": 3.0}, "")
    assert prices("gpu=4$") == ({"gpu": 4.0}, "$")
    assert prices() == ({}, "")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["gpu"], "'gpu' is not a price; write NAME=AMOUNT"),
        (["gpu="], "is not a price"),
        (["=3"], "is not a price"),
        (["gpu=0"], "is not a price"),
        (["gpu=-1"], "is not a price"),
        (["gpu=nan"], "is not a price"),
        (["gpu=1e3"], "is not a price"),
        (["gpu=" + "9" * 400], "is not a price"),
        (["gpo=3"], "names no run; did you mean gpu"),
        (["gpu=3EUR", "cpu=2USD"], "prices are in EUR and USD; write all of them in one currency"),
        (["gpu=3EUR", "cpu=2"], "prices are in EUR and no currency"),
    ],
)
def test_what_is_no_price_is_refused_in_one_sentence(words: list[str], says: str) -> None:
    with pytest.raises(RequestError) as refused:
        prices(*words)
    assert says in str(refused.value)
    assert len(str(refused.value)) < 300


def test_a_name_of_two_runs_is_refused() -> None:
    runs = [invented_run("a"), invented_run("b")]
    with pytest.raises(RequestError, match="names several runs"):
        read_prices(["run=2"], runs, [{"a", "run"}, {"b", "run"}])
