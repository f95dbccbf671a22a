"""``lantern-accel stepcost``: step times of real model sizes, with random weights."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from lantern_accel import bounds
from lantern_accel.cli.console import note, print_json
from lantern_accel.cli.options import Dtype, OnDevice, strategy_words, with_options
from lantern_accel.files import check_target
from lantern_accel_profiles.commands.tables import numbers, show_markdown, whole_numbers


@with_options
def stepcost(
    *,
    size: str = typer.Option(
        "llamagen-xl-384", help="Model size: llamagen-SIZE-PIXELS, anole-7b, or a JSON file."
    ),
    batch: list[str] = typer.Option(["1"], "--batch", "-b", help="Batch sizes, such as 1,4."),
    nodes: str = typer.Option("8,16,32,60", help="Tree node counts whose verification is timed."),
    strategy: str = typer.Option("lantern++", help="Strategy whose whole step is timed."),
    drafts: str = typer.Option(None, help="Drafts of the strategy. Default: the paper's."),
    on: OnDevice,
    dtype: Dtype = "auto",
    weights: str = typer.Option("full", help="Weights of the target: full, int8, int6 or int4."),
    cfg_scale: float = typer.Option(
        None,
        "--cfg-scale",
        min=0,
        max=bounds.MOST_SCALE,
        help="Guidance scale. Default: 4 for classes, 7.5 for text.",
    ),
    top_k: int = typer.Option(
        None, min=0, max=bounds.MOST_CODES, help="Default: 0 (all) for classes, 1000 for text."
    ),
    at: str = typer.Option(
        "0.5",
        help="Positions in the image where steps are timed: 0 is its start, 1 its end. 0,0.5,1 also "
        "projects the time of a whole image.",
    ),
    repeats: int = typer.Option(
        10, min=1, max=bounds.MOST_SAMPLES, help="Samples per kind of step."
    ),
    output: Path = typer.Option(
        None, "--output", "-o", help="JSON file of the run. An interrupted run continues in it."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON rows instead of the table."),
) -> None:
    """Time a plain step, verification alone and a whole step of a real model size on random weights.

    The file is a run as `profile` writes it, with cells of steps.
    """
    from lantern_accel.device.plugins import open_backend

    batches = whole_numbers("--batch", batch, 1, bounds.MOST_BATCH)
    strategy_words([strategy])
    if output is not None:
        check_target(output)
    counts = whole_numbers("--nodes", [nodes], 2, bounds.MOST_NODES)
    places = numbers("--at", [at], 0, 1)
    with open_backend(on.device, on.options) as backend:
        from lantern_accel.families.random_weights import manifest_of_size
        from lantern_accel_profiles.measure.run import command_of
        from lantern_accel_profiles.measure.steps import measure

        run = measure(
            backend,
            manifest_of_size(size),
            strategy=strategy,
            drafts=drafts,
            dtype=dtype,
            weights=weights,
            cfg_scale=cfg_scale,
            top_k=top_k,
            batches=batches,
            nodes=counts,
            at=places,
            repeats=repeats,
            options=on.options,
            out=output,
            command=command_of(sys.argv[1:]),
            say=note,
        )
    from lantern_accel_profiles.report.table import step_rows, step_table

    if as_json:
        return print_json(step_rows(run))
    show_markdown(step_table(run))
