"""Run the project under several releases of torch: ``python tools/torch_range.py -o docs/torch.md``.

Each release gets a virtual environment with the project and its tests installed, and runs a part of the
unit tests, the conformance kit on the CPU and on the software HPU (which is compiled against that
torch's headers), and the README's first command. What was found is written after every stage, as a page
and as JSON next to it, so that an interrupted run goes on where it stopped, and a release that fails
does not stop the others.

A release of torch brings gigabytes of CUDA libraries unless pip finds a build without them (an index
named by ``PIP_EXTRA_INDEX_URL``). Environments are removed after their run; ``--keep`` keeps them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from lantern_accel.cli import run_single
from lantern_accel.cli.console import say
from lantern_accel.errors import LanternError, RequestError
from lantern_accel.files import cache_dir, write_json, write_whole

ROOT = Path(__file__).resolve().parents[1]
#: The oldest, middle ones and the newest release of the range that pyproject.toml claims.
VERSIONS = ("2.6.0", "2.9.0", "2.11.0", "2.13.0", "2.14.1", "2.15.0")
#: Tests of arithmetic, decoding and loading, which torch can break; the rest reads and writes files.
TESTS = tuple(f"tests/unit/{name}" for name in ("device", "strategy", "families", "decoding"))
#: What takes part in a run; a change of documents is none.
RUNS = ("lantern_accel", "backends", "profiles", "pyproject.toml", "tests/support", *TESTS)
#: Free bytes that an environment is begun with: torch, its CUDA libraries and their archives.
SPACE = 10e9
#: What an environment says about itself.
FACTS = """
import json, platform, torch
from lantern_accel_hpu.kernels import index_dtype
index = str(index_dtype()).removeprefix("torch.")
print(json.dumps({"torch": torch.__version__, "python": platform.python_version(), "index": index}))
"""


@dataclass(frozen=True)
class Stage:
    """One command of an environment: its program there, and how its ``result`` is read.

    ``read`` returns ``passed, failed, skipped`` (counts) and ``notes`` (one line each).
    """

    name: str
    program: str
    arguments: list[str]
    result: str
    read: Callable[[Path], dict[str, Any]]


#: What the first command is given beyond the README's words; a stage may be run again.
FIRST = ("--overwrite", "--stats=first.json")


def stages() -> list[Stage]:
    """Return what every environment runs, in order; results are written to the stage's folder."""
    pytest = ["-m", "pytest", "-p", "no:cacheprovider"]
    hpu = ["conform", "hpu", "--software", "--output=hpu.json"]
    first = ["generate", "red heart", "--seed", "7", "-o", "heart.png", *FIRST]
    found = [
        Stage("first command", "lantern-accel", first, "first.json", _first),
        Stage("conform cpu", "lantern-accel", ["conform", "cpu", "--output=cpu.json"], "cpu.json", _kit),
        Stage("conform hpu --software", "lantern-accel", hpu, "hpu.json", _kit),
    ]  # fmt: skip
    for test in TESTS:
        result = f"{Path(test).name}.xml"
        found.append(
            Stage(test, "python", [*pytest, f"--junit-xml={result}", test], result, _tests)
        )
    return found


# --- reading what a stage wrote ---------------------------------------------------------------------


def _tests(path: Path) -> dict[str, Any]:
    failed, skipped, passed = [], Counter[str](), 0
    for case in ET.parse(path).getroot().iter("testcase"):
        wrong = case.find("failure") if case.find("error") is None else case.find("error")
        left = case.find("skipped")
        if wrong is not None:
            failed.append(f"failed: {case.get('name')}: {_line(wrong.get('message'))}")
        elif left is not None:
            skipped[_line(left.get("message"))] += 1
        else:
            passed += 1
    notes = [f"skipped, {count} tests: {why}" for why, count in sorted(skipped.items())]
    return _counts(passed, len(failed), sum(skipped.values()), failed + notes)


