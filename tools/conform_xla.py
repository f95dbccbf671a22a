"""Check the backend ``xla`` on PJRT's CPU client: ``python tools/conform_xla.py -o FOLDER``.

Makes an environment of its own in the folder (torch and torch_xla as the extra ``xla`` pins them, about
3 GB), draws two pictures with every strategy there and on the CPU and compares the tokens, runs the whole
kit, and writes ``xla.md``: versions, times, and the table. ``--profile`` measures the CPU and XLA's CPU
client in that environment, and compares them. A stage whose result is there is not run again. Compiling
for the CPU client takes an hour and more on two cores, so this is no part of the tests.

Every check of the kit runs in a process of its own: what the CPU client has compiled stays mapped as long
as its process lives, and Linux gives a process 65,530 mappings, which the kit as a whole exceeds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from lantern_accel.cli.console import say
from lantern_accel.errors import RequestError
from lantern_accel.files import write_json, write_whole

ROOT = Path(__file__).resolve().parents[1]
#: What is drawn: the README's picture, which leaves little to chance, and one that leaves much.
PROMPTS = ("red heart", "dog face")
#: Strategies whose tokens must be the CPU's.
STRATEGIES = ("vanilla", "eagle", "eagle2", "lantern", "lantern++", "scd")
#: What a comparison is measured with: enough to judge the two, and no longer. Strategies are exact: the
#: price of a relaxed one is no matter of the device, and on a lazy one it takes an hour.
MEASURED = ["--quick", "--strategy", "vanilla,scd", "--dtype", "float32", "--resume"]


@dataclass(frozen=True)
class Stage:
    """One command of the environment, and the file that shows that it is done."""

    name: str
    arguments: list[str]
    result: str


def picture(prompt: str, strategy: str, device: str) -> str:
    """Return the name of a picture's files, without a suffix."""
    return f"{prompt.replace(' ', '-')}-{strategy}-{device}"


def stages(checks: Sequence[str], profile: bool) -> list[Stage]:
    """Return what is run, in order; results are named within the folder."""
    found = []
    for prompt in PROMPTS:
        for strategy in STRATEGIES:
            for device in ("cpu", "xla"):
                name = picture(prompt, strategy, device)
                draw = ["generate", prompt, "--overwrite", "--seed", "7", "--strategy", strategy]
                draw += ["--dtype", "float32", "--device", device]
                draw += ["-o", f"{name}.png", f"--stats={name}.json"]
                found.append(Stage(name, draw, f"{name}.json"))
    for check in checks:
        words = ["conform", "xla", "--only", check, "--limit", "3600", f"--output=kit/{check}.json"]
        found.append(Stage(check, words, f"kit/{check}.json"))
    if profile:
        for device in ("cpu", "xla"):
            run = ["profile", "--device", device, "-o", f"run-{device}.json", *MEASURED]
            found.append(Stage(f"profile {device}", run, f"run-{device}.json"))
        report = ["compare", "run-cpu.json", "run-xla.json", "-o", "report.md"]
        found.append(Stage("compare", report, "report.md"))
    return found


#: Prints the names of the kit's checks for this backend.
NAMES = """
from lantern_accel.device.plugins import open_backend
from lantern_accel.testing.kit import checks_of
with open_backend("xla") as backend:
    print("checks:", *checks_of(backend))
"""


def checks_of_kit(programs: Path, variables: Mapping[str, str]) -> list[str]:
    """Return the names of the kit's checks, as the environment has them."""
    words = [str(programs / "python"), "-c", NAMES]
    done = subprocess.run(words, env=dict(variables), capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("checks: ")]
    if not lines:
        raise RequestError(f"the backend xla does not open here: {done.stderr[-300:].strip()}")
    return lines[-1].split()[1:]


def environ(folder: Path) -> dict[str, str]:
    """Return the variables of a stage: the CPU client, one thread pool, a cache of its own."""
    ours = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    return ours | {
        "PJRT_DEVICE": "CPU",
        "LANTERN_ACCEL_CACHE": str(folder / "cache"),
        "PYTHONNOUSERSITE": "1",
    }


def install(folder: Path, python: str) -> Path:
    """Make the environment unless it is there; return the folder of its programs."""
    place = folder / "environment"
    programs = place / ("Scripts" if os.name == "nt" else "bin")
    done = place / "installed.txt"
    if not done.is_file():
        say("torch, torch_xla and this project (about 3 GB)", label="install", style="bold")
        subprocess.run([python, "-m", "venv", str(place)], check=True)
        fill = [str(programs / "python"), "-m", "pip", "install", "--quiet", "-e", ".[xla,report]"]
        subprocess.run(fill, check=True, cwd=ROOT)
        write_whole(done, b"installed\n")
    return programs


