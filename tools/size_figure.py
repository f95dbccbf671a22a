"""Draw speed over model size under the floor: ``python tools/size_figure.py docs/sizes.png``.

From the committed races: plain decoding of the bundled model's size and of LlamaGen B, here and by
LlamaGen's own sampler, over the bytes that a step reads. The line is what their way from memory allows.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lantern_accel.device.datasheets import profiles_dir
from lantern_accel.quality import style
from lantern_accel.report.projection import size_work

#: Bytes of a number.
WIDTH = {"float32": 4, "bfloat16": 2}
TICKS = (20, 50, 100, 200, 500, 1000, 2000)
SIZES = {"bundled": "bundled model", "b": "LlamaGen B"}
RUNNERS = {
    "ours": ("lantern_accel, plain decoding", style.CYCLE[0], "o"),
    "official": ("LlamaGen's sampler", style.CYCLE[1], "s"),
}


@dataclass(frozen=True)
class Point:
    """One race: bytes of a step, tokens per second of every lap by runner, and what it is called."""

    nbytes: float
    laps: dict[str, list[float]]
    label: str


def points(folder: Path, threads: int) -> Iterator[Point]:
    """Yield the races of both sizes and dtypes at so many threads."""
    floors = _floors(folder)
    ending = f"{threads}-thread{'s' if threads > 1 else ''}"
    for size, name in SIZES.items():
        for dtype, width in WIDTH.items():
            data = json.loads(
                (folder / "races" / f"llamagen-{size}-cpu-{ending}-{dtype}.json").read_text()
            )
            if size == "bundled":
                nbytes = _of(floors, dtype, threads)["steps"]["vanilla"]["bytes"]
            else:  # counted on shapes, in bfloat16
                work = size_work("llamagen-b-256")["vanilla"]
                nbytes = width / 2 * sum(w.bytes for n, w in work.items() if n != "prefill")
            laps = {
                runner["name"]: [lap["work"]["tokens"] / lap["seconds"] for lap in runner["laps"]]
                for runner in data["runners"]
            }
            yield Point(nbytes, laps, f"{name}, {dtype}")


def bandwidth(folder: Path, threads: int) -> float:
    """Return the bytes per second that memory gave at best, of both dtypes' measurements."""
    floors = _floors(folder)
    return max(float(_of(floors, dtype, threads)["bandwidth"]["memory"]) for dtype in WIDTH)


def _floors(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "bench/epyc-floor.json").read_text())["runs"]
    return found


def _of(floors: list[dict[str, Any]], dtype: str, threads: int) -> dict[str, Any]:
    return next(one for one in floors if (one["dtype"], one["threads"]) == (dtype, threads))


def draw(folder: Path, out: Path, threads: int) -> None:
    """Write the picture."""
    found = list(points(folder, threads))
    rate = bandwidth(folder, threads)
    with style.styled():
        figure, (axis,) = style.panels(1, width=6.4, height=4.0)
        ends = [min(p.nbytes for p in found) / 1.6, max(p.nbytes for p in found) * 2.4]
        axis.plot(
            ends,
            [rate / end for end in ends],
            color=style.MUTED,
            label=f"the floor: {rate / 1e9:.0f} GB/s from memory",
            lw=1,
        )
        for name, (label, colour, marker) in RUNNERS.items():
            for i, point in enumerate(found):
                laps = point.laps[name]
                axis.plot([point.nbytes] * 2, [min(laps), max(laps)], color=colour, lw=1)
                axis.plot(
                    point.nbytes,
                    statistics.median(laps),
                    marker,
                    color=colour,
                    label=label if not i else None,
                )
        for point in found:
            axis.annotate(
                point.label,
                (point.nbytes, statistics.median(point.laps["ours"])),
                xytext=(8, 4),
                textcoords="offset points",
                fontsize=7.5,
            )
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlim(*ends)
        axis.set_xticks([p.nbytes for p in found], [f"{p.nbytes / 1e6:.0f} MB" for p in found])
        axis.set_yticks(TICKS, [f"{at:g}" for at in TICKS])
        for one in (axis.xaxis, axis.yaxis):
            one.set_minor_formatter(lambda at, _: "")
        axis.margins(y=0.12)
        axis.set_xlabel("what a plain step reads")
        axis.set_ylabel("tokens per second")
        axis.grid(True)
        axis.legend(loc="lower left")
        style.save(figure, out, dpi=150)


def main() -> None:
    """Draw the figure of docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--threads", type=int, choices=(1, 2), default=2)
    given = parser.parse_args()
    draw(profiles_dir(), given.picture, given.threads)


if __name__ == "__main__":
    main()
