"""``lantern-accel bench``: a quick profile of strategies against vanilla, printed as a table."""

from __future__ import annotations

from pathlib import Path

import typer

from lantern_accel import bounds
from lantern_accel.cli.console import print_json, show_markdown, warn
from lantern_accel.cli.options import (
    Loading,
    Weights,
    numbers,
    strategy_words,
    whole_numbers,
    with_options,
)
from lantern_accel.cli.profile import measured

#: Columns that are left in a narrow terminal.
NARROW = ("strategy", "batch", "tokens/s", "speed-up", "tokens per step", "TV per token")


@with_options
def bench(
    *,
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
    load: Loading,
    weights: Weights = "full",
    tree: str = typer.Option(None, help="The tree of every strategy with a drafter."),
    window: int = typer.Option(
        None, min=2, max=256, help="Tokens in the window of every strategy that has one."
    ),
    output: Path = typer.Option(
        None, "--output", "-o", help="The run, .json; an interrupted one is resumed."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON rows instead of the table."),
) -> None:
    """Measure tokens per second, tokens per step and conversion, strategies interleaved.

    With -o it writes a run like that of `profile --quick`, without prices, for `compare`.
    """
    run = measured(
        load,
        weights,
        output,
        resume=True,
        quick=True,
        changes={"samples": repeats, "quality_images": 0},
        names=strategy_words(strategy),
        batches=whole_numbers("--batch", batch, 1, bounds.MOST_BATCH),
        temperatures=numbers("--temperature", temperature, 0, bounds.MOST_TEMPERATURE),
        prompts=prompt or None,
        tree=tree,
        window=window,
    )
    from lantern_accel.report.table import plain_rows, table

    if as_json:
        return print_json(plain_rows(run))
    show_markdown(table(run), NARROW)
    for row in plain_rows(run):
        interval = row["speedup_interval"]
        if interval is not None and interval[1] < 1:
            text = f"{row['strategy']} at batch {row['batch']}: {row['speedup']:.2f}x"
            warn(text, "slower than plain here")
