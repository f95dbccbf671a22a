"""The figure of speed over size shows the committed races, and nothing else."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import pytest

from lantern_accel.device.datasheets import profiles_dir

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))
import size_figure


@pytest.mark.parametrize("threads", [1, 2])
def test_points_are_those_of_the_races(threads: int) -> None:
    folder = profiles_dir()
    found = list(size_figure.points(folder, threads))
    assert [p.label for p in found] == [
        f"{size}, {dtype}"
        for size in ("bundled model", "LlamaGen B")
        for dtype in ("float32", "bfloat16")
    ]
    assert found[2].nbytes == 2 * found[3].nbytes
    assert 196e6 < found[3].nbytes < 220e6  # its weights, and half an image of keys and values
    ending = "1-thread" if threads == 1 else "2-threads"
    data = json.loads((folder / f"races/llamagen-b-cpu-{ending}-float32.json").read_text())
    ours = next(r for r in data["runners"] if r["name"] == "ours")["laps"]
    rate = statistics.median(lap["work"]["tokens"] / lap["seconds"] for lap in ours)
    assert statistics.median(found[2].laps["ours"]) == rate


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    size_figure.draw(profiles_dir(), tmp_path / "sizes.png", 2)
    assert (tmp_path / "sizes.png").read_bytes().startswith(b"\x89PNG")
