"""The search for the largest load, and the figures of one level."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.runs import invented_load, invented_run

from lantern_accel.errors import RequestError
from lantern_accel_profiles.measure.reading import check_comparable, read_run
from lantern_accel_profiles.measure.record import LoadCell, Run

pytest.importorskip("httpx")
from lantern_accel_profiles.load.levels import largest, next_load
from lantern_accel_profiles.load.options import LEAST
from lantern_accel_profiles.load.service import seconds_of


def level(clients: int, seconds: list[float], **changes: object) -> LoadCell:
    """Return a level whose requests took these seconds."""
    return invented_load(clients, [(0.0, s / 2, s) for s in seconds], **changes)


@pytest.mark.parametrize("fits", [0, 1, 2, 3, 5, 8, 11, 13, 64, 100])
@pytest.mark.parametrize("most", [1, 7, 64])
def test_bisection_ends_at_the_largest_load_that_stays_within(fits: int, most: int) -> None:
    cells: list[LoadCell] = []
    while (clients := next_load(cells, 2.0, most)) is not None:
        assert clients not in [one.clients for one in cells]
        cells.append(level(clients, [1.0 if clients <= fits else 3.0] * LEAST))
    found = largest(cells, 2.0)
    assert (found.clients if found else 0) == min(fits, most)
    assert len(cells) <= 2 * math.ceil(math.log2(most)) + 2


def test_a_load_that_passes_by_chance_above_one_that_failed_does_not_count() -> None:
    cells = [level(n, [s] * LEAST) for n, s in ((2, 1.0), (4, 3.0), (8, 1.0))]
    found = largest(cells, 2.0)
    assert found is not None and found.clients == 2
    assert next_load(cells, 2.0, 64) == 3


def test_a_request_without_a_picture_is_later_than_any_bound() -> None:
    cell = level(2, [1.0] * LEAST)
    assert cell.latency(0.95) == 1.0
    cell.samples[0].outcome = "busy"
    assert cell.latency(0.95) == 1.0 and cell.latency(0.99) == math.inf
    cell.samples[1].outcome = "failed"
    assert cell.latency(0.95) == math.inf


def test_rates_count_what_came_between_the_first_and_the_last_that_count() -> None:
    cell = level(1, [1.0, 2.0, 3.0, 4.0], joules=60.0)
    cell.samples[3].counted = False  # it kept the service busy, and came in time
    assert cell.latencies == [1.0, 2.0, 3.0]
    assert cell.rate() == 1.0 and cell.rate(within=2.0) == 0.5
    assert cell.joules_per_image == 15.0
    assert level(1, [1.0]).joules_per_image == "not measured: no meter"
    assert cell.first_partials == [0.5, 1.0, 1.5]
    cell.samples[3].outcome = "failed"
    assert cell.rate() == 0.75


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")
def test_a_process_that_is_ours_too_is_not_the_others() -> None:
    words = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as work:
        assert work.stdout is not None
        work.stdout.readline()
        before = seconds_of(work.pid)
        until = time.monotonic() + 20
        while seconds_of(work.pid) <= before and time.monotonic() < until:
            time.sleep(0.01)
        assert seconds_of(work.pid) > before
        work.kill()
    assert seconds_of(work.pid) == 0.0


def test_a_level_whose_clocks_contradict_each_other_is_refused_by_name(tmp_path: Path) -> None:
    run = invented_run(cells=[], quality=[], loads=[level(3, [2.0] * LEAST)])
    samples = run.loads[0].samples
    for sample in samples:
        sample.stages = {"waiting": 0.5, "decode": 1.5}

    def read_again() -> Run:
        path = tmp_path / "load.json"
        path.write_text(run.model_dump_json())
        return read_run(path)

    assert read_again() == run
    samples[0].stages["decode"] = 60.0  # the machine was stopped for a moment
    assert read_again() == run
    samples[1].stages["decode"] = samples[2].stages["decode"] = 60.0
    with pytest.raises(RequestError, match="3 requests at once: 3 of 20 requests took"):
        read_again()
    samples[1].stages = samples[2].stages = {}
    samples[5].began = 7.0
    with pytest.raises(RequestError, match="its clock ran backwards"):
        read_again()


def test_a_load_may_be_compared_with_a_run() -> None:
    run = invented_run("b", cells=[], quality=[], loads=[level(1, [1.0] * LEAST)])
    check_comparable([invented_run(), run], ["run.json", "b.json"])
