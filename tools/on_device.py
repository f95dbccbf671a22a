"""Check, tune and measure a device: ``python tools/on_device.py --device NAME -o FOLDER``.

For people who have a card that the authors of this project do not have. Every stage is a
``lantern-accel`` command in a process of its own, so that a device that takes a process down costs
one stage; a run that was interrupted goes on where it stopped. ``report.md`` in the folder is what
to send back: it begins with what is asked of a step at real sizes and what was found. A backend's
further sets of options are compared with its default, the best of them are judged, and the official
samplers are raced where their clones are given.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from lantern_accel.cli import run_single
from lantern_accel.cli.console import say
from lantern_accel.device.plugins import choose_device
from lantern_accel.errors import BackendError, RequestError, did_you_mean
from lantern_accel.files import write_json, write_whole

TOOLS = Path(__file__).resolve().parent
sys.path.insert(0, str(TOOLS.parent))  # a script's own folder is no package

from tools.on_device_report import (  # noqa: E402
    bench_text,
    conform_text,
    facts_text,
    generate_text,
    profile_text,
    race_text,
    stepcost_text,
    target_lines,
    targets,
    tune_text,
)

#: Environment that changes what runs; the report shows what was set.
SHOWN = ("LANTERN_", "PT_", "HABANA_", "HLS_", "CUDA_", "TORCH", "OMP_")


#: Sizes whose step costs are measured; ``quick`` takes the first.
SIZES = ("llamagen-xl-384", "llamagen-3b-384")
RACES = {"llamagen": "race_official", "lantern": "race_lantern"}


@dataclass(frozen=True)
class Stage:
    """One command: its arguments, the file that shows it is done, and how it is shown.

    ``script``: one of ``tools/`` instead of ``lantern-accel``. ``resumes``: completes its own file, so
    that it is run again.
    """

    name: str
    arguments: list[str]
    result: Path
    show: Callable[[dict[str, Any]], str]
    script: str = ""
    resumes: bool = False


def stages(
    device: str,
    folder: Path,
    quick: bool,
    *,
    variants: Sequence[Mapping[str, Any]] = ({},),
    sizes: Sequence[str] = (),
    clones: Mapping[str, Path] | None = None,
    race_size: str = "XL",
) -> list[Stage]:
    """Return all stages in order; ``quick`` measures less, for a first look.

    ``variants``: sets of the backend's options, the default first. ``clones``: folders of the official
    code, by the keys of ``RACES``.
    """
    on = ["--device", device]
    batches = ["--batch", "1"] if quick else ["--batch", "1", "--batch", "4", "--batch", "8"]
    repeats = ["--repeats", "1" if quick else "5"]
    groups = [f"--only={name}" for name in ("kv", "attention", "accept")] if quick else []

    def at(name: str) -> Path:
        return folder / name

    found = [
        Stage("device", ["devices", device, "--json"], at("device.json"), facts_text),
        Stage(
            "conform",
            ["conform", device, *groups, f"--output={at('conform.json')}"],
            at("conform.json"),
            conform_text,
        ),
        Stage(
            "generate",
            [
                *[
                    "generate",
                    "red heart",
                    "dog face",
                    *on,
                    "--overwrite",
                    "--seed=7",
                    "--grid",
                    "--scale=4",
                ],
                *["--quiet", f"--output={at('pictures.png')}", f"--stats={at('generate.json')}"],
            ],
            at("generate.json"),
            generate_text,
        ),
        Stage(
            "bench",
            ["bench", *on, *batches, *repeats, f"--output={at('bench.json')}"],
            at("bench.json"),
            bench_text,
            resumes=True,
        ),
        Stage(
            "tune",
            ["tune", *on, *repeats, f"--output={at('tune.json')}"],
            at("tune.json"),
            tune_text,
        ),
    ]
    if "profile" in _commands():
        size = ["--quick"] if quick else []
        arguments = ["profile", *on, *size, f"--output={at('profile.json')}"]
        found.append(Stage("profile", arguments, at("profile.json"), profile_text))

    def stepcost(size: str, options: Mapping[str, Any], images: list[str]) -> Stage:
        name = f"stepcost-{Path(size).stem}{label(options)}"
        nodes = "--nodes=8,60" if quick else "--nodes=8,16,32,60"
        arguments = ["stepcost", f"--size={size}", *on, *images, nodes, *repeats]
        arguments += [f"--option={key}={value}" for key, value in options.items()]
        result = at(f"{name}.json")
        return Stage(name, [*arguments, f"--output={result}"], result, stepcost_text, resumes=True)

    default, *others = variants
    sizes = sizes or (SIZES[:1] if quick else SIZES)
    found += [stepcost(size, default, batches) for size in sizes]
    for options in () if quick else others:
        given = [f"--option={key}={value}" for key, value in options.items()]
        name = f"conform{label(options)}"
        only = [f"--only={group}" for group in ("kv", "attention", "replay")]
        arguments = ["conform", device, *only, *given, f"--output={at(name + '.json')}"]
        found.append(Stage(name, arguments, at(f"{name}.json"), conform_text))
        found += [stepcost(size, options, ["--batch", "1"]) for size in sizes]
    for key, clone in (clones or {}).items():
        name = RACES[key]
        result = at(f"{name}.json")
        arguments = [str(clone), f"--size={race_size}", *on, *repeats, f"--output={result}"]
        if key == "llamagen":
            runners = ("official", "official-compiled", "gpt-fast", "ours")
            arguments += ["--warmups=3", *(f"--runner={runner}" for runner in runners)]
        found.append(Stage(name, arguments, result, race_text, script=f"{name}.py", resumes=True))
    return found


def label(options: Mapping[str, Any]) -> str:
    """Name a set of options in a file's name; "" for the default."""
    return "".join(f"-{key}={value}" for key, value in options.items())


