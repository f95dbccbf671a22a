"""``lantern-accel warm-up``: compile ahead, so that no request waits for it."""

from __future__ import annotations

import time

import typer

from lantern_accel.cli.console import say
from lantern_accel.cli.opening import opened
from lantern_accel.cli.options import OPTION, read_options


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("warm-up")(warm_up)


def warm_up(
    device: str = typer.Option("auto", "--device", "-d", help="As for generate."),
    model: str = typer.Option("lantern-emoji", "--model", "-m", help="As for generate."),
    dtype: str = typer.Option("auto", help="auto, float32, bfloat16 or float16."),
    batches: str = typer.Option("1", help="Batch sizes, such as 1,2,4."),
    strategies: str = typer.Option("auto", help="Strategies by name, such as vanilla,eagle."),
    option: list[str] = OPTION,
    quiet: bool = typer.Option(False, "--quiet", "-q", help="Print nothing but errors."),
) -> None:
    """Compile the buckets of these batch sizes and strategies, and keep what the compiler keeps on disk.

    A later command finds it in the cache folder, where the device's compiler uses one.
    """
    from lantern_accel.bounds import MOST_BATCH, whole
    from lantern_accel.errors import RequestError

    sizes = []
    for word in batches.split(","):
        word = word.strip()
        size = whole(word, 1, MOST_BATCH)
        if size is None:
            raise RequestError(f"{word!r} is no batch size; give numbers from 1 to {MOST_BATCH}")
        sizes.append(size)
    names = [word.strip() for word in strategies.split(",")]
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
