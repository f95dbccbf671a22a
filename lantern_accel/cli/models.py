"""``lantern-accel models``: lists models, checks folders, plans memory and downloads weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lantern_accel import bounds
from lantern_accel.cli.console import print_json, say, show_table
from lantern_accel.cli.options import PARTS, USE, AsJson, Dtype, read_parts
from lantern_accel.errors import RequestError

if TYPE_CHECKING:
    from lantern_accel.memory.plan import MemoryPlan

commands = typer.Typer(
    help="List models, check a folder, plan memory, fetch published weights.",
    invoke_without_command=True,
    rich_markup_mode=None,
)
#: Dtypes whose memory the list shows.
LISTED = ("bfloat16", "float32")


@commands.callback()
def listing(
    context: typer.Context,
    presets: bool = typer.Option(False, "--presets", help="List published settings instead."),
    parts: bool = typer.Option(False, "--parts", help="List tokenizers, drafters, encoders too."),
    memory: bool = typer.Option(
        False,
        "--memory",
        help="Add the memory of one image, and the devices that it fits. The first call takes seconds, "
        "since it traces every model.",
    ),
    as_json: AsJson = False,
) -> None:
    """List all models with their download size, licence, and whether they are on this machine.

    `models plan NAME` prints the memory of one, and `models fetch NAME` downloads it.
    """
    if context.invoked_subcommand is not None:
        return
    from lantern_accel.strategy.presets import PRESETS

    published = [one.model_dump(mode="json") for one in PRESETS] if presets else []
    rows = published or _model_rows(parts, memory)
    if as_json:
        print_json(rows)
    elif presets:
        head = ["preset", "for", "settings", "source"]
        show_table(head, list(map(_preset_cells, rows)), head[:3])
    else:
        head = ["model", "what it is", "here", "download", "licence"]
        found = [
            [
                row["name"],
                row["summary"] or row["kind"],
                "bundled" if row["source"] == "bundled" else "yes" if row["at_hand"] else "no",
                _download(row),
                row["licence"],
                *(_memory_cells(row) if memory else ()),
            ]
            for row in rows
        ]
        head += ["memory", "fits"] if memory else []
        show_table(head, found, ["model", "here", "download", *head[5:]])


def _preset_cells(row: dict[str, Any]) -> list[str]:
    """Return a preset's cells; several presets share a name, and differ in the models they are for."""
    models = ", ".join(row["models"])
    if models == "*":
        models = str(row["variant"] or row["family"])
        models += f", generating from {row['conditioning']}" if row["conditioning"] else ""
    said = {**row["sampling"], **row["overrides"]}
    values = ", ".join(f"{key} {value}" for key, value in said.items())
    settings = f"{row['strategy']}, {values}: {row['summary']}"
    return [row["name"], models, settings, row["source"]]


def _model_rows(parts: bool, memory: bool) -> list[dict[str, object]]:
    from lantern_accel.families.registry import family_names, list_published, parts_of
    from lantern_accel.models.bundle import bundled_models, read_manifest
    from lantern_accel.models.hub import at_hand

    def row(
        of: Any, kind: str, source: str, needed: Sequence[Any], traced: bool
    ) -> dict[str, object]:
        return {
            "name": of.name,
            "kind": kind,
            "summary": of.summary,
            "licence": of.licence,
            "source": source,
            "download_bytes": sum(e.nbytes for e in needed),
            "estimated": any(e.estimated for e in needed),
            "parts": [e.name for e in needed[1:]],
            "at_hand": all(at_hand(e) for e in needed),
            **(_memory(of.name) if traced and memory else {"memory_bytes": {}, "fits": {}}),
        }

    rows = []
    for folder in bundled_models().values():
        rows.append(row(read_manifest(folder), "model", "bundled", [], True))
    for one in list_published(None if parts else "model"):
        needed = [one, *parts_of(one).values()]
        here = one.family in family_names() and one.kind == "model"
        rows.append(row(one, one.kind, one.repo, needed, here))
    return rows


