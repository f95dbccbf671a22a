"""Write the tables of measured figures into the pages, and docs/figures.json: python tools/figures.py.

A table stands in its page between ``<!-- NAME -->`` and ``<!-- /NAME -->``. Each row is made from a file
below ``profiles/`` or ``docs/evaluation/`` and listed in figures.json with that file, its commit and the
command that measured it. A test makes the rows again and looks for each in its page.

What ``python tools/publish.py`` measured is in ``profiles/published``, a file a machine; the chart
docs/speed.png is drawn from the newest. A row says "older code" where kernels have changed since.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import runpy
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lantern_accel_profiles.evaluation.schema import Evaluation
from lantern_accel_profiles.measure.reading import read_run
from lantern_accel_profiles.report.names import short_device
from lantern_accel_profiles.report.table import plain_rows

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "figures.json"
PUBLISHED, CHART = ROOT / "profiles" / "published", ROOT / "docs" / "speed.png"
#: Where code is that decides speed: rows are marked that were measured before it changed.
KERNELS = ("backends/lantern_accel_cpu/native", "lantern_accel/decoding")
#: Kinds of prompts that are published: composed ones, and a draw from the training list.
KINDS = ("composed", "training list")
PUBLISH = "python tools/publish.py"
README, BENCHMARKS, QUANTIZATION = "README.md", "docs/benchmarks.md", "docs/quantization.md"
SERVING, BACKENDS, EVALUATION = "docs/serving.md", "docs/backends.md", "docs/evaluation.md"
RACE, STEPS = "git show cccd230a:tools/race_auto.py", "lantern-accel stepcost"
#: The days of the commits that were measured.
DAYS = {
    "00ef6c56": "2026-11-22", "2358f9c5": "2026-11-25", "4f0b639d": "2026-11-24",
    "803d0de1": "2026-11-26", "c88376de": "2026-11-24", "dd79a7f0": "2026-11-27",
    "f31a0938": "2026-11-24",
}  # fmt: skip
#: Older races of the composed prompts, below profiles/auto; the developer notes have the others.
MACHINES = (
    ("epyc-composed-batch1", "AMD EPYC, Zen 5 (AVX-512)"),
    ("zen3-composed-batch1", "AMD EPYC, Zen 3 (AVX2)"),
)
#: What is timed beside this package, as the pages name it.
PROGRAMS = {
    "official": "official sampler",
    "transformers": "transformers' `generate`",
    "ours": "plain decoding here",
}
SIZES_NAMED = {
    "bundled": "bundled size", "B": "LlamaGen-B", "b": "LlamaGen-B", "xl": "LlamaGen-XL",
}  # fmt: skip
#: Runs of stepcost: file below profiles/stepcost, machine, model.
SIZES = (
    ("epyc-janus-pro-7b", "Zen 5", "Janus-Pro 7B"),
    ("epyc-glm-image", "Zen 5", "GLM-Image (prior)"),
    ("xeon-llamagen-b", "Xeon", "LlamaGen-B"),
    ("xeon-llamagen-xl", "Xeon", "LlamaGen-XL"),
)


@dataclass(frozen=True)
class Row:
    """One row of a table: what it is, its cells, and where they come from.

    ``prompts``: what the columns of figures were measured on, in the table's order; "" is not measured.
    """

    name: str
    cells: str
    data: str
    command: str
    prompts: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The row in Markdown, without its outer bars' spaces."""
        return f"| {self.cells} |"


@dataclass(frozen=True)
class Table:
    """A table of a page: its head, and its rows."""

    page: str
    head: str
    rows: tuple[Row, ...]

    def markdown(self) -> str:
        """Return the table's lines."""
        if not self.rows:
            return f"Not measured yet: `{PUBLISH}`."
        rule = "|---" * (self.head.count("|") + 1) + "|"
        return "\n".join([f"| {self.head} |", rule, *(row.text for row in self.rows)])


