"""``lantern-accel bench``: strategies against vanilla on this device, with what they cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from lantern_accel.cli.console import say
from lantern_accel.cli.options import OPTION, read_options


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("bench")(bench)


def bench(
    strategies: list[str] = typer.Option(
        ["vanilla", "eagle", "eagle2", "lantern", "lantern++"],
        "--strategy",
        help="Repeat for several; vanilla is the base of the ratios.",
    ),
    batch: list[int] = typer.Option([1], min=1, help="Images together; repeat for several."),
    temperature: list[float] = typer.Option([1.0], min=0, help="Repeat for several."),
    repeats: int = typer.Option(5, min=1, help="Samples a cell."),
    prompt: list[str] = typer.Option([], help="Repeat for several; a built-in list otherwise."),
    device: str = typer.Option("auto"),
    model: str = typer.Option("lantern-emoji"),
    dtype: str = typer.Option("auto"),
    tree: str = typer.Option(None, help="For every strategy with a drafter."),
    window: int = typer.Option(None, help="Tokens in the window of every strategy that has one."),
    threads: int = typer.Option(None, min=1),
    option: list[str] = OPTION,
    output: Path = typer.Option(None, "--output", "-o", help="JSON; an interrupted run goes on."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON rows instead of the table."),
) -> None:
    """Measure tokens a second, step compression and conversion, strategies interleaved."""
    import json

    import lantern_accel

    options = read_options(option, threads)
    with lantern_accel.load(model, device=device, dtype=dtype, options=options) as pipeline:
        from lantern_accel.measure import bench as measure  # torch, which the device precedes
        from lantern_accel.strategy.values import Window

        chosen = []
        for name in strategies:
            one = pipeline.strategy(name)
            changes: dict[str, Any] = {"tree": tree if one.needs_drafter else None}
            if isinstance(one.tree, Window):
                changes["window"] = window
            chosen.append(pipeline.strategy(name, **changes))
        report = measure.run_bench(
            pipeline,
            chosen,
            batches=batch,
            temperatures=temperature,
            repeats=repeats,
            prompts=prompt or (),
            out=output,
            say=lambda text: say(text, to_stderr=True, style="dim"),
        )
    if as_json:
        typer.echo(json.dumps(report.rows(), indent=2))
    else:
        typer.echo(measure.table(report))
