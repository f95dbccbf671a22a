"""``lantern-accel bench``: a quick profile of strategies against vanilla, printed as a table."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import typer

from lantern_accel import bounds
from lantern_accel.cli.console import say
from lantern_accel.cli.options import OPTION, finite, read_options


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("bench")(bench)


def bench(
    strategies: list[str] = typer.Option(
        ["vanilla", "auto", "eagle", "eagle2", "lantern", "lantern++", "scd", "sjd-pac"],
        "--strategy",
        help="Repeat for several; vanilla is the base of the ratios and always measured.",
    ),
    batch: list[int] = typer.Option(
        [1], min=1, max=bounds.MOST_BATCH, help="Images together; repeat for several."
    ),
    temperature: list[float] = typer.Option(
        [1.0], min=0, max=bounds.MOST_TEMPERATURE, callback=finite, help="Repeat for several."
    ),
    repeats: int = typer.Option(5, min=1, max=bounds.MOST_SAMPLES, help="Samples per cell."),
    prompt: list[str] = typer.Option(
        [], help="Repeat for several. Default: a fixed random draw, hard ones included."
    ),
    device: str = typer.Option("auto"),
    model: str = typer.Option("lantern-emoji"),
    dtype: str = typer.Option("auto"),
    tree: str = typer.Option(None, help="For every strategy with a drafter."),
    window: int = typer.Option(
        None, min=2, max=256, help="Tokens in the window of every strategy that drafts in one."
    ),
    threads: int = typer.Option(None, min=1, max=bounds.MOST_THREADS),
    option: list[str] = OPTION,
    output: Path = typer.Option(
        None, "--output", "-o", help="The run, .json; an interrupted one is resumed."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON rows instead of the table."),
) -> None:
    """Measure tokens per second, tokens per step and conversion, strategies interleaved.

    The file is that of `profile --quick`, without prices: `compare` reads it.
    """
    import json
    import sys

    import lantern_accel
    from lantern_accel.measure.store import check_output

    if output is not None:
        check_output(output, resume=True)
    options = read_options(option, threads)
    with lantern_accel.load(model, device=device, dtype=dtype, options=options) as pipeline:
        from lantern_accel.measure import request as asked  # torch, which the device precedes
        from lantern_accel.measure.prompts import prompt_set, read_prompts
        from lantern_accel.measure.run import Profiler
        from lantern_accel.report.table import plain_rows, table

        changes = {"samples": repeats, "quality_images": 0}
        request = asked.Request(
            strategies=asked.choose_strategies(pipeline, strategies, temperature, tree, window),
            prompts=prompt_set("--prompt", list(prompt), pipeline)
            if prompt
            else read_prompts(None, pipeline),
            plan=asked.QUICK.model_copy(update=changes),
            batches=list(dict.fromkeys(batch)),
            temperatures=list(dict.fromkeys(temperature)),
            name=asked.fresh_name(str(pipeline.backend.device)),
            command=asked.command_of(sys.argv[1:]),
            options=options,
            window=window is not None,
        )
        told = partial(say, to_stderr=True, style="dim")
        run = Profiler(pipeline, request, output, resume=True, say=told).measure()
    typer.echo(json.dumps(plain_rows(run), indent=2) if as_json else table(run))