def _kit(path: Path) -> dict[str, Any]:
    outcomes = json.loads(path.read_text(encoding="utf-8"))["outcomes"]
    states = Counter(one["state"] for one in outcomes)
    left = [one for one in outcomes if one["state"] != "passed"]
    notes = [f"{one['state']}: {one['name']}: {_line(one['detail'])}" for one in left]
    return _counts(states["passed"], states["failed"], states["not applicable"], notes)


def _first(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    drew = (
        f"{found['tokens']} tokens in {found['steps']} steps, sha256 {found['tokens_sha256'][:8]}"
    )
    return _counts(1, 0, 0, [drew])


def _counts(passed: int, failed: int, skipped: int, notes: list[str]) -> dict[str, Any]:
    return {"passed": passed, "failed": failed, "skipped": skipped, "notes": notes}


def _line(text: str | None, length: int = 160) -> str:
    text = " ".join((text or "").split())
    return text if len(text) <= length else text[: length - 3] + "..."


# --- running ----------------------------------------------------------------------------------------


def run(
    command: Sequence[str], log: Path, environ: Mapping[str, str], limit: float, folder: Path
) -> tuple[int | None, float]:
    """Run ``command`` in ``folder`` with its output in ``log``; return its exit code and seconds.

    None: stopped after ``limit`` seconds.
    """
    began = time.perf_counter()
    code = None
    with open(log, "wb") as stream:
        try:
            piped: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
            piped |= {"stdout": stream, "cwd": folder, "env": dict(environ)}
            code = subprocess.run(list(command), timeout=limit, **piped).returncode
        except subprocess.TimeoutExpired:
            stream.write(f"\nstopped after {limit / 60:.0f} minutes\n".encode())
        except OSError as error:
            stream.write(f"\n{error}\n".encode())
            code = 127
    return code, time.perf_counter() - began


@dataclass(frozen=True)
class Place:
    """A release's virtual environment, and the folder of its logs and results next to it."""

    version: str
    folder: Path
    limit: float

    @property
    def environment(self) -> Path:
        """Return the virtual environment."""
        return self.folder / f"torch-{self.version}"

    @property
    def results(self) -> Path:
        """Return the folder of logs and results, which outlives the environment."""
        return self.folder / f"torch-{self.version}-results"

    def program(self, name: str) -> str:
        """Return the path of one of the environment's programs."""
        return str(self.environment / ("Scripts" if os.name == "nt" else "bin") / name)

    def environ(self) -> dict[str, str]:
        """Return the variables of a stage: nothing of the caller's Python, a cache of its own."""
        ours = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        return ours | {"LANTERN_ACCEL_CACHE": str(self.results / "cache"), "PYTHONNOUSERSITE": "1"}

    def install(self, python: str) -> dict[str, Any]:
        """Make the environment, or complete it; ``facts`` are its versions, absent if that failed."""
        self.results.mkdir(parents=True, exist_ok=True)
        log, environ = self.results / "install.log", self.environ()
        free = shutil.disk_usage(self.folder).free
        if not self.environment.is_dir() and free < SPACE:
            note = f"failed: {free / 1e9:.0f} GB are free, {SPACE / 1e9:.0f} needed"
            return _counts(0, 1, 0, [note]) | {"seconds": 0.0}
        make = [python, "-m", "venv", str(self.environment)]
        fill = [self.program("python"), "-m", "pip", "install", "--quiet"]
        fill += [f"torch=={self.version}", "-e", ".[test]"]
        # What was asked for, written when it is there: a kept environment is not filled again.
        done = self.environment / "installed.txt"
        asked_for = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        whole = done.is_file() and done.read_text(encoding="utf-8") == asked_for
        seconds = 0.0
        for command in [] if whole else [make, fill]:
            code, took = run(command, log, environ, self.limit, ROOT)
            seconds += took
            if code != 0:
                return _counts(0, 1, 0, [f"failed: {last_lines(log)}"]) | {"seconds": seconds}
        ask = [self.program("python"), "-c", FACTS]
        asked = subprocess.run(ask, capture_output=True, text=True, env=environ)
        if asked.returncode:
            note = f"failed: {_line(asked.stderr[-160:])}"
            return _counts(0, 1, 0, [note]) | {"seconds": seconds}
        done.write_text(asked_for, encoding="utf-8")
        return _counts(1, 0, 0, []) | {"seconds": seconds, "facts": json.loads(asked.stdout)}

    def execute(self, stage: Stage) -> dict[str, Any]:
        """Run a stage and read its result; without one, the last lines of its log are the note."""
        folder = ROOT if stage.program == "python" else self.results
        say("running", label=f"{self.version} {stage.name}", style="bold")
        result, log = self.results / stage.result, self.results / f"{Path(stage.result).stem}.log"
        arguments = [word.replace(stage.result, str(result)) for word in stage.arguments]
        result.unlink(missing_ok=True)
        command = [self.program(stage.program), *arguments]
        code, seconds = run(command, log, self.environ(), self.limit, folder)
        found = _counts(0, 1, 0, [f"failed: {last_lines(log)}"])
        if code in (0, 1) and result.is_file():
            found = stage.read(result)
            if code == 1 and not found["failed"]:
                found = _counts(0, 1, 0, [f"failed: exit code 1: {last_lines(log)}"])
        found["notes"] = [note.replace(f"{self.folder}{os.sep}", "") for note in found["notes"]]
        return found | {"seconds": round(seconds, 1)}

    def remove(self) -> None:
        """Remove the environment; its logs and results stay."""
        if (self.environment / "pyvenv.cfg").is_file():
            shutil.rmtree(self.environment)


def last_lines(log: Path, count: int = 3) -> str:
    """Return the end of a log on one line."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    return _line(" ".join(text.strip().splitlines()[-count:]), 300) or "it said nothing"


def commit() -> str:
    """Return the last commit that changed what runs here, with ``+`` if files differ from it."""

    def git(*words: str) -> str:
        command = ["git", *words, "--", *RUNS]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()

    if shutil.which("git") is None:
        return "unknown"
    return git("log", "-1", "--format=%h", "--abbrev=10") + "+" * bool(git("status", "--porcelain"))


# --- what is kept, and the page ---------------------------------------------------------------------


def finished(row: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Return whether every stage ran and passed."""
    return all(row.get("stages", {}).get(name, {}).get("failed", 1) == 0 for name in names)


def left_over(row: Mapping[str, Any], now: str, names: Sequence[str]) -> dict[str, Any]:
    """Return what of an earlier ``row`` holds: all of a finished one, or what passed on this commit."""
    if finished(row, names):
        return dict(row)
    if row.get("commit") != now:
        return {"commit": now, "stages": {}}
    passed = {name: one for name, one in row["stages"].items() if one["failed"] == 0}
    return dict(row) | {"stages": passed}


def cell(stage: Mapping[str, Any] | None) -> str:
    """Return a stage as a cell of the table."""
    if stage is None:
        return "not run"
    words = ["**failed {failed}**"] if stage["failed"] else []
    words += ["passed {passed}"] if stage["passed"] else []
    words += ["skipped {skipped}"] if stage["skipped"] else []
    return ", ".join(words).format(**stage)


def page(found: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the Markdown page: the table, then what failed or was left out, and how to run the rest."""
    rows = found["versions"]
    order = sorted({*rows, *VERSIONS}, key=_order)
    lines = [
        "# Which releases of torch were run",
        "",
        "`pyproject.toml` claims a range of torch. This page shows the releases of that range that the",
        "project ran under, each in an environment of its own, on the CPU. It is written by",
        "`python tools/torch_range.py`.",
        "",
        f"| torch | Python | {' | '.join(names)} | indices on `hpu` | seconds | commit |",
        "|---|---|" + "---|" * len(names) + "---|---|---|",
    ]
    for version in order:
        row = rows.get(version, {})
        facts, ran = row.get("facts", {}), row.get("stages", {})
        cells = [cell(ran.get(name)) for name in names]
        spent = sum(ran[name]["seconds"] for name in names if name in ran)
        ends = [facts.get("index", ""), f"{spent:.0f}" if ran else "", row.get("commit", "")]
        cells = [facts.get("torch", version), facts.get("python", ""), *cells, *ends]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Seconds are of the stages together, on a machine that may be busy: they are no benchmark. The",
        "software HPU takes int32 indices where torch takes them, and int64 in older releases.",
    ]
    names = ["install", *names]
    for version in order:
        ran = rows.get(version, {}).get("stages", {})
        notes = [f"- {one}: {note}" for one in names if one in ran for note in ran[one]["notes"]]
        if notes:
            lines += ["", f"## torch {version}", "", *(note.replace("<", "&lt;") for note in notes)]
    left = [version for version in order if not finished(rows.get(version, {}), names)]
    lines += ["", "## Run it", ""]
    if left:
        lines += [f"Not passed yet: {', '.join(left)}. This command goes on with them:", ""]
    command = f"python tools/torch_range.py {' '.join(left or order)} -o docs/torch.md"
    lines += ["```", command, "```"]
    return "\n".join(lines) + "\n"


def _order(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


def torch_range(
    versions: list[str] = typer.Argument(
        None, help="Releases of torch; otherwise those of the page."
    ),
    output: Path = typer.Option(..., "--output", "-o", help="The page; JSON is put next to it."),
    keep: Path | None = typer.Option(None, help="Make environments in this folder, and keep them."),
    python: str = typer.Option(sys.executable, help="The Python that environments are made with."),
    minutes: float = typer.Option(60, min=0.1, help="Stop a stage after so many minutes."),
    jobs: int = typer.Option(1, min=1, help="Stages of a release that run at a time."),
    again: bool = typer.Option(False, help="Run releases again that passed."),
) -> None:
    """Run tests, conformance and the first command under several releases of torch."""
    wanted = list(dict.fromkeys(versions or VERSIONS))
    if wrong := [version for version in wanted if len(_order(version)) != 3]:
        raise RequestError(f"{wrong[0]!r} is no release of torch; write it as 2.6.0")
    folder = (keep or cache_dir() / "torch-range").resolve()
    kept = output.with_suffix(".json")
    found = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {"versions": {}}
    plan, now = stages(), commit()
    names, rows = [stage.name for stage in plan], found["versions"]

    def write() -> None:
        write_json(kept, found)
        write_whole(output, page(found, names).encode())

    failed = []
    for version in wanted:
        row = {} if again else rows.get(version, {})
        row = rows[version] = left_over(row, now, ["install", *names])
        if finished(row, ["install", *names]):
            say("passed before", label=version, style="dim")
            continue
        place = Place(version, folder, 60 * minutes)
        say(f"installing; logs are in {folder}", label=version, style="bold")
        row["stages"]["install"] = installed = place.install(python)
        row["facts"] = installed.pop("facts", {})
        write()
        missing = [] if installed["failed"] else [s for s in plan if s.name not in row["stages"]]
        with ThreadPoolExecutor(jobs) as pool:
            running = {pool.submit(place.execute, stage): stage.name for stage in missing}
            try:
                for done in as_completed(running):
                    one = row["stages"][running[done]] = done.result()
                    write()
                    say(f"{cell(one)}, {one['seconds']:.0f} s", label=f"{version} {running[done]}")
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        if not finished(row, ["install", *names]):
            failed.append(version)
            for note in (note for one in row["stages"].values() for note in one["notes"]):
                if note.startswith("failed"):
                    say(note, label=version, style="bold red")
        if keep is None:
            place.remove()
    write()
    say(str(output), label="page", style="bold green")
    if failed:
        raise LanternError(f"not passed: torch {', '.join(failed)}; logs are in {folder}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0, or 2 with one sentence."""
    return run_single(torch_range, argv)


if __name__ == "__main__":
    sys.exit(main())
