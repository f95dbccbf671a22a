"""Write docs/figures.json, every measured figure of the pages, from the data: python tools/figures.py.

A figure is a piece of text as the pages have it, such as a row of a table, made from a file below
``profiles/`` and named with the command that measured it and the commit, where the file says which.
A test makes the figures again, and looks for each in its pages. Tables whose data are not in the
repository (what a rounding format costs, the authors' code, kernels' registers) are not here; their
pages name the commands.
"""

from __future__ import annotations

import functools
import json
import runpy
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lantern_accel.evaluation.schema import Evaluation
from lantern_accel.measure.reading import read_run
from lantern_accel.report.table import plain_rows, table

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "figures.json"
BENCHMARKS, README, STRATEGIES = "docs/benchmarks.md", "README.md", "docs/strategies.md"
AUTO_PAGE, WINDOWS, BITS = "docs/auto.md", "docs/jacobi.md", "docs/fewer_bytes.md"
SERVING, ROBUSTNESS, XLA = "docs/serving.md", "docs/robustness.md", "docs/xla.md"
Figure = dict[str, Any]
#: Where tools are that settled their question and have been removed.
GONE = "git show 8c0ad61:tools/"
RACE = "python tools/race_auto.py"

#: Files of races against plain decoding, and whether the pages say how many tokens a step brought.
AUTO = (
    "composed-batch1", "batch1", "float32-batch1", "batch4", "float32-batch4", "batch16", "batch32",
)  # fmt: skip
#: Races on a processor with AVX2 alone, as the data and the page name them.
AVX2 = {
    "composed-batch1": "the bundled model, 24 composed prompts",
    "llamagen-b-256": "LlamaGen-B's size, 8 prompts, draw 2511",
    "llamagen-xl-384": "LlamaGen-XL's size, 3 prompts, draw 2511",
    "prompts-draw-6173": "the bundled model, 12 prompts, draw 6173",
    "llamagen-b-256-draw-6173": "LlamaGen-B's size, 8 prompts, draw 6173",
    "llamagen-xl-384-draw-6173": "LlamaGen-XL's size, 3 prompts, draw 6173",
}
AMX = {
    "prompts": "the bundled model, 12 prompts",
    "batch4": "the bundled model, 4 prompts, batches of four",
    "llamagen-b-256": "LlamaGen-B's size, 4 prompts",
}
RACES = {
    "llamagen-bundled": (("float32", 1), ("float32", 2), ("bfloat16", 1), ("bfloat16", 2)),
    "llamagen-b": (("float32", 1), ("float32", 2), ("bfloat16", 1), ("bfloat16", 2)),
    "lantern-golden": (("bfloat16", 1), ("bfloat16", 2), ("float32", 1), ("float32", 2)),
}


#: Rows of the table of windows: as the data name them, and as the page does.
SOURCES = {
    "16 uniform": "uniform, four passes recalled",
    "16 passes=0": "above, nothing recalled",
    "16 scd": "above, four passes recalled (`scd`)",
}
#: Rows of the table of couplings, named likewise.
COUPLED = {
    "eagle chain:4": "chain of 4",
    "eagle naive_extend_57": "static tree of 57 drafts",
    "eagle dynamic:10,4,59": "dynamic tree of 58 drafts",
}
#: Models whose steps are timed on random weights.
STEPS = {"janus-pro-7b": "2, guided", "glm-image": "1"}


def figures() -> list[Figure]:
    """Return every figure: its name, text, pages, data, commit and command."""
    return [
        *_auto(),
        *_lantern(),
        *_costs(),
        *_bench(),
        *_conversion(),
        *_float32(),
        *_couplings(),
        *_sources(),
        *_floor(),
        *_stepcost(),
        *_sized(),
        *_rounded_steps("epyc", BITS),
        *_machine("zen3", AVX2),
        *_rounded_steps("zen3", BENCHMARKS),
        *_machine("xeon", AMX),
        *_passes(),
        *_races(),
        *_evaluation(),
        *_load(),
        *_busy(),
        *_xla(),
    ]


def _read(data: str) -> Any:
    return json.loads((ROOT / data).read_text(encoding="utf-8"))


def _figure(name: str, text: str, data: str, command: str, *pages: str) -> Figure:
    return {
        "name": name,
        "text": text,
        "pages": list(pages),
        "data": data,
        "commit": _commit(data),
        "command": command,
    }


@functools.cache
def _commit(data: str) -> str | None:
    """Return the commit that a file was measured on, the first twelve digits; None: it does not say."""
    environment = _read(data).get("environment", {})
    commit = environment.get("commit") if isinstance(environment, dict) else None
    return str(commit)[:12] if commit else None


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