def run(stage: Stage, programs: Path, folder: Path, variables: Mapping[str, str]) -> float | None:
    """Run a stage with its output in a log; return its seconds, None where it left no result."""
    began = time.perf_counter()
    log = folder / "logs" / f"{stage.name.replace(' ', '-')}.log"
    log.parent.mkdir(exist_ok=True)
    (folder / stage.result).parent.mkdir(exist_ok=True)
    with open(log, "wb") as stream:
        subprocess.run(
            [str(programs / "lantern-accel"), *stage.arguments],
            cwd=folder,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            check=False,
        )
    return time.perf_counter() - began if finished(folder / stage.result) else None


def finished(result: Path) -> bool:
    """Return whether a stage's result is there and whole; a run that was interrupted is not."""
    if result.suffix != ".json":
        return result.is_file()
    return bool(found := _read(result)) and found.get("state", "complete") == "complete"


def page(folder: Path, checks: Sequence[str], seconds: Mapping[str, float]) -> str:
    """Return what was found as Markdown; what has no result is said to have none."""
    lines = [
        "# The backend xla on PJRT's CPU client",
        "",
        "| prompt | strategy | CPU | XLA | |",
        "|---|---|---|---|---|",
    ]
    for prompt in PROMPTS:
        for strategy in STRATEGIES:
            files = [f"{picture(prompt, strategy, device)}.json" for device in ("cpu", "xla")]
            found = [_read(folder / name) for name in files]
            sums = [one["tokens_sha256"][:12] if one else "no result" for one in found]
            alike = "the same tokens" if all(found) and sums[0] == sums[1] else "**not the same**"
            lines.append(f"| {prompt} | {strategy} | {sums[0]} | {sums[1]} | {alike} |")
    runs = {check: _read(folder / f"kit/{check}.json") for check in checks}
    outcomes = [one for run in runs.values() if run for one in run["outcomes"]]
    missing = [check for check, run in runs.items() if not run]
    if not outcomes:
        return "\n".join([*lines, "", "The kit has no result.", ""])
    states = [one["state"] for one in outcomes]
    counts = ", ".join(f"{states.count(s)} {s}" for s in ("passed", "failed", "not applicable"))
    took = sum(one["seconds"] for one in outcomes)
    lines += ["", f"`lantern-accel conform xla --only CHECK`, one process per check: {counts},"]
    lines += [f"in {took / 60:.0f} minutes. Without a result: {', '.join(missing) or 'none'}."]
    kit = next(run for run in runs.values() if run)
    lines += [f"{kit['device_name']}, torch {kit['torch']}.", "", "| check | | s | found |"]
    lines.append("|---|---|---|---|")
    for one in outcomes:
        detail = one["detail"].replace("|", "\\|")
        lines.append(f"| {one['name']} | {one['state']} | {one['seconds']:.0f} | {detail} |")
    drawn = [f"{name}: {value:.0f} s" for name, value in seconds.items() if name not in checks]
    return "\n".join([*lines, "", *(["; ".join(drawn), ""] if drawn else [])])


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _write(path: Path, text: str) -> None:
    write_whole(path, text)


def main(
    output: Path = typer.Option(
        ..., "-o", "--output", help="A folder for environment and results."
    ),
    profile: bool = typer.Option(False, help="Also measure and compare; needs a quiet machine."),
    python: str = typer.Option(sys.executable, help="The Python to make the environment with."),
) -> None:
    """Run every stage that has no result yet, and write the page after each."""
    folder = output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    programs = install(folder, python)
    times = folder / "seconds.json"
    seconds: dict[str, float] = _read(times)
    checks = checks_of_kit(programs, environ(folder))
    for stage in stages(checks, profile):
        if not finished(folder / stage.result):
            took = run(stage, programs, folder, environ(folder))
            shown = "no result, see its log" if took is None else f"{took:.0f} s"
            say(shown, label=stage.name, style="red" if took is None else "bold")
            if took is not None:
                seconds[stage.name] = took
                write_json(times, seconds)
        _write(folder / "xla.md", page(folder, checks, seconds))
    runs = [_read(folder / f"kit/{check}.json") for check in checks]
    failed = [one for run in runs if run for one in run["outcomes"] if one["state"] == "failed"]
    if failed or not all(runs):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
