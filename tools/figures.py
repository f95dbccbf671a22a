"""Write docs/figures.json, every measured figure of the pages, from the data: python tools/figures.py.

A figure is a piece of text as the pages have it, made from a file below ``profiles/`` and named with the
command that measured it. A test makes the figures again, and looks for each in its pages.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "figures.json"
BENCHMARKS, README, STRATEGIES = "docs/benchmarks.md", "README.md", "docs/strategies.md"
Figure = dict[str, Any]

#: Files of races against plain decoding, and whether the pages say how many tokens a step brought.
AUTO = (
    "composed-batch1",
    "batch1",
    "float32-batch1",
    "batch4",
    "float32-batch4",
    "batch16",
    "batch32",
)
RACES = {
    "llamagen-bundled": (("float32", 1), ("float32", 2), ("bfloat16", 1), ("bfloat16", 2)),
    "llamagen-b": (("float32", 1), ("float32", 2), ("bfloat16", 1), ("bfloat16", 2)),
    "lantern-golden": (("bfloat16", 1), ("bfloat16", 2), ("float32", 1), ("float32", 2)),
}


def figures() -> list[Figure]:
    """Return every figure: its name, its text, the pages that have it, its data and its command."""
    return [*_auto(), *_bench(), *_float32(), *_races()]


def _read(data: str) -> Any:
    return json.loads((ROOT / data).read_text(encoding="utf-8"))


def _figure(name: str, text: str, data: str, command: str, *pages: str) -> Figure:
    return {"name": name, "text": text, "pages": list(pages), "data": data, "command": command}


def _auto() -> Iterator[Figure]:
    for name in AUTO:
        data = f"profiles/auto/epyc-{name}.json"
        ((_, batch),) = _read(data)["batches"].items()
        found = batch["summary"]["auto"]
        low, high = found["least"], found["most"]
        row = f"{found['median']:.2f}x | {low:.2f}x | {high:.2f}x | {found['below_0.97']} |"
        row += f" {found['tokens_per_step']:.2f} |"
        command = "python tools/race_auto.py"
        yield _figure(f"auto against plain decoding, {name}", row, data, command, BENCHMARKS)
        if name == "composed-batch1":
            row = f"{found['median']:.2f}x ({low:.2f} to {high:.2f} by prompt) | "
            row += f"{found['tokens_per_step']:.2f}"
            yield _figure("auto, in the README", row, data, command, README)


def _bench() -> Iterator[Figure]:
    from lantern_accel.measure.reading import read_run
    from lantern_accel.report.table import plain_rows

    for name in ("batch1", "batches"):
        data = f"profiles/bench/epyc-lantern-emoji-{name}.json"
        run = read_run(ROOT / data)
        for row in plain_rows(run):
            if row["strategy"] == "vanilla":
                label = f"plain decoding, {name}, batch {row['batch']}"
                rate = f"{row['tokens_per_second']:.0f}"
                yield _figure(label, rate, data, run.command, BENCHMARKS)
                continue
            low, high = row["speedup_interval"]
            text = (
                f"{row['speedup']:.2f}x ({low:.2f} to {high:.2f}) | {row['step_compression']:.2f}"
            )
            label = f"{row['strategy']}, {name}, batch {row['batch']}"
            yield _figure(label, text, data, run.command, BENCHMARKS)


def _float32() -> Iterator[Figure]:
    from lantern_accel.measure.reading import read_run
    from lantern_accel.report.table import plain_rows

    rates: dict[str, dict[str, float]] = {}
    for dtype in ("float32", "bfloat16"):
        run = read_run(ROOT / f"profiles/bench/epyc-lantern-emoji-{dtype}.json")
        for row in plain_rows(run):
            rates.setdefault(row["strategy"], {})[dtype] = row["tokens_per_second"]
    for strategy, found in rates.items():
        cost = f"{100 * (1 - found['float32'] / found['bfloat16']):.0f} %"
        data = "profiles/bench/epyc-lantern-emoji-float32.json"
        command = "lantern-accel bench --batch 1 --repeats 4 --dtype float32 --strategy eagle"
        yield _figure(
            f"what float32 costs, {strategy}", cost, data, command, BENCHMARKS, STRATEGIES
        )


def _races() -> Iterator[Figure]:
    for name, settings in RACES.items():
        for dtype, threads in settings:
            which = f"{threads}-thread{'s' * (threads > 1)}"
            data = f"profiles/races/{name}-cpu-{which}-{dtype}.json"
            runners = {one["name"]: one["laps"] for one in _read(data)["runners"]}
            ours, theirs = runners.pop("ours"), runners.popitem()[1]
            times = [[lap["seconds"] / _work(lap) for lap in laps] for laps in (theirs, ours)]
            ratio = statistics.median(times[0]) / statistics.median(times[1])
            by_image = [a / b for a, b in zip(*times, strict=True)]
            text = f"{ratio:.1f}x | {min(by_image):.1f} to {max(by_image):.1f} |"
            script = "race_lantern" if name.startswith("lantern") else "race_official"
            command = f"python tools/{script}.py"
            yield _figure(f"{name}, {dtype}, {which}", text, data, command, BENCHMARKS)
            if name == "llamagen-b" and threads == 2:
                label = f"plain decoding at B, {dtype}"
                yield _figure(label, f"{ratio:.1f} ({dtype})", data, command, README)


def _work(lap: Any) -> float:
    return float(next(iter(lap["work"].values())))


if __name__ == "__main__":
    OUT.write_text(json.dumps({"figures": figures()}, indent=1) + "\n", encoding="utf-8")