def _lantern() -> Iterator[Figure]:
    data = "profiles/auto/epyc-lantern.json"
    found = _read(data)["batches"]["1"]["summary"]
    lantern, auto = found["lantern"], found["auto"]
    low, high = lantern["least"], lantern["most"]
    command = "python tools/race_auto.py --strategy lantern"
    text = f"{lantern['median']:.2f}x ({low:.2f} to {high:.2f}"
    yield _figure("LANTERN over plain decoding", text, data, command, BENCHMARKS)
    text = f"in the same run as `auto`'s {auto['median']:.2f}x"
    yield _figure("auto in LANTERN's run", text, data, command, BENCHMARKS)


def _costs() -> Iterator[Figure]:
    data = "profiles/auto/epyc-composed-batch1.json"
    batch = _read(data)["batches"]["1"]
    tree = batch["auto"]["drafts"]
    lengths = tree["draft_lengths"]
    for one in lengths:
        drafts = "none" if one["length"] == 1 else f"a window of {one['length']}"
        cost, brings = one["cost"], one["tokens_per_step"]
        text = f"| {drafts} | {cost:.2f} | {brings:.2f} | {brings / cost:.2f}x |"
        yield _figure(f"what {drafts} costs", text, data, "python tools/race_auto.py", AUTO_PAGE)
    best = max(one["tokens_per_step"] / one["cost"] for one in lengths)
    reached = f"{100 * batch['summary']['auto']['median'] / best:.0f} %"
    yield _figure("auto next to its promise", reached, data, "python tools/race_auto.py", AUTO_PAGE)


def _bench() -> Iterator[Figure]:
    data = "profiles/bench/epyc-lantern-emoji-batch1.json"
    run = read_run(ROOT / data)
    for row in table(run).splitlines()[2:]:
        label = f"{row.split('|')[1].strip()}, batch 1"
        yield _figure(label, row, data, run.command, BENCHMARKS)
    data = "profiles/bench/epyc-lantern-emoji-batches.json"
    run = read_run(ROOT / data)
    for found in plain_rows(run):
        label = f"{found['strategy']}, batches, batch {found['batch']}"
        rate = f"{found['tokens_per_second']:.0f}"
        if found["strategy"] == "vanilla":
            yield _figure(label, rate, data, run.command, BENCHMARKS)
            continue
        low, high = found["speedup_interval"]
        text = f"{rate} ± {100 * found['spread']:.0f} % | {found['speedup']:.2f}x "
        text += f"({low:.2f} to {high:.2f}) | {found['step_compression']:.2f} | "
        text += f"{found['conversion']:.2f} |"
        yield _figure(label, text, data, run.command, BENCHMARKS)


def _conversion() -> Iterator[Figure]:
    data = "profiles/bench/epyc-lantern-emoji-batches.json"
    run = read_run(ROOT / data)
    for row in plain_rows(run):
        if row["strategy"] != "vanilla":
            text = f"{row['step_compression']:.2f}, {row['conversion']:.2f} |"
            label = f"conversion of {row['strategy']}, batch {row['batch']}"
            yield _figure(label, text, data, run.command, WINDOWS)


def _float32() -> Iterator[Figure]:
    rates: dict[str, dict[str, float]] = {}
    told: dict[str, list[str]] = {}
    for dtype in ("float32", "bfloat16"):
        run = read_run(ROOT / f"profiles/bench/epyc-lantern-emoji-{dtype}.json")
        for row in plain_rows(run):
            rate = row["tokens_per_second"]
            rates.setdefault(row["strategy"], {})[dtype] = rate
            told.setdefault(row["strategy"], []).append(f"{rate:.0f} ± {100 * row['spread']:.0f} %")
    for strategy, found in rates.items():
        cost = f"{100 * (1 - found['float32'] / found['bfloat16']):.0f} %"
        data = "profiles/bench/epyc-lantern-emoji-float32.json"
        command = "lantern-accel bench --batch 1 --repeats 4 --dtype float32 --strategy eagle"
        yield _figure(f"what float32 costs, {strategy}", cost, data, command, STRATEGIES)
        text = f"| {strategy} | {' | '.join(told[strategy])} | {cost} |"
        yield _figure(f"{strategy} in both dtypes", text, data, command, BENCHMARKS)