def tables() -> dict[str, Table]:
    """Return every table by its name, as the pages mark it."""
    one = " | ".join(f"{kind}: s per image, plain | `auto` | speed-up" for kind in KINDS)
    raced = "s per image | speed-up, median | by prompt | run 1, run 2 | tokens per step"
    found: dict[str, tuple[str, str, Iterable[Row]]] = {
        "machines": (README, f"machine | batch size | {one} | day, commit", _machines()),
        **{
            kind.split()[0]: (
                BENCHMARKS,
                f"machine | strategy | batch size | {raced} | TV per token | day, commit",
                _raced("bundled", (kind,)),
            )
            for kind in KINDS
        },
        "sized": (
            BENCHMARKS,
            f"machine | strategy | acceptance | batch size | {raced} | day, commit",
            _raced("sized", KINDS),
        ),
        "beside": (
            BENCHMARKS,
            "machine | size | program | s per image | over plain decoding here | day, commit",
            _beside(),
        ),
        "passes": (
            BENCHMARKS,
            "machine | size | program, weights | 1 row | 2 | 4 | 8 | 16 | 32 | day, commit",
            _passes(),
        ),
        "float32": (BENCHMARKS, "strategy | time, float32 over bfloat16 | day, commit", _float32()),
        "sizes": (
            BENCHMARKS, "machine | model | plain step | 8 nodes over plain | day, commit", _sizes()
        ),
        "quantized": (
            QUANTIZATION,
            "machine | weights | plain step | step over 8 nodes | day, commit",
            _quantized(),
        ),
        "load": (SERVING, "rows | images/s | latency p50 | p95 | p99 | first partial image p50", _load()),
        "distances": (EVALUATION, "", _evaluation("distances")),
        "xla": (BACKENDS, "strategy | cpu, tokens/s | xla, tokens/s", _xla()),
    }  # fmt: skip
    return {name: Table(page, head, tuple(rows)) for name, (page, head, rows) in found.items()}


def figures() -> list[dict[str, Any]]:
    """Return every row: its name, text, page, data, commit and command."""
    return [
        {
            "name": f"{name}: {row.name}",
            "text": row.text,
            "pages": [made.page],
            "data": row.data,
            "commit": _commit(row.data),
            "command": row.command,
        }
        for name, made in tables().items()
        for row in made.rows
    ]


def _read(data: str) -> Any:
    return json.loads((ROOT / data).read_text(encoding="utf-8"))


@functools.cache
def _commit(data: str) -> str | None:
    """Return the first digits of the commit that was measured; None: the file does not say."""
    found = _read(data)
    environment = found.get("environment", {})
    commit = environment.get("commit") if isinstance(environment, dict) else None
    commit = found.get("commit", commit)
    return str(commit)[:8] if commit else None


@functools.cache
def kernels() -> str:
    """Return a digest of the code that decides speed."""
    found = hashlib.sha256()
    for path in sorted(path for folder in KERNELS for path in (ROOT / folder).rglob("*.[pch]*")):
        if path.is_file() and "build-" not in str(path) and "__pycache__" not in path.parts:
            found.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:16]


def _when(data: str) -> str:
    """Return the day and commit of a measurement, and whether kernels have changed since."""
    commit, found = _commit(data), _read(data)
    if commit is None:
        return "not recorded"
    age = "" if found.get("kernels") == kernels() else ", older code"
    return f"{found.get('date') or DAYS[commit]}, {commit}{age}"


def read_published() -> list[tuple[str, dict[str, Any]]]:
    """Return the files of machines that publish.py wrote, and what they hold, by their names."""
    files = sorted(PUBLISHED.glob("*.json"))
    return [(path.relative_to(ROOT).as_posix(), _read(str(path))) for path in files]


def machine_of(found: dict[str, Any]) -> str:
    """Return a machine's name, its kernels and its cores."""
    facts = found["environment"]["device"]
    name, design = short_device(facts["name"]), facts.get("generation")
    notes = [note.split(": ") for note in facts["notes"]]
    kinds = [note[1].split(",")[0].upper() for note in notes if note[0] == "native kernels"]
    words = ", ".join([*([design] if design else []), *kinds])
    return f"{name} ({words}), {facts['cores']} {'virtual ' * bool(facts['virtual'])}cores"


def prompt_set(prompts: Iterable[str]) -> str:
    """Return a name of a set of prompts: equal for equal ones."""
    return hashlib.sha256("\n".join(sorted({*prompts})).encode()).hexdigest()[:12]


