"""``lantern-accel evaluate``: the papers' first experiments on a model, and the papers' tables."""

from __future__ import annotations

from pathlib import Path

import typer

from lantern_accel import bounds
from lantern_accel.cli.console import note, say, show_markdown, warn
from lantern_accel.cli.options import LoadingParts, strategy_words, with_options
from lantern_accel.cli.suite import SuiteOptions
from lantern_accel.errors import RequestError, did_you_mean
from lantern_accel.files import check_target


@with_options
def evaluate(
    *,
    context: typer.Context,
    output: Path = typer.Option(
        Path("eval.json"),
        "--output",
        "-o",
        help="JSON file to write; an interrupted run goes on in it.",
    ),
    load: LoadingParts,
    plots: Path | None = typer.Option(None, help="Folder for the pictures (needs matplotlib)."),
    quick: bool = typer.Option(
        False, help="Few images and settings: for a first look, not for figures."
    ),
    part: list[str] = typer.Option([], help="Measure only this part; repeat for several."),
    images: Path | None = typer.Option(
        None, help="Folder with captions.jsonl and images, kept from the model's training."
    ),
    grid: Path | None = typer.Option(
        None, help="Instead, draw the forty fixed prompts with every strategy into this PNG."
    ),
    prompt: list[str] = typer.Option([], help="For --grid: these prompts instead of the forty."),
    strategy: list[str] = typer.Option(
        ["vanilla,eagle,eagle2,lantern,lantern++"],
        "--strategy",
        "-s",
        help="For --suite and --grid: names, separated by commas or repeated; presets too for --suite, "
        "and one with settings is an option of its own: lantern++:k=10,lambda=2.",
    ),
    seed: int = typer.Option(0, min=0, max=bounds.MOST_SEED, help="Fixes all random numbers."),
    suite: SuiteOptions,
) -> None:
    """Measure a model: the papers' first experiments, or with --suite the papers' table.

    Parts: likelihood, ambiguity, interchange, frontier, distances, memorisation. With --suite only the
    parts that --part names are measured too. The table is written next to the JSON, as .md, .tex and
    .html; missing weights are named, with size and licence.
    """
    # ``context.obj``: the images that a model's own trainer knows, as its command line passes them.
    from lantern_accel.device.plugins import choose_device

    choose_device(load.device, load.options)  # before torch: some devices read the environment then
    from lantern_accel.evaluation.schema import PARTS, Settings
    from lantern_accel.quality.imageset import CAPTIONS
    from lantern_accel.quality.progress import console_progress

    names = strategy_words(strategy, presets=grid is None)
    asked = None
    if suite.suite is not None or suite.prompts is not None:
        from lantern_accel.cli import suite as suites

        if grid is not None:
            raise RequestError("--grid draws a grid and --suite a table; ask for one of them")
        asked = suites.read(suite, images, output)
        if suite.write_prompts is not None:
            say(str(suites.write_prompts(asked)), label="wrote", style="bold green")
            return
        if images is not None and not (images / CAPTIONS).is_file():
            images = None  # the parts read another list
    elif suite.captions is not None or suite.reference is not None:
        raise RequestError("--captions and --reference belong to --suite; name it, such as coco")
    for name in part:
        if name not in PARTS:
            raise RequestError(f"no part is named {name!r}{did_you_mean(name, PARTS)}")
    check_target(output if grid is None else grid)
    if plots is not None and grid is None:
        from lantern_accel.quality.style import check_matplotlib

        check_matplotlib()
        check_target(plots / "a.png")
    with load.opened() as pipeline:
        if grid is not None:
            from lantern_accel.evaluation.grid import FORTY, draw_grid

            draw_grid(
                pipeline,
                prompt or FORTY,
                grid,
                seed=seed,
                strategies=names,
                say=note,
            )
            say(str(grid), label="wrote", style="bold green")
            return
        from lantern_accel.evaluation.run import Evaluator

        settings = Settings.quick(seed) if quick else Settings(seed=seed)
        source = context.obj(settings.images, settings.seed) if context.obj else None
        made = None if asked is None else suites.request(asked, pipeline, names, seed)
        run = Evaluator(pipeline, output, settings, images, source, plots, console_progress())
        report = run.run(tuple(part) or (PARTS if asked is None else ()), made)
    for name, why in report.skipped.items():
        warn(why, f"left out {name}")
    say(str(output), label="wrote", style="bold green")
    if report.suite is not None:
        from lantern_accel.evaluation.tables import markdown, tables, targets

        say(", ".join(map(str, targets(output))), label="wrote", style="bold green")
        show_markdown(markdown(tables(report.suite)[:1]))
    if plots is not None:
        say(str(plots), label="wrote", style="bold green")
