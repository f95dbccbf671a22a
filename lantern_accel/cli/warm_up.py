"""``lantern-accel warm-up``: compile ahead, so that no request waits for it."""

from __future__ import annotations

import time

import typer

from lantern_accel.bounds import MOST_BATCH
from lantern_accel.cli.console import say
from lantern_accel.cli.opening import opened
from lantern_accel.cli.options import DTYPE, OPTION, read_options, strategy_words, whole_numbers


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("warm-up")(warm_up)


def warm_up(
    device: str = typer.Option("auto", "--device", "-d", help="As for generate."),
    model: str = typer.Option("lantern-emoji", "--model", "-m", help="As for generate."),
    dtype: str = DTYPE,
    batch: list[str] = typer.Option(["1"], "--batch", "-b", help="Batch sizes, such as 1,2,4."),
    strategy: list[str] = typer.Option(
        ["auto"], "--strategy", "-s", help="Names, separated by commas or repeated."
    ),
    option: list[str] = OPTION,
    quiet: bool = typer.Option(False, "--quiet", "-q", help="Print nothing but errors."),
) -> None:
    """Compile the steps of these batch sizes and strategies ahead of time.

    Later commands find them in the cache folder, if the device's compiler keeps one.
    """
    sizes = whole_numbers("--batch", batch, 1, MOST_BATCH)
    names = strategy_words(strategy)
    began = time.perf_counter()

    def told(bucket: str, seconds: float) -> None:
        if not quiet:
            say(f"{seconds:.1f} s", label=bucket, style="bold")

    with opened(model, quiet, device=device, dtype=dtype, options=read_options(option)) as pipeline:
        pipeline.kept_engines = max(pipeline.kept_engines, len(sizes) * len(names))
        pipeline.warm_up(sizes, names, told)
        captured = bool(pipeline.backend.support("capture"))
        where = pipeline.backend.device
    if not quiet:
        note = "" if captured else f"; {where} runs steps eagerly, so little was compiled"
        say(f"{time.perf_counter() - began:.1f} s{note}", label="ready in", style="bold green")
