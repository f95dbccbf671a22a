"""``lantern-accel bench``: a quick profile of strategies against vanilla, printed as a table."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import typer

from lantern_accel import bounds
from lantern_accel.cli.console import say
from lantern_accel.cli.options import (
    DEVICE,
    DTYPE,
    MODEL,
    OPTION,
    THREADS,
    WEIGHTS,
    numbers,
    read_options,
    strategy_words,
    whole_numbers,
)
from lantern_accel.cli.tables import show_markdown

#: Columns that are left in a narrow terminal.
NARROW = ("strategy", "batch", "tokens/s", "speed-up", "tokens per step", "TV per token")


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("bench")(bench)


def bench(
    strategy: list[str] = typer.Option(
        ["vanilla,auto,eagle,eagle2,lantern,lantern++,scd,sjd-pac"],
        "--strategy",
        "-s",
        show_default=False,
        help="Names, separated by commas or repeated; vanilla is always measured. Default: auto, eagle, "
        "eagle2, lantern, lantern++, scd and sjd-pac.",
    ),
    batch: list[str] = typer.Option(["1"], "--batch", "-b", help="Images together, such as 1,4."),
    temperature: list[str] = typer.Option(["1"], "--temperature", "-t", help="Such as 0,1."),
    repeats: int = typer.Option(5, min=1, max=bounds.MOST_SAMPLES, help="Samples per cell."),
    prompt: list[str] = typer.Option(
        [], help="A prompt; repeat for several. Default: a fixed random draw, hard ones included."
    ),
    device: str = DEVICE,
    model: str = MODEL,
    dtype: str = DTYPE,
    weights: str = WEIGHTS,
    tree: str = typer.Option(None, help="The tree of every strategy with a drafter."),
    window: int = typer.Option(
        None, min=2, max=256, help="Tokens in the window of every strategy that has one."
    ),
    threads: int = THREADS,
    option: list[str] = OPTION,
    output: Path = typer.Option(
        None, "--output", "-o", help="The run, .json; an interrupted one is resumed."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON rows instead of the table."),
) -> None:
    """Measure tokens per second, tokens per step and conversion, strategies interleaved.

    With -o it writes a run like that of `profile --quick`, without prices, for `compare`.
    """
    import json
    import sys

    import lantern_accel
    from lantern_accel.measure.store import check_output

    if output is not None:
        check_output(output, resume=True)
    options = read_options(option, threads)
    names = strategy_words(strategy)
    batches = whole_numbers("--batch", batch, 1, bounds.MOST_BATCH)
    temperatures = numbers("--temperature", temperature, 0, bounds.MOST_TEMPERATURE)
    told = partial(say, to_stderr=True, style="dim")
    with lantern_accel.load(
        model, device=device, dtype=dtype, options=options, weights=weights, tell=told
    ) as pipeline:
        from lantern_accel.measure import request as asked  # torch, which the device precedes
        from lantern_accel.measure.prompts import prompt_set, read_prompts
        from lantern_accel.measure.run import Profiler
        from lantern_accel.report.table import plain_rows, table

        changes = {"samples": repeats, "quality_images": 0}
        request = asked.Request(
            strategies=asked.choose_strategies(pipeline, names, temperatures, tree, window),
            prompts=prompt_set("--prompt", list(prompt), pipeline)
            if prompt
            else read_prompts(None, pipeline),
            plan=asked.QUICK.model_copy(update=changes),
            batches=batches,
            temperatures=temperatures,
            name=asked.fresh_name(str(pipeline.backend.device)),
            command=asked.command_of(sys.argv[1:]),
            options=options,
            window=window is not None,
        )
        run = Profiler(pipeline, request, output, resume=True, say=told).measure()
    if as_json:
        typer.echo(json.dumps(plain_rows(run), indent=2))
        return
    show_markdown(table(run), NARROW)
    for row in plain_rows(run):
        interval = row["speedup_interval"]
        if interval is not None and interval[1] < 1:
            text = f"{row['strategy']} at batch {row['batch']}: {row['speedup']:.2f}x"
            say(text, label="slower than plain here", style="yellow", to_stderr=True)
