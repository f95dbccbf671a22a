"""The distance of cores is measured by a program that is compiled where it runs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))
import core_distance

from lantern_accel.errors import LanternError

#: Those that this process may use.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.mark.skipif(CORES < 2, reason="one core hands nothing on")
def test_a_line_takes_some_time_each_way(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if core_distance.compiler() is None:
        pytest.skip("there is no compiler")
    monkeypatch.setattr(core_distance, "SOURCE", core_distance.SOURCE.replace("100000", "1000"))
    assert core_distance.main(["--times", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["nanoseconds"]
    assert len(found) == 2
    assert all(one > 0 for one in found)


def test_without_a_compiler_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_distance, "compiler", lambda: None)
    with pytest.raises(LanternError, match="CXX"):
        core_distance.distances(1)
    with pytest.raises(SystemExit) as left:
        core_distance.main([])
    assert left.value.code not in (None, 0)