def _memory(name: str) -> dict[str, object]:
    """Return peaks by dtype, and for each device with known memory the dtypes that fit it."""
    from lantern_accel.device.datasheets import all_profiles
    from lantern_accel.memory.plan import usual_peaks

    peaks = usual_peaks(name, LISTED)
    fits = {
        one.name: [dtype for dtype, peak in peaks.items() if peak <= one.memory_bytes.value]
        for one in all_profiles()
        if one.memory_bytes is not None
    }
    return {"memory_bytes": peaks, "fits": fits}


def _download(row: dict[str, Any]) -> str:
    from rich.filesize import decimal

    if row["source"] == "bundled":
        return ""
    about = "about " if row["estimated"] else ""
    return f"{about}{decimal(row['download_bytes'])} from {row['source']}"


def _memory_cells(row: dict[str, Any]) -> list[str]:
    from lantern_accel.records import format_bytes

    peaks = ", ".join(
        f"{format_bytes(held)} in {dtype}" for dtype, held in row["memory_bytes"].items()
    )
    fits = [f"{device} ({', '.join(kinds)})" for device, kinds in row["fits"].items() if kinds]
    return [peaks, ", ".join(fits)]


@commands.command("check")
def check(
    path: Path = typer.Argument(..., metavar="PATH", help="A folder or file of weights."),
    use: list[str] = USE,
    as_json: AsJson = False,
) -> None:
    """Show the model parts that PATH has and lacks. Exit code 1 if it cannot generate images."""
    from rich.filesize import decimal

    from lantern_accel.models.check import NAMES
    from lantern_accel.models.check import check as examine
    from lantern_accel.models.locate import named_parts

    given = named_parts(**read_parts(use, PARTS[:4]))
    found = examine(path, given)
    if as_json:
        print_json({**found.model_dump(mode="json"), "usable": found.usable})
    else:
        if found.model:
            say(f"{found.model} ({found.summary or found.family})", label="model", style="bold")
        styles = {"found": "green", "missing": "yellow", "unusable": "bold red"}
        for one in found.parts:
            many = f"{one.parameters / 1e6:.1f}M parameters, {' and '.join(one.dtypes)}"
            bytes_ = decimal(one.nbytes) if one.nbytes else ""
            words = (one.state, one.path, many if one.parameters else "", bytes_, one.detail)
            text = "; ".join(word for word in words if word)
            say(text, label=NAMES.get(one.part, one.part), style=styles[one.state])
        say("yes" if found.usable else "no", label="usable", style="bold")
    if not found.usable:
        raise typer.Exit(1)


@commands.command("plan")
def plan(
    model: str = typer.Argument(
        ..., metavar="MODEL", help="A model's name, or a folder or file of weights."
    ),
    device: str = typer.Option(None, help="Name of an available backend, or of a device profile."),
    memory: str = typer.Option(None, help="Memory of any other device: 24GB, 80GiB."),
    dtype: Dtype = "auto",
    batch: int = typer.Option(1, min=1, max=bounds.MOST_BATCH, help="Batch size."),
    strategy: str = typer.Option(
        "auto", help="Strategy to plan for. auto: the most memory that auto can need."
    ),
    drafts: str = typer.Option(None, help="Drafts of the strategy, as for generate."),
    use: list[str] = typer.Option(
        [], metavar="NAME=PATH", help="head=FILE (a draft head) or text-device=cpu. Repeatable."
    ),
    picture: str = typer.Option(
        None,
        "--size",
        metavar="WxH",
        help="Width and height in pixels, for models with several sizes.",
    ),
    as_json: AsJson = False,
) -> None:
    """Compute the memory of MODEL and whether it fits, before anything is loaded or downloaded.

    Exit code 1 if it does not fit.
    """
    from lantern_accel.generation.settings import read_size
    from lantern_accel.memory.plan import parse_size, planner_for

    parts = read_parts(use, ("head", "text_device"))
    if parts.get("text_device", "cpu") not in ("device", "cpu"):
        raise RequestError(f"text-device is device or cpu, not {parts['text_device']!r}")
    if device is not None and not device.strip():
        raise RequestError("--device is empty; name a backend or a device profile, or leave it out")
    planner = planner_for(
        model,
        device=device or "",
        memory=parse_size(memory) if memory is not None else None,
        dtype=dtype,
        text_device=parts.get("text_device", "device"),
        picture=None if picture is None else read_size(picture),
        head=parts.get("head"),
    )
    chosen = planner.strategy(strategy, drafts=drafts)
    sampling = planner.manifest.defaults.sampling
    made = planner.plan(chosen, sampling, batch=batch)
    tips = planner.advice(made, chosen, sampling)
    most = made.capacity
    largest = None if most is None else planner.largest_batch(chosen, sampling, most)
    if as_json:
        print_json({**made.report(), "largest_batch": largest, "advice": tips})
    else:
        _tell_plan(made, largest)
        if made.fits is False:
            for tip in tips or ["nothing that this command can change; a larger device is needed"]:
                say(tip, label="instead", style="yellow")
    if made.fits is False:
        raise typer.Exit(1)