@dataclass
class Raced:
    """A strategy against plain decoding: figures of prompts, over all runs."""

    prompts: str
    runs: dict[int, list[float]] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    ratios: dict[str, list[float]] = field(default_factory=dict)
    tokens: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)

    @property
    def by_prompt(self) -> list[float]:
        return [statistics.median(each) for each in self.ratios.values()]

    @property
    def ratio(self) -> str:
        return f"{statistics.median(self.by_prompt):.2f}x"

    @property
    def image(self) -> str:
        return f"{statistics.median(self.seconds):.3g} s"

    @property
    def cells(self) -> str:
        least, most = min(self.by_prompt), max(self.by_prompt)
        runs = ", ".join(f"{statistics.median(one):.2f}x" for _, one in sorted(self.runs.items()))
        tokens = statistics.mean(self.tokens)
        return f"{self.image} | {self.ratio} | {least:.2f}x to {most:.2f}x | {runs} | {tokens:.2f}"


def compare_in_run(
    found: dict[str, Any], part: str, cell: tuple[str, bool, int], kinds: Iterable[str]
) -> Raced:
    """Return a strategy's figures against plain decoding in the same run, prompt and seed."""
    asked = {prompt for kind in kinds for prompt in found["prompts"][kind]}
    rows = [r for r in found["rows"] if r["part"] == part and r["prompt"] in asked]
    plain = {
        (r["run"], r["batch"], r["prompt"]): r["seconds"]
        for r in rows
        if r["strategy"] == "vanilla"
    }
    made = Raced(prompt_set(r["prompt"] for r in rows))
    for row in rows:
        if (row["strategy"], row["head"], row["batch"]) == cell:
            base = plain[row["run"], cell[2], row["prompt"]]
            ratios = [a / b for a, b in zip(base, row["seconds"], strict=True)]
            made.ratios.setdefault(row["prompt"], []).extend(ratios)
            made.runs.setdefault(row["run"], []).append(statistics.median(ratios))
            made.seconds.append(statistics.median(row["seconds"]))
            made.tokens.extend(row["tokens_per_step"])
            made.lost.extend(row["lost"])
    return made


def _cells(found: dict[str, Any], part: str) -> list[tuple[str, bool, int]]:
    rows = (row for row in found["rows"] if row["part"] == part)
    return list(dict.fromkeys((row["strategy"], row["head"], row["batch"]) for row in rows))


def _machines() -> Iterator[Row]:
    for data, found in read_published():
        for batch in sorted({batch for _, _, batch in _cells(found, "bundled")}):
            cells, prompts = [machine_of(found), str(batch)], []
            for kind in KINDS:
                plain, auto = (
                    compare_in_run(found, "bundled", (name, True, batch), (kind,))
                    for name in ("vanilla", "auto")
                )
                cells += [plain.image, auto.image, auto.ratio]
                prompts.append(auto.prompts)
            cells.append(_when(data))
            yield Row(f"{data}, {batch}", " | ".join(cells), data, PUBLISH, tuple(prompts))
    for name, machine in MACHINES:
        data = f"profiles/auto/{name}.json"
        one = _read(data)["batches"]["1"]
        cells = [machine, "1", "-", "-", f"{one['summary']['auto']['median']:.2f}x", "-", "-", "-"]
        asked = prompt_set(row["prompt"] for row in one["rows"])
        yield Row(name, " | ".join([*cells, _when(data)]), data, RACE, (asked, ""))


def _raced(part: str, kinds: tuple[str, ...]) -> Iterator[Row]:
    for data, found in read_published():
        for cell in _cells(found, part):
            name, head, batch = cell
            one = compare_in_run(found, part, cell, kinds)
            label = f"`{name}`"
            if part == "sized":
                drafts = f"replayed, with{'' if head else 'out'} draft head"
                label += f" | {drafts if name != 'vanilla' else 'none'}"
            elif not head:
                label += ", no draft head"
            cells = f"{machine_of(found)} | {label} | {batch} | {one.cells}"
            cells += f" | {statistics.mean(one.lost):.3f}" * (part == "bundled")
            named = f"{data}, {label}, batch {batch}"
            yield Row(named, f"{cells} | {_when(data)}", data, PUBLISH, (one.prompts,))


