"""What a suite's table says next to its figures, and which points its plot marks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lantern_accel.strategy.values import Strategy
from lantern_accel_profiles.evaluation import tables
from lantern_accel_profiles.evaluation.schema import Metric, Scored, Speed, Suite
from lantern_accel_profiles.evaluation.suite.protocol import PROTOCOLS
from lantern_accel_profiles.quality.interval import Interval

FID = Metric(key="fid", title="FID", better="lower", network="tiny")


def figure(value: float) -> Interval:
    return Interval(value=value, low=value - 0.1, high=value + 0.1, n=9)


def scored(label: str, seconds: float, fid: float | None) -> Scored:
    lacks = "not measured: no such network"
    speed = Speed(
        seconds_per_image=figure(seconds),
        speedup="not measured: vanilla is not among the strategies",
        tokens_per_step=figure(2.0),
        total_variation_per_token=figure(0.5),
    )
    metrics: dict[str, Interval | str] = {"fid": lacks if fid is None else figure(fid)}
    strategy = Strategy(name=label)
    return Scored(label=label, strategy=strategy, images=9, speed=speed, metrics=metrics)


@pytest.fixture
def suite() -> Suite:
    return Suite(
        name="coco",
        protocol=PROTOCOLS["lantern"],
        count=9,
        seed=0,
        sampling={},
        chunk=2,
        batch=1,
        prompts_source="captions.json",
        prompts_sha256="",
        resamples=2,
        prompts_cut=4,
        reference={"images": 9, "left_out": {"twice": "1 (a.png)"}, "network": "tiny"},
        columns=[FID],
        rows=[scored("good", 2.0, 10.0), scored("fast", 1.0, 12.0), scored("bad", 2.0, 12.0)],
    )


def test_a_table_says_what_was_left_out_and_not_measured(suite: Suite) -> None:
    suite.rows.append(scored("unseen", 1.0, None))
    table, how = tables.tables(suite)
    assert table.heads[1:] == [
        "s per image",
        "speed-up",
        "tokens per step",
        "TV per token",
        "FID ↓",
    ]
    row = ["good", "2.000 [1.900, 2.100]", "—", "2.00 [1.90, 2.10]", "0.5000 [0.4000, 0.6000]"]
    assert table.rows[0] == [*row, "10.00 [9.90, 10.10]"]
    assert table.rows[3][-1] == "—"
    assert how.rows == [["FID", "tiny", "—", "—"]]
    notes = "\n".join(table.notes)
    for text in (
        "4 prompts are longer",
        "Real images: 9.",
        "Left out: twice: 1 (a.png).",
        "Not measured: speed-up (vanilla is not among the strategies).",
        "Not measured: FID (no such network).",
    ):
        assert text in notes
    assert "tiny" not in notes


@pytest.mark.parametrize(("better", "beaten"), [("lower", ["bad"]), ("higher", ["good", "bad"])])
def test_a_point_that_another_one_beats_is_marked(
    suite: Suite, better: str, beaten: list[str]
) -> None:
    said: list[str] = []
    axis = SimpleNamespace(
        annotate=lambda text, *_, **__: said.append(text),
        **dict.fromkeys(
            ("errorbar", "invert_yaxis", "set_xlabel", "set_title", "grid", "margins"),
            lambda *_, **__: None,
        ),
    )
    metric = FID.model_copy(update={"better": better})
    tables._panel(axis, metric, tables.points(suite, metric))
    assert [one.removesuffix(" (dominated)") for one in said if "dominated" in one] == beaten