def _couplings() -> Iterator[Figure]:
    command, data = GONE + "window_sources.py", "profiles/bench/epyc-couplings.json"
    rows = _read(data)["rows"]
    for name, label in COUPLED.items():
        both = [rows[one]["pooled"] for one in (name, f"{name}, maximal")]
        text = f"| {label} | {both[0]:.2f} | {both[1]:.2f} |"
        yield _figure(f"tokens per step, {label}", text, data, command, STRATEGIES)
    command, data = RACE, "profiles/auto/epyc-couplings.json"
    found = _read(data)["batches"]["1"]["summary"]
    for name in ("sjd", "eagle", "eagle2"):
        cells = [
            f"{found[one]['median']:.2f}x | {found[one]['tokens_per_step']:.2f}"
            for one in (name, f"{name}@maximal")
        ]
        text = f"| `{name}` | {' | '.join(cells)} |"
        yield _figure(f"{name} under both couplings", text, data, command, STRATEGIES)


def _sources() -> Iterator[Figure]:
    command, data = GONE + "window_sources.py", "profiles/bench/epyc-couplings.json"
    rows = _read(data)["rows"]
    for name, label in SOURCES.items():
        text = f"| {label} | {rows[name]['pooled']:.2f} | {rows[name]['one_token']:.0%} |"
        yield _figure(f"drafts of a window, {name}", text, data, command, WINDOWS)


def _floor() -> Iterator[Figure]:
    data = "profiles/bench/epyc-floor.json"
    for run in _read(data)["runs"]:
        one, nine = run["steps"]["vanilla"], run["steps"]["tree"]
        reads = max(run["bandwidth"].values()) / 1e9
        cells = [
            f"{run['dtype']}, {run['threads']}",
            f"{reads:.1f} GB/s",
            f"{run['rate'] / 1e9:.0f} G/s",
            f"{1e3 * one['seconds']:.1f} ms",
            f"{100 * one['share_of_floor']:.0f} %",
            f"{1e3 * nine['seconds']:.1f} ms",
            f"{100 * nine['share_of_floor']:.0f} %",
            f"{run['tree_in_vanilla_steps']:.2f}",
            f"{one['times_as_fast']:.1f}x, {nine['times_as_fast']:.1f}x",
        ]
        label = f"a pass and its floor, {cells[0]}"
        command = GONE + "cpu_floor.py"
        yield _figure(label, f"| {' | '.join(cells)} |", data, command, BENCHMARKS)


def _stepcost() -> Iterator[Figure]:
    for name, rows in STEPS.items():
        data = f"profiles/stepcost/epyc-{name}.json"
        found = _read(data)
        plain, nodes = _steps(found)
        floor = 1e3 * found["steps"][0]["floor_bytes"] / found["ceilings"]["read_bytes_per_s"]
        share = [100 * floor / ms for ms in reversed(plain)]
        text = (
            f"| {rows} | {plain[0]:.0f} to {plain[1]:.0f} ms | {floor:.0f} ms | {share[0]:.0f} to "
        )
        text += f"{share[1]:.0f} % | {nodes:.0f} ms |"
        yield _figure(
            f"steps of {name}", text, data, f"lantern-accel stepcost --size {name}", BENCHMARKS
        )


def _sized() -> Iterator[Figure]:
    for size, pixels, prompts in (("B", 256, 8), ("XL", 384, 8)):
        name = f"llamagen-{size.lower()}-{pixels}"
        data = f"profiles/auto/epyc-{name}.json"
        found = _read(data)["batches"]["1"]["summary"]["auto"]
        text = f"| LlamaGen-{size}, {pixels} pixels, {prompts} prompts | {found['median']:.2f}x | "
        text += f"{found['least']:.2f}x | {found['most']:.2f}x | {found['below_0.97']} |"
        command = f"python tools/race_auto.py --size {name}"
        yield _figure(f"auto at the size of {name}", text, data, command, BITS)


def _machine(machine: str, rows: dict[str, str]) -> Iterator[Figure]:
    for name, label in rows.items():
        data = f"profiles/auto/{machine}-{name}.json"
        found = next(iter(_read(data)["batches"].values()))["summary"]["auto"]
        text = f"| {label} | {found['median']:.2f}x | {found['least']:.2f}x | "
        text += f"{found['most']:.2f}x | {found['below_0.97']} | {found['tokens_per_step']:.2f} |"
        yield _figure(f"auto on {machine}, {name}", text, data, RACE, BENCHMARKS)


def _passes() -> Iterator[Figure]:
    for size in ("b", "xl"):
        costs = _read(data := f"profiles/stepcost/xeon-llamagen-{size}.json")["steps"]
        ms = {c["nodes"]: statistics.median(c["ms"]) for c in costs if c["kind"] == "pass"}
        text = f"| LlamaGen-{size.upper()} | "
        text += " | ".join(f"{ms[n] / ms[2]:.2f}" for n in (8, 16, 32, 64)) + " |"
        yield _figure(f"rows on xeon, {size}", text, data, "lantern-accel stepcost", BENCHMARKS)


