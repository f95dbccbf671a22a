"""Check, tune and measure a device: ``python tools/on_device.py --device NAME -o FOLDER``.

For people who have a card that the authors of this project do not have. Every stage is a command in a
process of its own, so that a device that takes a process down costs one stage. The first ones show the
device's own kernels and what a step costs at real sizes, the next that the device is right; what is left
follows. ``--minutes 9.5`` ends in time, and the same command goes on: a stage that was done is not run
again, and one that was stopped is completed after those that have not begun. ``report.md`` in the folder
is what to send back; it is written after every stage.

Nothing need be installed: the tree is enough, with wheels of the packages that the machine lacks, which
``--pack pydantic,platformdirs`` fetches into ``.wheels`` where there is a network.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent
#: A script's own folder is no package, and a tree that is not installed has its backends apart.
TREE = [str(TOOLS.parent / name) for name in (".", "backends", "profiles")]
sys.path[:0] = [one for one in TREE if one not in sys.path]

from tools import on_device_pack as wheels  # noqa: E402

SITES = wheels.unpack_wheels()
sys.path[:0] = SITES

try:
    import typer

    from lantern_accel.cli import run_single
    from lantern_accel.cli.console import say
    from lantern_accel.device.plugins import choose_device
    from lantern_accel.errors import BackendError, RequestError, did_you_mean
    from lantern_accel.files import read_toml_file, write_json, write_whole
    from tools.on_device_report import (
        stored_kernel_lines,
        stored_kernels,
        target_lines,
        targets,
        weight_lines,
    )
    from tools.on_device_stages import JOBS, Stage, stages
except ModuleNotFoundError as missing:
    sys.exit(
        f"{missing.name} is not installed; install it, or run `python tools/on_device.py --pack "
        f"{missing.name}` where there is a network and bring {wheels.WHEELS.name} along"
    )

#: Environment that changes what runs; the report shows what was set.
SHOWN = ("LANTERN_", "PT_", "HABANA_", "HLS_", "CUDA_", "TORCH", "OMP_")
#: Seconds between an interrupt and a kill.
PATIENCE = 10.0
#: What stages run: a shell's background jobs ignore interrupts, and so would what they start.
START = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
COMMAND = "from lantern_accel.cli import main; sys.exit(main(sys.argv[1:]))"
SCRIPT = (
    f"import runpy; sys.path.insert(0, {str(TOOLS)!r}); sys.argv = sys.argv[1:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
#: Seconds without which no stage begins, and those that are kept for ending the last one; at most these
#: shares of all.
LEAST, KEPT = (10.0, 0.05), (12.0, 0.1)


# --- running --------------------------------------------------------------------------------------


def run(
    stage: Stage, folder: Path, environ: Mapping[str, str], limit: float | None = None
) -> tuple[bool, float]:
    """Run a stage with its output in ``NAME.log``; return whether it came to its end, and seconds.

    ``limit``: seconds after which it is interrupted, and killed where it does not end then.
    """
    began = time.perf_counter()
    command = [sys.executable, "-c", START + (SCRIPT if stage.script else COMMAND)]
    if stage.script:
        command.append(str(TOOLS / stage.script))
    resume = [stage.resume] if stage.resume and stage.result.is_file() else []
    printed = folder / f"{stage.name}.out"  # what `devices` says is its result
    with open(folder / f"{stage.name}.log", "wb") as log, open(printed, "wb") as out:
        process = subprocess.Popen(
            [*command, *stage.arguments, *stage.extra, *resume],
            stdout=out if stage.name == "device" else log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=dict(environ),
            start_new_session=True,
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            log.write(b"\nstopped: its time is over; the same command goes on\n")
        finally:
            for number in (signal.SIGINT, signal.SIGKILL):
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                        os.killpg(process.pid, number)
                        process.wait(PATIENCE)
    if stage.name == "device" and process.returncode == 0:
        write_whole(stage.result, printed.read_bytes())
    printed.unlink()
    # A failed check is a result, with exit code 1; a refusal is none.
    done = process.returncode in (0, 1) and stage.result.is_file()
    return done, time.perf_counter() - began


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of the stages; a tree that is not installed is made importable."""
    found = {**os.environ, "PYTHONUNBUFFERED": "1"}
    paths = [*SITES, *TREE]
    try:
        importlib.metadata.distribution("lantern-accel")
    except importlib.metadata.PackageNotFoundError:
        paths.insert(0, str(entry_points(folder / "site")))
    found["PYTHONPATH"] = os.pathsep.join([*paths, found.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return found


def entry_points(site: Path) -> Path:
    """Write what an installation would: the package's name and version, backends and commands."""
    project = read_toml_file(TOOLS.parent / "pyproject.toml")["project"]
    info = site / f"lantern_accel-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    head = f"Metadata-Version: 2.1\nName: lantern-accel\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(head)
    with (info / "entry_points.txt").open("w") as file:
        for group, points in project["entry-points"].items():
            file.write("\n".join([f"[{group}]", *(f"{k} = {v}" for k, v in points.items()), "\n"]))
    return site


def format_stage(stage: Stage, folder: Path, works: bool) -> str:
    """Return what a stage found as text, or why there is none; never raises."""
    text = "" if works else f"failed or stopped: {_last_lines(folder, stage.name)}"
    if not stage.result.is_file():
        return text
    try:
        found = stage.show(json.loads(stage.result.read_text(encoding="utf-8")))
    except Exception as error:  # whatever a result that is only half there makes its reader raise
        found = f"`{stage.result.name}` cannot be shown: {type(error).__name__}: {error}"
    return "\n\n".join(filter(None, (text, found)))


def _last_lines(folder: Path, name: str, count: int = 3) -> str:
    text = (folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
    return " ".join(line.strip() for line in text.splitlines()[-count:]) or "it said nothing"


def write_report(device: str, folder: Path, entries: dict[str, dict[str, Any]]) -> None:
    """Write ``report.md`` and ``report.json`` from what is there."""
    import lantern_accel

    kept = stored_kernels()
    variables = {k: v for k, v in sorted(os.environ.items()) if k.startswith(SHOWN)}
    lines = [f"# lantern_accel {lantern_accel.__version__} on `{device}`", ""]
    lines += [f"- `{name}={value}`" for name, value in variables.items()]
    lines += target_lines(folder) + weight_lines(folder) + stored_kernel_lines(kept)
    for name, entry in entries.items():
        lines += ["", f"## {name}", "", f"`{entry['command']}`", "", entry["text"]]
    text = "\n".join(lines) + "\n"
    write_whole(folder / "report.md", text)
    whole = {
        "device": device,
        "environment": variables,
        "kernels": kept,
        "targets": targets(folder),
        "stages": entries,
    }
    write_json(folder / "report.json", whole)


def earlier(device: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the stages of an earlier run into the folder; {} where it was another device's."""
    try:
        found = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        return dict(found["stages"]) if found["device"] == device else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def pack(names: str, python: str) -> None:
    """Fetch wheels, and say what travels."""
    found = wheels.fetch([name for name in names.split(",") if name], python)
    for path in found:
        say(f"{path.stat().st_size / 2**20:.2f} MiB", label=path.name)
    say(f"{wheels.travels() / 2**20:.1f} MiB with the tree", label=str(wheels.WHEELS), style="bold")


def on_device(
    device: str | None = typer.Option(None, help="A backend's name, or NAME:INDEX."),
    output: Path | None = typer.Option(None, "--output", "-o", help="The folder for all results."),
    only: list[str] = typer.Option([], help="A stage; repeat for several. Default: all."),
    quick: bool = typer.Option(False, help="Fewer checks, batch sizes and samples: a first look."),
    again: bool = typer.Option(False, help="Run stages again that were done."),
    size: list[str] = typer.Option([], help="Sizes of `stepcost`; XL, B and 3B otherwise."),
    minutes: float = typer.Option(
        None, min=0.1, help="Stop in time; the same command goes on where it stopped."
    ),
    llamagen: Path = typer.Option(None, help="A clone of FoundationVision/LlamaGen, to race."),
    race_size: str = typer.Option("XL", help="B, L, XL, XXL or 3B."),
    packed: str | None = typer.Option(
        None,
        "--pack",
        metavar="NAME,...",
        help="Only fetch wheels of these packages, and of what they require, for a machine without a "
        "network.",
    ),
    python: str = typer.Option("3.12", help="That machine's Python."),
) -> None:
    """Check, tune and measure a device, and write the report to send back."""
    if packed is not None:
        return pack(packed, python)
    if device is None or output is None:
        raise RequestError("name the device with --device and a folder for results with -o")
    environ = environment(output)
    sys.path[:0] = [
        path for path in environ["PYTHONPATH"].split(os.pathsep) if path not in sys.path
    ]
    chosen = choose_device(device)  # an absent device is told before any work
    jobs = len(chosen.processes(JOBS))
    if jobs < JOBS:
        say(f"{jobs} at one time may hold {device}", label="processes", style="dim")
    plan = stages(
        device,
        output,
        quick,
        variants=chosen.spec.variants,
        sizes=size,
        clone=llamagen,
        race_size=race_size,
        seconds=60 * minutes if minutes else None,
        jobs=jobs,
    )
    names = [stage.name for stage in plan]
    for name in only:
        if name not in names:
            raise RequestError(f"no stage is named {name!r}{did_you_mean(name, names)}")
    output.mkdir(parents=True, exist_ok=True)
    entries = earlier(device, output)
    failed: list[str] = []
    open_yet: list[str] = []
    seconds = 60 * minutes if minutes else float("inf")
    finish = time.monotonic() + seconds - min(KEPT[0], KEPT[1] * seconds)
    stopped = {one: entry.get("stopped", 0) for one, entry in entries.items()}
    # What was stopped waits for what has not begun, and gets more time then.
    for stage in sorted(plan, key=lambda one: stopped.get(one.name, 0)):
        if only and stage.name not in only:
            continue
        label = f"{stage.name} ({names.index(stage.name) + 1} of {len(plan)})"
        before = entries.get(stage.name, {})
        if again:
            stage.result.unlink(missing_ok=True)
        elif before.get("works") and before["command"] == stage.command and stage.result.is_file():
            say("has its result already", label=label, style="dim")
            continue
        left = finish - time.monotonic()
        if left < min(LEAST[0], LEAST[1] * seconds):
            say("no time is left", label=label, style="dim")
            open_yet.append(stage.name)
            continue
        tried = stopped.get(stage.name, 0)
        limit = min(left, stage.share * (1 + tried) * seconds)
        say("running", label=label, style="bold")
        works, took = run(stage, output, environ, limit if minutes else None)
        late = not works and took >= limit
        how = "done" if works else "stopped" if late else "FAILED"
        say(f"{how}, {took:.0f} s", label=label)
        if not works:
            (open_yet if late else failed).append(stage.name)
        entries[stage.name] = {
            "command": stage.command,
            "works": works,
            "stopped": tried + 1 if late else 0,
            "seconds": took,
            "text": format_stage(stage, output, works),
        }
        write_report(device, output, {one: entries[one] for one in names if one in entries})
    say(str(output / "report.md"), label="report", style="bold green")
    if open_yet:
        say(", ".join(open_yet), label="the same command goes on with", style="bold")
    if failed:
        raise BackendError(f"stages failed: {', '.join(failed)}; their logs are in {output}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0, or 2 with one sentence."""
    return run_single(on_device, argv)


if __name__ == "__main__":
    sys.exit(main())