def _commands() -> set[str]:
    from lantern_accel.cli.app import app

    return {str(command.name) for command in app.registered_commands}


# --- running --------------------------------------------------------------------------------------


def run(
    stage: Stage, folder: Path, environ: Mapping[str, str], limit: float | None = None
) -> tuple[bool, float]:
    """Run a stage with its output in ``NAME.log``; return whether its result is there, and seconds.

    ``limit``: seconds after which it is stopped.
    """
    began = time.perf_counter()
    code = "import sys; from lantern_accel.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, *(["-c", code] if not stage.script else [str(TOOLS / stage.script)])]
    with open(folder / f"{stage.name}.log", "wb") as log:
        piped = stage.name == "device"
        try:
            done = subprocess.run(
                [*command, *stage.arguments],
                stdout=subprocess.PIPE if piped else log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=dict(environ),
                timeout=limit,
            )
        except subprocess.TimeoutExpired:
            log.write(b"\nstopped: the minutes that were given are over\n")
            return False, time.perf_counter() - began
    if piped and done.returncode == 0:
        write_whole(stage.result, done.stdout)
    # A failed check is a result, with exit code 1; a refusal is none.
    return done.returncode in (0, 1) and stage.result.is_file(), time.perf_counter() - began


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of the stages; a tree that is not installed is made importable."""
    found = dict(os.environ)
    paths = [str(TOOLS.parent), str(TOOLS.parent / "backends")]
    try:
        importlib.metadata.distribution("lantern-accel")
    except importlib.metadata.PackageNotFoundError:
        paths.insert(0, str(entry_points(folder / "site")))
    found["PYTHONPATH"] = os.pathsep.join([*paths, found.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return found


def entry_points(site: Path) -> Path:
    """Write what an installation would: the package's name and version, and its backends."""
    text = (TOOLS.parent / "pyproject.toml").read_text(encoding="utf-8")
    version = re.search(r'^version = "(.+)"', text, re.M)
    block = re.search(r"^\[project\.entry-points\.lantern_accel\]\n((?:\w+ = .+\n)+)", text, re.M)
    assert version is not None and block is not None
    info = site / f"lantern_accel-{version[1]}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    head = f"Metadata-Version: 2.1\nName: lantern-accel\nVersion: {version[1]}\n"
    (info / "METADATA").write_text(head)
    (info / "entry_points.txt").write_text(f"[lantern_accel]\n{block[1].replace(chr(34), '')}")
    return site


