"""``lantern-accel evaluate``: the papers' first experiments on a model, as JSON and plots."""

from __future__ import annotations

from pathlib import Path

import typer

from lantern_accel import bounds
from lantern_accel.cli.console import say
from lantern_accel.cli.options import OPTION, read_options


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("evaluate")(evaluate)


def evaluate(
    context: typer.Context,
    output: Path = typer.Option(
        Path("eval.json"),
        "--output",
        "-o",
        help="JSON file to write; a stopped run continues in it.",
    ),
    model: str = typer.Option("lantern-emoji", help="A bundled model's name or a model folder."),
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
        ["vanilla", "eagle", "eagle2", "lantern", "lantern++"],
        help="For --grid: the strategies that are its columns; repeat for several.",
    ),
    vq: Path = typer.Option(None, "--vq", help="An image tokenizer stored elsewhere."),
    drafter: str = typer.Option(
        None, help="A drafter stored elsewhere; none: evaluate without one."
    ),
    text_encoder: Path = typer.Option(None, help="A text encoder stored elsewhere."),
    seed: int = typer.Option(0, min=0, max=bounds.MOST_SEED, help="Fixes all random numbers."),
    device: str = typer.Option("auto", help="A backend's name, NAME:INDEX, or auto (the best)."),
    dtype: str = typer.Option("auto", help="auto, float32, bfloat16 or float16."),
    threads: int = typer.Option(
        None, min=1, max=bounds.MOST_THREADS, help="Threads, for a backend that uses them."
    ),
    option: list[str] = OPTION,
) -> None:
    """Measure a model: likelihood, ambiguity, interchangeable codes, the frontier, memorisation.

    Parts: likelihood, ambiguity, interchange, frontier, distances, memorisation.
    """
    # ``context.obj``: the images that a model's own trainer knows, as its command line passes them.
    from lantern_accel.device.plugins import choose_device

    options = read_options(option, threads)
    choose_device(device, options)  # before torch: some devices read the environment then
    import lantern_accel
    from lantern_accel.errors import RequestError, did_you_mean
    from lantern_accel.evaluation.schema import PARTS, Settings
    from lantern_accel.files import check_target
    from lantern_accel.quality.progress import console_progress

    for name in part:
        if name not in PARTS:
            raise RequestError(f"no part is named {name!r}{did_you_mean(name, PARTS)}")
    check_target(output if grid is None else grid)
    if plots is not None and grid is None:
        from lantern_accel.evaluation.plots import check_matplotlib

        check_matplotlib()
        check_target(plots / "a.png")
    with lantern_accel.load(
        model,
        device=device,
        dtype=dtype,
        options=options,
        vq=vq,
        drafter=drafter,
        text_encoder=text_encoder,
    ) as pipeline:
        if grid is not None:
            from lantern_accel.evaluation.grid import draw_grid
            from lantern_accel.evaluation.prompts import FORTY

            draw_grid(
                pipeline,
                prompt or FORTY,
                grid,
                seed=seed,
                strategies=strategy,
                say=lambda text: say(text, to_stderr=True, style="dim"),
            )
            say(str(grid), label="wrote", style="bold green")
            return
        from lantern_accel.evaluation.run import evaluate as measure

        settings = Settings.quick(seed) if quick else Settings(seed=seed)
        report = measure(
            pipeline,
            output,
            settings,
            images=images,
            source=context.obj(settings.images, settings.seed) if context.obj else None,
            plots=plots,
            parts=tuple(part) or PARTS,
            progress=console_progress,
        )
    for name, why in report.skipped.items():
        say(why, label=f"left out {name}", style="yellow", to_stderr=True)
    say(str(output), label="wrote", style="bold green")
    if plots is not None:
        say(str(plots), label="wrote", style="bold green")
