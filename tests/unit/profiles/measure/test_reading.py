"""Files are taken back whole or refused with the reason; what differs is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.runs import change_samples, invented_cell, invented_run, strategies

from lantern_accel.device.conformance import Report
from lantern_accel.errors import RequestError
from lantern_accel.strategy.rules import Lantern
from lantern_accel.strategy.values import Sampling
from lantern_accel_profiles.measure.reading import (
    check_comparable,
    clock_fault,
    read_file,
    read_run,
)
from lantern_accel_profiles.measure.record import PromptSet, Run


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    path.write_text(invented_run().model_dump_json())
    return path


def test_a_run_comes_back_as_it_was(stored: Path) -> None:
    assert read_run(stored) == invented_run()


#: What a file holds in place of a run, and a fragment of its refusal.
FOREIGN: dict[str | bytes, str] = {
    '{"a": 1}': "its kind is not",
    "[1, 2]": "not a run of `lantern-accel profile`",
    "": "not whole JSON",
    '{"cells": [': "not whole JSON: see line 1",
    '{"kind": "lantern_accel.run", "schema_version": 3}': "reads 2; upgrade",
    '{"kind": "lantern_accel.run"}': "schema version None",
    '{"kind": "lantern_accel.run", "schema_version": 0}': "measure it again",
    '{"kind": "lantern_accel.run", "schema_version": true}': "schema version True",
    '{"kind": "lantern_accel.run", "schema_version": 2}': "name is missing; leave it out",
    '{"kind": "lantern_accel.comparison"}': "name the runs",
    "[" * 100_000: "nested too deep",
    b"\xff\xfe\x00": "is not text",
}


@pytest.mark.parametrize("content", FOREIGN, ids=range(len(FOREIGN)))
def test_a_foreign_file_is_refused_with_the_reason(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RequestError) as caught:
        read_run(path)
    assert FOREIGN[content] in str(caught.value)


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        ({"schema_version": 1}, "schema version 1 of commit abcdef0, .* reads 2; measure"),
        ({"schema_version": 3}, "schema version 3 of commit abcdef0, .*; upgrade"),
        ({"sessions": None, "older": 1}, "schema version 2 of commit abcdef0, .* another form"),
    ],
)
def test_a_run_in_another_form_is_refused_by_schema_and_commit(
    stored: Path, change: dict[str, Any], fragment: str
) -> None:
    data = json.loads(stored.read_text()) | change
    data["environment"]["commit"] = "abcdef0123" * 4
    stored.write_text(json.dumps(data))
    with pytest.raises(RequestError, match=fragment) as refused:
        read_run(stored)
    assert "check out abcdef0" in str(refused.value)
    assert not {"sessions", "older"} & set(str(refused.value).split())


def test_a_wrong_value_is_refused_by_its_field(stored: Path) -> None:
    data = json.loads(stored.read_text())
    data["environment"] |= {"commit": "abcdef0123" * 4, "threads": "many"}
    stored.write_text(json.dumps(data))
    with pytest.raises(RequestError, match=r"environment\.threads"):
        read_run(stored)


#: Where a run is changed, to what, and fragments of the refusal.
CHANGES: list[tuple[str, Any, tuple[str, ...]]] = [
    ("name", "a\n# b", ("has a control character; take it out",)),
    ("cells.0.secret", 1, ("another form", "check out")),
    *((f"cells.0.samples.0.{field}", value, (f"cells.0.samples.0.{field}", "or more"))
      for field, value in (("decode", 0), ("images", 0), ("steps", 0), ("total", 0), ("wall", -1))),
    # Samples that contradict their cell: plain decoding takes 255 steps for 256 tokens.
    *((f"vanilla.samples.3.{field}", value, ("vanilla, batch 1", f"{value} {field}", "256 tokens"))
      for field, value in (("images", 2), ("tokens", 255), ("steps", 254), ("steps", 256))),
    *((f"eagle.samples.3.{field}", value, ("eagle, batch 1", f"{value} {field}", "256 tokens"))
      for field, value in (("steps", 256), ("tokens", 512))),
    *((f"sessions.0.{field}", text, (f"sessions.0.{field}: ", "is not a date and time"))
      for field in ("started", "ended")
      for text in ("yesterday", "2026-01-01", "2026-13-01T00:00:00", "<b>", "T")),
]  # fmt: skip


@pytest.mark.parametrize(("where", "value", "says"), CHANGES, ids=range(len(CHANGES)))
def test_a_changed_run_is_refused_by_its_field(
    stored: Path, where: str, value: Any, says: tuple[str, ...]
) -> None:
    data = json.loads(stored.read_text())
    *path, last = where.split(".")
    place = data
    if path and path[0] in ("vanilla", "eagle"):
        name = path.pop(0)
        (place,) = [one for one in data["cells"] if one["strategy"]["name"] == name]
    for step in path:
        place = place[int(step) if step.isdigit() else step]
    place[last] = value
    stored.write_text(json.dumps(data))
    with pytest.raises(RequestError) as caught:
        read_run(stored)
    assert all(part in str(caught.value) for part in says), str(caught.value)


@pytest.mark.parametrize("text", ["2026-01-01T00:00:00+00:00", "2026-01-01T00:00:00Z"])
def test_a_moment_is_a_date_and_a_time(stored: Path, text: str) -> None:
    data = json.loads(stored.read_text())
    data["sessions"][0]["started"] = text
    stored.write_text(json.dumps(data))
    assert read_run(stored).sessions[0].started == text


@pytest.mark.parametrize("value", [1e-320, 1e300])
@pytest.mark.parametrize("field", ["decode", "total", "wall"])
def test_seconds_that_no_request_takes_are_refused_by_name(
    stored: Path, field: str, value: float
) -> None:
    data = json.loads(stored.read_text())
    for sample in data["cells"][0]["samples"]:  # as a whole they agree
        sample |= dict.fromkeys(("prefill", "text", "pixels"), 0.0)
        sample |= {"decode": 1.0, "total": 1.0, "wall": 1.0, field: value}
    stored.write_text(json.dumps(data))
    with pytest.raises(RequestError, match=rf"cells\.0\.samples\.0\.{field}.* must be .*not"):
        read_run(stored)


# --- the planted stopwatch ----------------------------------------------------------------------


def _with_clock(factor: float) -> Run:
    cell = invented_cell(strategies()[0], 1, 300.0)
    cell.samples = [
        s.model_copy(
            update={
                "total": float(s.total) * factor,
                "prefill": s.prefill * factor,
                "decode": s.decode * factor,
            }
        )
        for s in cell.samples
    ]
    return invented_run(cells=[cell], names=["vanilla"])


@pytest.mark.parametrize("factor", [0.05, 0.5, 1.5])
def test_a_file_whose_stopwatch_did_not_wait_is_refused(tmp_path: Path, factor: float) -> None:
    path = tmp_path / "run.json"
    path.write_text(_with_clock(factor).model_dump_json())
    with pytest.raises(RequestError, match="it does not wait for the device"):
        read_run(path)


def test_parts_longer_than_the_whole_are_refused() -> None:
    cell = invented_cell(strategies()[0], 1, 300.0)
    change_samples([cell], decode=3 * cell.samples[0].decode)
    assert "the parts exceed the whole" in clock_fault(cell)
    assert clock_fault(_with_clock(1.0).cells[0]) == ""


def test_a_conformance_report_is_read_and_is_no_run(tmp_path: Path) -> None:
    path = tmp_path / "conform.json"
    report = Report(
        backend="abacus", backend_version="1", device="a", device_name="A", torch="2", outcomes=[]
    )
    path.write_text(report.model_dump_json())
    assert read_file(path) == report
    with pytest.raises(RequestError, match="is a conformance report, not a run"):
        read_run(path)


# --- what may be compared -----------------------------------------------------------------------

OTHERS = PromptSet(source="x", count=1, sha256="e" * 64, used=["a"])


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"settings": {"weights_hash": "f" * 16}}, "model hash is 'ffffffffffffffff'"),
        ({"settings": {"tokens": 1024}}, "tokens per image is 1024"),
        ({"settings": {"sampling": Sampling(cfg_scale=3.0)}}, "sampling cfg_scale is 3.0"),
        ({"settings": {"sampling": Sampling(cfg_scale=2.0, top_k=100)}}, "sampling top_k is 100"),
        ({"settings": {"prompts": OTHERS}}, "prompts is 'eeeeeeeeeeee'"),
        ({"protocol_version": 3}, "protocol version is 3 in one and 2"),
    ],
)
def test_runs_that_differ_are_refused_with_the_property(
    changes: dict[str, Any], fragment: str
) -> None:
    runs = [invented_run("one"), invented_run("two", **changes)]
    with pytest.raises(RequestError, match=fragment):
        check_comparable(runs, ["one.json", "two.json"])


def test_other_rules_are_refused() -> None:
    one = invented_run("one")
    other = one.model_copy(deep=True, update={"name": "two"})
    for cell in other.cells:
        if cell.strategy.name == "lantern":
            cell.strategy = cell.strategy.model_copy(update={"acceptance": Lantern(delta=0.4)})
    with pytest.raises(RequestError, match=r"acceptance of lantern is .*0\.4"):
        check_comparable([one, other], ["a", "b"])


@pytest.mark.parametrize(
    "settings",
    [
        {"sampling": Sampling(cfg_scale=2.0, temperature=0.7)},  # cells name theirs
        {"model": "large", "weights_hash": "f" * 16},  # a section of its own
    ],
)
def test_runs_that_may_stand_in_one_report(settings: dict[str, Any]) -> None:
    check_comparable([invented_run("one"), invented_run("two", settings=settings)], ["a", "b"])


def test_two_runs_of_one_name_are_refused_with_a_way_out() -> None:
    with pytest.raises(RequestError, match=r"a\.json and b\.json.*NAME=b"):
        check_comparable([invented_run("one"), invented_run("one")], ["a.json", "b.json"])