def _rounded_steps(machine: str, page: str) -> Iterator[Figure]:
    plain: dict[str, list[float]] = {}
    for weights in ("full", "int8"):
        data = f"profiles/stepcost/{machine}-llamagen-b-{weights}.json"
        found = _read(data)
        plain[weights], nodes = _steps(found)
        floor = 1e3 * found["steps"][0]["floor_bytes"] / found["ceilings"]["read_bytes_per_s"]
        low, high = plain[weights]
        text = f"| `{weights}` | {low:.1f} to {high:.1f} ms | {100 * floor / high:.0f} to "
        text += f"{100 * floor / low:.0f} % | {nodes:.1f} ms |"
        command = f"lantern-accel stepcost --size llamagen-b-256 --weights {weights}"
        yield _figure(f"a step in {weights}, {machine}", text, data, command, page)


def _steps(found: Any) -> tuple[list[float], float]:
    """Return the least and the most of a plain step's medians, and a pass over eight nodes; ms."""
    plain = [statistics.median(one["ms"]) for one in found["steps"] if one["nodes"] == 1]
    wide = next(statistics.median(one["ms"]) for one in found["steps"] if one["nodes"] == 8)
    return [min(plain), max(plain)], wide


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
            each = [f"{1e3 * statistics.median(one):.1f}" for one in times]
            text = f"{dtype}, {threads} | {each[0]} | {each[1]} | {ratio:.1f}x | "
            text += f"{min(by_image):.1f} to {max(by_image):.1f} |"
            lantern = name.startswith("lantern")
            command = GONE + "race_lantern.py" if lantern else "python tools/race_official.py"
            yield _figure(f"{name}, {dtype}, {which}", text, data, command, BENCHMARKS)
            if name == "llamagen-b" and threads == 2:
                label = f"plain decoding at B, {dtype}"
                yield _figure(label, f"{ratio:.1f} ({dtype})", data, command, README)


def _work(lap: Any) -> float:
    return float(next(iter(lap["work"].values())))


def _evaluation() -> Iterator[Figure]:
    data = "docs/evaluation/lantern-emoji.json"
    report = Evaluation.model_validate_json((ROOT / data).read_text(encoding="utf-8"))
    tables = runpy.run_path(str(ROOT / "tools" / "evaluation_pages.py"))
    command = "python tools/lantern-emoji evaluate --model lantern-emoji"
    for name, page in (("frontier", "docs/notes.md"), ("distances", "docs/evaluation.md")):
        for number, row in enumerate(list(tables[name](report))[2:]):
            yield _figure(f"{name} of relaxation, {number}", row, data, command, page)


def _load() -> Iterator[Figure]:
    for slots in (1, 4):
        data = f"profiles/load/epyc-slots{slots}.json"
        found = _read(data)
        late, first = found["latency_s"], found["first_partial_s"]["p50"]
        text = f"| {slots} | {found['images_per_s']:.2f} | {late['p50']:.1f} s | {late['p95']:.1f} s | "
        text += f"{late['p99']:.1f} s | {first:.1f} s |"
        yield _figure(f"a service of {slots} rows", text, data, "python tools/load.py", SERVING)


def _busy() -> Iterator[Figure]:
    data = "profiles/busy/epyc.json"
    found = _read(data)["strategies"]
    for name, label in (("auto", "`auto`"), ("vanilla", "plain decoding")):
        quiet, busy = found[name]["quiet"], found[name]["busy"]
        ratios = [b / q for b, q in zip(busy, quiet, strict=True)]
        text = f"| {label} | {statistics.median(quiet):.2f} s | {statistics.median(busy):.2f} s | "
        text += f"{found[name]['ratio']:.1f} ({min(ratios):.1f} to {max(ratios):.1f}) |"
        command = GONE + "busy_machine.py"
        yield _figure(f"a busy machine, {name}", text, data, command, ROBUSTNESS)


def _xla() -> Iterator[Figure]:
    rates: dict[str, list[float]] = {}
    for device in ("cpu", "xla"):
        data = f"profiles/measured/xla/run-{device}.json"
        for row in plain_rows(read_run(ROOT / data)):
            rates.setdefault(row["strategy"], []).append(row["tokens_per_second"])
    for name in ("vanilla", "scd"):
        text = " | ".join(f"{rate:.3g}" for rate in rates[name])
        yield _figure(f"{name} on two devices", text, data, "lantern-accel profile", XLA)


if __name__ == "__main__":
    OUT.write_text(json.dumps({"figures": figures()}, indent=1) + "\n", encoding="utf-8")
