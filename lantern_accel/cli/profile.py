"""``lantern-accel profile``: one device measured for a report, speed beside its price."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

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
    finite,
    numbers,
    read_options,
    strategy_words,
    whole_numbers,
)


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("profile")(profile)


def profile(
    output: Path = typer.Option(
        ..., "--output", "-o", help="The run's file, .json; with --fleet a folder."
    ),
    device: str = DEVICE,
    model: str = MODEL,
    strategy: list[str] = typer.Option(
        [],
        "--strategy",
        "-s",
        help="Names, separated by commas or repeated; vanilla is always measured. Default: vanilla, "
        "auto, scd and, with a drafter, eagle, eagle2, lantern and lantern++.",
    ),
    batch: list[str] = typer.Option(
        [], "--batch", "-b", help="Images together, such as 1,4. Default: 1,4, quick: 1."
    ),
    temperature: list[str] = typer.Option(["1"], "--temperature", "-t", help="Such as 0,1."),
    prompts: Path = typer.Option(
        None,
        help="A text file, one prompt per line; blank lines are left out. Default: a fixed random draw "
        "from what the bundled model was taught, hard ones included.",
    ),
    quick: bool = typer.Option(
        False, help="5 samples per cell and 16 images: minutes, not an hour."
    ),
    samples: int = typer.Option(
        None, min=2, max=bounds.MOST_SAMPLES, help="Decodings per cell. Default: 30, quick: 5."
    ),
    seconds: float = typer.Option(
        None,
        min=0,
        max=bounds.MOST_SECONDS,
        callback=finite,
        help="Timed seconds per cell at least. Default: 10, quick: 0.",
    ),
    quality_images: int = typer.Option(
        None,
        min=2,
        max=bounds.MOST_IMAGES,
        help="Images per strategy for its price. Default: 64, quick: 16.",
    ),
    seed: int = typer.Option(0, min=0, max=bounds.MOST_SEED, help="Fixes what is drawn."),
    dtype: str = DTYPE,
    weights: str = WEIGHTS,
    threads: int = THREADS,
    option: list[str] = OPTION,
    name: str = typer.Option(None, help="The run's name in reports. Default: device and time."),
    trace: Path = typer.Option(None, help="Also write a few steps here, for ui.perfetto.dev."),
    resume: bool = typer.Option(False, help="Complete an interrupted run in the same file."),
    fleet: bool = typer.Option(
        False, "--fleet", help="Measure every kind of device of a Ray cluster, and report on them."
    ),
    workers: str = typer.Option(
        "auto",
        metavar="KIND=N,...",
        help="With --fleet: which kinds of devices, such as CPU=1,GPU=1.",
    ),
    patience: float = typer.Option(
        120.0,
        min=1,
        max=bounds.MOST_SECONDS,
        callback=finite,
        help="With --fleet: seconds that a device has to answer.",
    ),
) -> None:
    """Measure strategies on one device into a run for `lantern-accel compare`.

    Example: lantern-accel profile --device cpu --quick -o cpu.json
    """
    names = strategy_words(strategy) if strategy else []
    batches = whole_numbers("--batch", batch, 1, bounds.MOST_BATCH)
    temperatures = numbers("--temperature", temperature, 0, bounds.MOST_TEMPERATURE)
    if fleet:
        from lantern_accel.cli.folders import measure_folder

        given: dict[str, Any] = {
            "--strategy": strategy,
            "--batch": batch,
            "--temperature": temperature,
        }
        given |= {"--samples": samples, "--seconds": seconds, "--quality-images": quality_images}
        given |= {"--seed": seed, "--dtype": dtype, "--weights": weights}
        given |= {"--threads": threads, "--option": option}
        given |= {"--model": _elsewhere(model), "--prompts": prompts and prompts.resolve()}
        clash = {"--device": device != "auto", "--name": name, "--trace": trace, "--resume": resume}
        return measure_folder(output, given, clash, quick, workers, patience)
    import sys
    import time

    import lantern_accel
    from lantern_accel.measure.store import check_name, check_output

    check_name(name)
    check_output(output, resume=resume, trace=trace)
    options = read_options(option, threads)
    began = time.perf_counter()
    told = partial(say, to_stderr=True, style="dim")
    with lantern_accel.load(
        model, device=device, dtype=dtype, options=options, weights=weights, tell=told
    ) as pipeline:
        loaded = time.perf_counter() - began
        # Below here torch is imported, which the device precedes.
        from lantern_accel.measure import request as asked
        from lantern_accel.measure.prompts import read_prompts
        from lantern_accel.measure.run import Profiler
        from lantern_accel.testing.kit import run_checks

        given = {"samples": samples, "seconds": seconds, "quality_images": quality_images}
        changes = {key: value for key, value in given.items() if value is not None}
        request = asked.Request(
            strategies=asked.choose_strategies(
                pipeline, names or asked.usual_names(pipeline), temperatures
            ),
            prompts=read_prompts(prompts, pipeline),
            plan=(asked.QUICK if quick else asked.FULL).model_copy(update=changes),
            batches=batches or ([1] if quick else [1, 4]),
            temperatures=temperatures,
            seed=seed,
            name=name or asked.fresh_name(str(pipeline.backend.device)),
            command=asked.command_of(sys.argv[1:]),
            options=options,
            load_seconds=loaded,
            trace=trace,
            conform=None if quick else run_checks,
        )
        run = Profiler(pipeline, request, output, resume=resume, say=told).measure()
    from lantern_accel.report.comparison import compare
    from lantern_accel.report.telling import QUESTION, first_screen

    found = compare([run], profiles=[])
    for answer in first_screen(found, found.models[0]).told:
        say(f"{QUESTION} {answer.short}", style="bold")
        for line in answer.lines:
            say(line)
    say(f"{output} ({run.name}, {len(run.cells)} cells)", label="wrote", style="bold green")
    say(f"lantern-accel compare {output} -o report.html", label="next", style="bold")


def _elsewhere(model: str) -> str:
    """Return a model's name, or its path from the root: a worker has another folder to start from."""
    return str(Path(model).resolve()) if Path(model).exists() else model
