"""``lantern-accel profile`` measures a device for a report; ``bench`` prints a quick table."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from lantern_accel import bounds
from lantern_accel.cli.console import note, print_json, say
from lantern_accel.cli.options import Loading, Weights, strategy_words, with_options
from lantern_accel.errors import RequestError
from lantern_accel_profiles.commands.tables import numbers, show_markdown, whole_numbers
from lantern_accel_profiles.plot_style import check_plot, write_plot

if TYPE_CHECKING:
    from lantern_accel_profiles.measure.record import Run


PROMPT = typer.Option([], help="A prompt. Repeatable.")
PROMPTS = typer.Option(
    None,
    help="File of prompts, as `generate --prompts` takes it. Default: a fixed random sample of the "
    "bundled model's training prompts, hard ones included.",
)


def one_of(prompt: list[str], prompts: Path | None) -> list[str] | Path | None:
    """Return the prompts of a command or their file; raises RequestError where both are given."""
    if prompt and prompts is not None:
        raise RequestError("--prompt and --prompts both name prompts; give one of them")
    return prompt or prompts


@with_options
def profile(
    *,
    output: Path = typer.Option(..., "--output", "-o", help="JSON file of the run."),
    load: Loading,
    weights: Weights = "full",
    strategy: list[str] = typer.Option(
        [],
        "--strategy",
        "-s",
        help="Strategies, separated by commas, or by ; with settings. vanilla is always measured. "
        "Default: auto, scd and, with a drafter, eagle, eagle2, lantern and lantern++.",
    ),
    batch: list[str] = typer.Option(
        [], "--batch", "-b", help="Batch sizes, such as 1,4. Default: 1,4, quick: 1."
    ),
    temperature: list[str] = typer.Option(["1"], "--temperature", "-t", help="Such as 0,1."),
    prompt: list[str] = PROMPT,
    prompts: Path = PROMPTS,
    quick: bool = typer.Option(
        False, help="Take 5 samples per cell and 16 images: minutes instead of an hour."
    ),
    samples: int = typer.Option(
        None, min=2, max=bounds.MOST_SAMPLES, help="Samples per cell. Default: 30, quick: 5."
    ),
    seconds: float = typer.Option(
        None,
        min=0,
        max=bounds.MOST_SECONDS,
        help="Least timed seconds per cell. Default: 10, quick: 0.",
    ),
    quality_images: int = typer.Option(
        None,
        min=2,
        max=bounds.MOST_IMAGES,
        help="Images per strategy that measure its quality loss. Default: 64, quick: 16.",
    ),
    seed: int = typer.Option(0, min=0, max=bounds.MOST_SEED, help="Random seed."),
    name: str = typer.Option(None, help="Name of the run in reports. Default: device and time."),
    trace: Path = typer.Option(
        None, help="Also write a trace of one image's steps to this file, for ui.perfetto.dev."
    ),
    resume: bool = typer.Option(False, help="Continue an interrupted run in its file."),
    wait: float = typer.Option(
        0.0,
        min=0,
        max=bounds.MOST_SECONDS,
        help="Longest wait in seconds for a machine that other programs keep busy; then the command "
        "fails. Default: warn and measure.",
    ),
) -> None:
    """Measure strategies on one device, and write a run for `lantern-accel compare`.

    Example: lantern-accel profile --device cpu --quick -o cpu.json
    """
    names = strategy_words(strategy, presets=True) if strategy else []
    batches = whole_numbers("--batch", batch, 1, bounds.MOST_BATCH)
    temperatures = numbers("--temperature", temperature, 0, bounds.MOST_TEMPERATURE)
    run = measure_run(
        load,
        weights,
        output,
        resume=resume,
        quick=quick,
        changes={"samples": samples, "seconds": seconds, "quality_images": quality_images},
        names=names,
        batches=batches or ([1] if quick else [1, 4]),
        temperatures=temperatures,
        prompts=one_of(prompt, prompts),
        seed=seed,
        name=name,
        trace=trace,
        check=not quick,
        wait=wait,
    )
    from lantern_accel_profiles.report.comparison import compare
    from lantern_accel_profiles.report.verdict import QUESTION, device_sentences

    found = compare([run], profiles=[])
    for answer in device_sentences(found.models[0]):
        say(f"{QUESTION} {answer.short}", style="bold")
        for line in answer.lines:
            say(line)
    say(f"{output} ({run.name}, {len(run.cells)} cells)", label="wrote", style="bold green")
    say(f"lantern-accel compare {output} -o report.html", label="next", style="bold")


def measure_run(
    load: Loading,
    weights: str,
    output: Path | None,
    *,
    resume: bool,
    quick: bool,
    changes: Mapping[str, object],
    names: Sequence[str],
    temperatures: Sequence[float],
    prompts: Path | list[str] | None,
    name: str | None = None,
    trace: Path | None = None,
    drafts: str | None = None,
    window: int | None = None,
    check: bool = False,
    batches: Sequence[int] = (1,),
    seed: int = 0,
    wait: float = 0.0,
) -> Run:
    """Load a model and measure a run, into ``output`` if it is not None.

    ``changes``: of the quick or full plan, None keeps its value; ``prompts``: a file, or prompts;
    ``check``: also run the checks of `conform`.
    """
    from lantern_accel_profiles.store import check_name, check_output

    check_name(name)
    if output is not None:
        check_output(output, resume=resume, trace=trace)
    began = time.perf_counter()
    with load.open(weights=weights) as pipeline:
        loaded = time.perf_counter() - began
        # Below here torch is imported, which the device precedes.
        from lantern_accel.testing.kit import run_checks
        from lantern_accel_profiles.measure import run as asked
        from lantern_accel_profiles.measure.prompts import prompt_set, read_prompts
        from lantern_accel_profiles.measure.run import Profiler

        given = {key: value for key, value in changes.items() if value is not None}
        request = asked.ProfileRequest(
            strategies=asked.choose_strategies(
                pipeline, names or asked.usual_names(pipeline), temperatures, drafts, window
            ),
            prompts=prompt_set("--prompt", [*prompts], pipeline)
            if isinstance(prompts, list)
            else read_prompts(prompts, pipeline),
            plan=(asked.QUICK if quick else asked.FULL).model_copy(update=given),
            temperatures=temperatures,
            name=name or asked.fresh_name(str(pipeline.backend.device)),
            command=asked.command_of(sys.argv[1:]),
            options=load.options,
            load_seconds=loaded,
            trace=trace,
            conform=run_checks if check else None,
            window=window is not None,
            batches=batches,
            seed=seed,
            wait=wait,
        )
        return Profiler(pipeline, request, output, resume=resume, say=note).measure()


@with_options
def bench(
    *,
    strategy: list[str] = typer.Option(
        ["vanilla,auto,eagle,eagle2,lantern,lantern++,scd"],
        "--strategy",
        "-s",
        show_default=False,
        help="Strategies, separated by commas, or by ; if they have settings, such as "
        "'lantern:k=100,delta=0.1;lantern++:k=10'. vanilla is always measured.",
    ),
    batch: list[str] = typer.Option(["1"], "--batch", "-b", help="Batch sizes, such as 1,4."),
    temperature: list[str] = typer.Option(["1"], "--temperature", "-t", help="Such as 0,1."),
    repeats: int = typer.Option(5, min=1, max=bounds.MOST_SAMPLES, help="Samples per cell."),
    prompt: list[str] = PROMPT,
    prompts: Path = PROMPTS,
    load: Loading,
    weights: Weights = "full",
    drafts: str = typer.Option(None, help="Drafts of all strategies with a drafter."),
    window: int = typer.Option(
        None, min=2, max=256, help="Tokens per window of all strategies with a window."
    ),
    output: Path = typer.Option(
        None, "--output", "-o", help="JSON file of the run. An interrupted run continues in it."
    ),
    plot: Path = typer.Option(None, help="Plot of speed over total variation, as .png or .svg."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON rows instead of the table."),
) -> None:
    """Compare the speed of strategies on this machine, interleaved, with a verdict for each.

    --json has all figures. -o writes a run for `compare`, like `profile --quick` without quality loss.
    """
    if plot is not None:
        check_plot(plot)
    run = measure_run(
        load,
        weights,
        output,
        resume=True,
        quick=True,
        changes={"samples": repeats, "quality_images": 0},
        names=strategy_words(strategy, presets=True),
        batches=whole_numbers("--batch", batch, 1, bounds.MOST_BATCH),
        temperatures=numbers("--temperature", temperature, 0, bounds.MOST_TEMPERATURE),
        prompts=one_of(prompt, prompts),
        drafts=drafts,
        window=window,
    )
    from lantern_accel_profiles.report.table import plain_rows, table

    if plot is not None:
        write_plot(plain_rows(run), plot)
    if as_json:
        return print_json(plain_rows(run))
    show_markdown(table(run))