def _last_lines(folder: Path, name: str, count: int = 3) -> str:
    text = (folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
    return " ".join(line.strip() for line in text.splitlines()[-count:]) or "it said nothing"


def write_report(device: str, folder: Path, entries: dict[str, dict[str, Any]]) -> None:
    """Write ``report.md`` and ``report.json`` from what is there."""
    import lantern_accel

    variables = {k: v for k, v in sorted(os.environ.items()) if k.startswith(SHOWN)}
    lines = [f"# lantern_accel {lantern_accel.__version__} on `{device}`", ""]
    lines += [f"- `{name}={value}`" for name, value in variables.items()]
    lines += target_lines(folder)
    for name, entry in entries.items():
        lines += ["", f"## {name}", "", f"`{entry['command']}`", "", entry["text"]]
    text = "\n".join(lines) + "\n"
    write_whole(folder / "report.md", text)
    whole = {
        "device": device,
        "environment": variables,
        "targets": targets(folder),
        "stages": entries,
    }
    write_json(folder / "report.json", whole)


def on_device(
    device: str = typer.Option(..., help="A backend's name, or NAME:INDEX."),
    output: Path = typer.Option(..., "--output", "-o", help="The folder for all results."),
    only: list[str] = typer.Option([], help="A stage; repeat for several. Default: all."),
    quick: bool = typer.Option(False, help="Fewer checks, batch sizes and samples: a first look."),
    again: bool = typer.Option(False, help="Run stages again whose result is there."),
    size: list[str] = typer.Option([], help="Sizes of `stepcost`; XL and 3B otherwise."),
    minutes: float = typer.Option(None, min=0.1, help="Stop then; the same command goes on."),
    llamagen: Path = typer.Option(None, help="A clone of FoundationVision/LlamaGen, to race."),
    lantern: Path = typer.Option(None, help="A clone of jadohu/LANTERN, to race."),
    race_size: str = typer.Option("XL", help="B, L, XL, XXL or 3B."),
) -> None:
    """Check, tune and measure a device, and write the report to send back."""
    environ = environment(output)
    sys.path[:0] = [
        path for path in environ["PYTHONPATH"].split(os.pathsep) if path not in sys.path
    ]
    chosen = choose_device(device)  # an absent device is told before any work
    clones = {key: path for key, path in (("llamagen", llamagen), ("lantern", lantern)) if path}
    plan = stages(
        device,
        output,
        quick,
        variants=chosen.spec.variants,
        sizes=size,
        clones=clones,
        race_size=race_size,
    )
    names = [stage.name for stage in plan]
    for name in only:
        if name not in names:
            raise RequestError(f"no stage is named {name!r}{did_you_mean(name, names)}")
    output.mkdir(parents=True, exist_ok=True)
    entries: dict[str, dict[str, Any]] = {}
    failed = []
    end = time.monotonic() + 60 * minutes if minutes else None
    for number, stage in enumerate(plan, 1):
        if only and stage.name not in only:
            continue
        label = f"{stage.name} ({number} of {len(plan)})"
        if again:
            stage.result.unlink(missing_ok=True)
        left = None if end is None else end - time.monotonic()
        if left is not None and left < 1:
            say("no time is left", label=label, style="dim")
            failed.append(stage.name)
            continue
        if stage.result.is_file() and not stage.resumes:
            works, seconds = True, 0.0
            say("has its result already", label=label, style="dim")
        else:
            say("running", label=label, style="bold")
            works, seconds = run(stage, output, environ, left)
            say(f"{'done' if works else 'FAILED'}, {seconds:.0f} s", label=label)
        text = f"failed: {_last_lines(output, stage.name)}"
        if works:
            text = stage.show(json.loads(stage.result.read_text(encoding="utf-8")))
        else:
            failed.append(stage.name)
        entries[stage.name] = {
            "command": " ".join([stage.script or "lantern-accel", *stage.arguments]),
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
    return run_single(on_device, argv)


if __name__ == "__main__":
    sys.exit(main())