def median_seconds(found: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Return median seconds an image by size and program."""
    times: dict[tuple[str, str], list[float]] = {}
    for row in found["rows"]:
        if row["part"].startswith("beside"):
            times.setdefault((row["model"], row["program"]), []).extend(row["seconds"])
    return {key: statistics.median(each) for key, each in times.items()}


def _beside() -> Iterator[Row]:
    for data, found in read_published():
        for (size, program), seconds in (times := median_seconds(found)).items():
            ratio = f"{seconds / times[size, 'ours']:.1f}x"
            cells = f"{machine_of(found)} | {SIZES_NAMED[size]} | {PROGRAMS[program]}"
            cells += f" | {seconds:.3g} s | {ratio} | {_when(data)}"
            yield Row(f"{data}, {size}, {program}", cells, data, PUBLISH)


def _passes() -> Iterator[Row]:
    for data, found in read_published():
        for row in found["rows"]:
            if row["part"].startswith("passes"):
                label = f"{row['program']}, {row['weights'].replace('full', 'bfloat16')}"
                ms = " | ".join(f"{row['ms'][n]:.3g} ms" for n in sorted(row["ms"], key=int))
                cells = f"{machine_of(found)} | {SIZES_NAMED[row['model']]} | {label} | {ms}"
                named = f"{data}, {row['model']}, {label}"
                yield Row(named, f"{cells} | {_when(data)}", data, PUBLISH)


def _float32() -> Iterator[Row]:
    rates: dict[str, dict[str, float]] = {}
    for dtype in ("float32", "bfloat16"):
        run = read_run(ROOT / (data := f"profiles/bench/epyc-lantern-emoji-{dtype}.json"))
        for row in plain_rows(run):
            rates.setdefault(row["strategy"], {})[dtype] = row["tokens_per_second"]
    for strategy, rate in rates.items():
        ratio = f"{rate['bfloat16'] / rate['float32']:.2f}x"
        command = "lantern-accel bench --batch 1 --repeats 4 --dtype float32 --strategy eagle"
        yield Row(strategy, f"`{strategy}` | {ratio} | {_when(data)}", data, command)


def _step(found: Any) -> tuple[float, float]:
    """Return the medians of a plain step and of a step over eight nodes, ms."""
    return (
        statistics.median(statistics.median(s["ms"]) for s in found["steps"] if s["nodes"] == 1),
        next(statistics.median(s["ms"]) for s in found["steps"] if s["nodes"] == 8),
    )


def _sizes() -> Iterator[Row]:
    for name, machine, model in SIZES:
        plain, wide = _step(_read(data := f"profiles/stepcost/{name}.json"))
        cells = f"{machine} | {model} | {plain:.1f} ms | {wide / plain:.2f}x | {_when(data)}"
        yield Row(name, cells, data, f"{STEPS} --size")


def _quantized() -> Iterator[Row]:
    for machine, label in (("epyc", "AMD EPYC, Zen 5"), ("zen3", "AMD EPYC, Zen 3")):
        for weights in ("full", "int8"):
            data = f"profiles/stepcost/{machine}-llamagen-b-{weights}.json"
            plain, wide = _step(_read(data))
            cells = f"{label} | `{weights}` | {plain:.1f} ms | {wide:.1f} ms"
            command = f"{STEPS} --size llamagen-b-256 --weights {weights}"
            yield Row(f"{machine}, {weights}", f"{cells} | {_when(data)}", data, command)


def _evaluation(part: str) -> Iterator[Row]:
    data = "docs/evaluation/lantern-emoji.json"
    report = Evaluation.model_validate_json((ROOT / data).read_text(encoding="utf-8"))
    made = runpy.run_path(str(ROOT / "tools" / "evaluation_pages.py"))[part]
    command = "python tools/lantern-emoji evaluate --model lantern-emoji"
    for number, row in enumerate(list(made(report))[2:]):
        yield Row(f"{number}", row.removeprefix("| ").removesuffix(" |"), data, command)


def _load() -> Iterator[Row]:
    for slots in (1, 4):
        data = f"profiles/serving/epyc-slots{slots}.json"
        found = _read(data)
        late = " | ".join(f"{found['latency_s'][one]:.1f} s" for one in ("p50", "p95", "p99"))
        first = found["first_partial_s"]["p50"]
        cells = f"{slots} | {found['images_per_s']:.2f} | {late} | {first:.1f} s"
        yield Row(f"{slots} rows", cells, data, "python -m lantern_accel_profiles.load")


def _xla() -> Iterator[Row]:
    rates: dict[str, list[float]] = {}
    for device in ("cpu", "xla"):
        data = f"profiles/measured/xla/run-{device}.json"
        for row in plain_rows(read_run(ROOT / data)):
            rates.setdefault(row["strategy"], []).append(row["tokens_per_second"])
    for name in ("vanilla", "scd"):
        cells = f"{name} | " + " | ".join(f"{rate:.3g}" for rate in rates[name])
        yield Row(name, cells, data, "lantern-accel profile")


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw the seconds of an image by program, for the bundled size and LlamaGen-B's."""
    import matplotlib
    from PIL import Image

    matplotlib.use("Agg")
    from matplotlib import pyplot

    times = median_seconds(found)
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 2.6), layout="constrained")
    for axis, (size, part, title) in zip(
        axes,
        (
            ("bundled", "bundled", "bundled size"),
            ("B", "sized", "LlamaGen-B, acceptance replayed"),
        ),
        strict=True,
    ):
        bars = {
            PROGRAMS[name].replace("`", ""): times[size, name]
            for name in ("official", "transformers")
            if (size, name) in times
        }
        own = [("vanilla", True, "plain decoding here"), ("auto", True, "auto here")]
        if part == "sized":  # released weights have no draft head
            own[1:] = [
                ("auto", False, "auto here, no draft head"),
                ("auto", True, "auto here, draft head"),
            ]
        for name, head, label in own:
            seconds = compare_in_run(found, part, (name, head, 1), KINDS).seconds
            bars[label] = statistics.median(seconds)
        colours = ["#9aa5b1"] * (len(bars) - len(own)) + ["#4c78a8", "#e4572e", "#e4572e"]
        drawn = axis.barh(list(bars), list(bars.values()), color=colours[: len(bars)])
        axis.bar_label(drawn, fmt="%.2f s", padding=3)
        axis.invert_yaxis()
        axis.margins(x=0.18)
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    commit, day = found["commit"][:8], found["date"]
    figure.supxlabel(
        f"seconds per image, batch 1 ({machine_of(found)}; {day}, commit {commit})", fontsize=8
    )
    figure.savefig(path, dpi=130, metadata={"Software": None})
    pyplot.close(figure)
    with Image.open(path) as image:  # a few colours, in a palette
        small = image.convert("RGB").quantize(64)
    small.save(path, optimize=True)


def chart() -> str:
    """Return the README's line with the chart; "" where no machine is published."""
    if not read_published():
        return ""
    return f"![Seconds per image by program](docs/{CHART.name})\n"


def rewritten(page: str, text: str) -> str:
    """Return a page with its marked tables as the data have them."""
    for name, made in tables().items():
        if made.page == page and made.head:
            marks = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.S)
            text = marks.sub(lambda m, made=made: f"{m[1]}{made.markdown()}\n{m[2]}", text)  # type: ignore[misc]  # mypy knows no default of a lambda's argument
    if page == README:
        marks = re.compile("(<!-- chart -->\n).*?(<!-- /chart -->)", re.S)
        text = marks.sub(lambda m: f"{m[1]}{chart()}{m[2]}", text)
    return text


if __name__ == "__main__":
    for of in sorted({made.page for made in tables().values()}):
        if (path := ROOT / of).is_file():
            path.write_text(rewritten(of, path.read_text(encoding="utf-8")), encoding="utf-8")
    if machines := read_published():
        draw(max((found for _, found in machines), key=lambda one: str(one["date"])), CHART)
    OUT.write_text(json.dumps({"figures": figures()}, indent=1) + "\n", encoding="utf-8")