def _tell_plan(made: MemoryPlan, largest: int | None) -> None:
    """Print what memory a plan takes, and on what it fits."""
    from lantern_accel.models.check import NAMES
    from lantern_accel.records import format_bytes

    text = f"{made.model}, {made.dtype}, batch {made.batch}, {made.strategy} (nodes: {made.nodes})"
    say(text, label="plan", style="bold")
    held = {
        f"weights: {'a quantized copy' if part == 'copy' else NAMES.get(part, part)}": count
        for part, count in made.weights.items()
    }
    held["caches and state"] = made.buffers
    if made.tables:
        held["neighbour table"] = made.tables
    most = max(made.workspace, key=lambda phase: made.workspace[phase], default="")
    for phase, count in made.workspace.items():
        note = "(largest, in the peak)" if phase == most else "(smaller, not in the peak)"
        held[f"workspace: {phase} {note}"] = count
    held[f"process and driver ({'measured' if made.runtime_measured else 'assumed'})"] = (
        made.runtime
    )
    show_table(["what", "MiB"], [[what, f"{count / 2**20:,.0f}"] for what, count in held.items()])
    where = f" of {format_bytes(made.capacity)}" if made.capacity else ""
    if where and made.device != format_bytes(made.capacity or 0):
        where += f" on {made.device}"
    say(f"{format_bytes(made.peak)}{where}", label="peak", style="bold")
    fits = f"{'yes' if made.fits else 'no'}; batch size {largest} at most"
    unknown = "unknown; --memory says what the device has"
    say(unknown if largest is None else fits, label="fits", style="bold")


@commands.command("prompts")
def prompts(
    name: str = typer.Argument("lantern-emoji", metavar="NAME", help="A bundled model."),
) -> None:
    """List the training prompts of a bundled model, most frequent first. These work best."""
    from lantern_accel.families.llamagen.taught import Taught
    from lantern_accel.models.bundle import bundled_models

    path = bundled_models().get(name)
    names = [] if path is None else Taught(path).names
    if not names:
        raise RequestError(
            f"the training prompts of {name!r} are not known; name a bundled model, such as "
            "lantern-emoji"
        )
    print("\n".join(names))


@commands.command("fetch")
def fetch(
    name: str = typer.Argument(..., metavar="NAME", help="A published model or part."),
) -> None:
    """Download a published model with its parts to the Hugging Face cache. Repeat to resume."""
    from lantern_accel.families.registry import entry, known_as
    from lantern_accel.models import hub

    for part, path in hub.resolve(
        entry(known_as(name)), lambda text: say(text, to_stderr=True)
    ).items():
        say(str(path), label=part, style="bold")
