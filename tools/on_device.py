"""Check, tune and measure one device in one go: ``python tools/on_device.py --device NAME -o FOLDER``.

For who has a card that this project's authors have not. Every stage is a ``lantern-accel`` command in a
process of its own, so that a device that takes a process down costs one stage; a run that was
interrupted goes on where it stopped. ``report.md`` in the folder is what to send back.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from lantern_accel.cli.console import say
from lantern_accel.errors import BackendError, LanternError, RequestError, did_you_mean
from lantern_accel.files import write_json, write_whole
from lantern_accel.plugins import choose_device

#: Environment that changes what runs; the report shows what was set.
SHOWN = ("LANTERN_", "PT_", "HABANA_", "HLS_", "CUDA_", "TORCH", "OMP_")


@dataclass(frozen=True)
class Stage:
    """One command: its arguments, the file that shows it is done, and how it is shown."""

    name: str
    arguments: list[str]
    result: Path
    show: Callable[[dict[str, Any]], str]


def stages(device: str, folder: Path, quick: bool) -> list[Stage]:
    """Return all stages in order; ``quick`` measures less, for a first look."""
    on = ["--device", device]
    batches = ["--batch", "1"] if quick else ["--batch", "1", "--batch", "4", "--batch", "8"]
    repeats = ["--repeats", "1" if quick else "5"]
    groups = [f"--only={name}" for name in ("kv", "attention", "accept")] if quick else []

    def at(name: str) -> Path:
        return folder / name

    found = [
        Stage("device", ["devices", device, "--json"], at("device.json"), _facts),
        Stage(
            "conform",
            ["conform", device, *groups, f"--json={at('conform.json')}"],
            at("conform.json"),
            _conform,
        ),
        Stage(
            "generate",
            [
                *["generate", "red heart", "dog face", *on, "--seed=7", "--grid", "--scale=4"],
                *["--quiet", f"--output={at('pictures.png')}", f"--json={at('generate.json')}"],
            ],
            at("generate.json"),
            _generate,
        ),
        Stage(
            "bench",
            ["bench", *on, *batches, *repeats, f"--output={at('bench.json')}"],
            at("bench.json"),
            _bench,
        ),
        Stage(
            "tune", ["tune", *on, *repeats, f"--output={at('tune.json')}"], at("tune.json"), _tune
        ),
    ]
    if "profile" in _commands():
        size = ["--quick"] if quick else []
        arguments = ["profile", *on, *size, f"--output={at('profile.json')}"]
        found.append(Stage("profile", arguments, at("profile.json"), _profile))
    return found


def _commands() -> set[str]:
    from lantern_accel.cli.app import app

    return {str(command.name) for command in app.registered_commands}


# --- what the report says -------------------------------------------------------------------------


def _facts(found: dict[str, Any]) -> str:
    lines = [
        f"- {name}: {'; '.join(value) if isinstance(value, list) else value}"
        for name, value in found.items()
        if value not in (None, [])
    ]
    return "\n".join(lines)


def _conform(found: dict[str, Any]) -> str:
    outcomes = found["outcomes"]
    states = [one["state"] for one in outcomes]
    head = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    lines = [f"- {o['name']}: {o['detail']}" for o in outcomes if o["state"] != "passed"]
    return "\n".join([head, "", *lines])


def _generate(found: dict[str, Any]) -> str:
    return (
        f"`pictures.png` shows a heart and a dog's face; {found['tokens']} tokens in {found['steps']} "
        f"steps, {found['step_compression']:.2f} tokens a step, {found['dtype']}"
    )


def _bench(found: dict[str, Any]) -> str:
    from lantern_accel.bench import BenchReport, table

    return table(BenchReport.model_validate(found))


def _tune(found: dict[str, Any]) -> str:
    paths = ",".join("".join(map(str, path)) for path in found["tree"]["paths"])
    ratio = found["tokens_per_second"] / found["vanilla_tokens_per_second"]
    return f"`{paths}`: {found['tokens_per_second']:.0f} tokens/s, {ratio:.2f}x vanilla"


def _profile(found: dict[str, Any]) -> str:
    return "in `profile.json`, for `lantern-accel compare`"


# --- running --------------------------------------------------------------------------------------


def run(stage: Stage, folder: Path) -> tuple[bool, float]:
    """Run a stage with its output in ``NAME.log``; return whether its result is there, and seconds."""
    began = time.perf_counter()
    code = "import sys; from lantern_accel.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *stage.arguments]
    with open(folder / f"{stage.name}.log", "wb") as log:
        piped = stage.name == "device"
        done = subprocess.run(
            command, stdout=subprocess.PIPE if piped else log, stderr=log, stdin=subprocess.DEVNULL
        )
    if piped and done.returncode == 0:
        write_whole(stage.result, lambda stream: stream.write(done.stdout))
    # A failed check is a result, with exit code 1; a refusal is none.
    return done.returncode in (0, 1) and stage.result.is_file(), time.perf_counter() - began


def _last_lines(folder: Path, name: str, count: int = 3) -> str:
    text = (folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
    return " ".join(line.strip() for line in text.splitlines()[-count:]) or "it said nothing"


def write_report(device: str, folder: Path, entries: dict[str, dict[str, Any]]) -> None:
    """Write ``report.md`` and ``report.json`` from what is there."""
    import lantern_accel

    variables = {k: v for k, v in sorted(os.environ.items()) if k.startswith(SHOWN)}
    lines = [f"# lantern_accel {lantern_accel.__version__} on `{device}`", ""]
    lines += [f"- `{name}={value}`" for name, value in variables.items()]
    for name, entry in entries.items():
        lines += ["", f"## {name}", "", f"`lantern-accel {entry['command']}`", "", entry["text"]]
    text = "\n".join(lines) + "\n"
    write_whole(folder / "report.md", lambda stream: stream.write(text.encode()))
    whole = {"device": device, "environment": variables, "stages": entries}
    write_json(folder / "report.json", whole)


def on_device(
    device: str = typer.Option(..., help="A backend's name, or NAME:INDEX."),
    output: Path = typer.Option(..., "--output", "-o", help="The folder for all results."),
    only: list[str] = typer.Option([], help="A stage; repeat for several. Default: all."),
    quick: bool = typer.Option(False, help="Fewer checks, batch sizes and samples: a first look."),
    again: bool = typer.Option(False, help="Run stages again whose result is there."),
) -> None:
    """Check, tune and measure a device, and write the report to send back."""
    choose_device(device)  # an absent device is told before any work
    plan = stages(device, output, quick)
    names = [stage.name for stage in plan]
    for name in only:
        if name not in names:
            raise RequestError(f"no stage is named {name!r}{did_you_mean(name, names)}")
    output.mkdir(parents=True, exist_ok=True)
    entries: dict[str, dict[str, Any]] = {}
    failed = []
    for number, stage in enumerate(plan, 1):
        if only and stage.name not in only:
            continue
        label = f"{stage.name} ({number} of {len(plan)})"
        if again:
            stage.result.unlink(missing_ok=True)
        # bench completes its own file, so it is asked again; the others are done where a file is.
        if stage.result.is_file() and stage.name != "bench":
            works, seconds = True, 0.0
            say("has its result already", label=label, style="dim")
        else:
            say("running", label=label, style="bold")
            works, seconds = run(stage, output)
            say(f"{'done' if works else 'FAILED'}, {seconds:.0f} s", label=label)
        text = f"failed: {_last_lines(output, stage.name)}"
        if works:
            text = stage.show(json.loads(stage.result.read_text(encoding="utf-8")))
        else:
            failed.append(stage.name)
        entries[stage.name] = {
            "command": " ".join(stage.arguments),
            "works": works,
            "seconds": seconds,
            "text": text,
        }
        write_report(device, output, entries)
    say(str(output / "report.md"), label="report", style="bold green")
    if failed:
        raise BackendError(f"stages failed: {', '.join(failed)}; their logs are in {output}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0, or 2 with one sentence."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(on_device)
    try:
        app(args=None if argv is None else list(argv))
    except SystemExit as stop:  # how typer ends, also after a command that worked
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except LanternError as error:
        say(str(error), label="error", style="bold red", to_stderr=True)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
