"""``lantern-accel evaluate``: the papers' first experiments on a model, and the papers' tables."""

from __future__ import annotations

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
    finite,
    read_options,
    strategy_words,
)
from lantern_accel.cli.tables import show_markdown


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("evaluate")(evaluate)


def evaluate(
    context: typer.Context,
    output: Path = typer.Option(
        Path("eval.json"),
        "--output",
        "-o",
        help="JSON file to write; an interrupted run goes on in it.",
    ),
    model: str = MODEL,
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
    vq: Path = typer.Option(None, "--vq", help="An image tokenizer stored elsewhere."),
    drafter: str = typer.Option(
        None, help="A drafter stored elsewhere; none: evaluate without one."
    ),
    text_encoder: Path = typer.Option(None, help="A text encoder stored elsewhere."),
    weights: str = WEIGHTS,
    seed: int = typer.Option(0, min=0, max=bounds.MOST_SEED, help="Fixes all random numbers."),
    device: str = DEVICE,
    dtype: str = DTYPE,
    threads: int = THREADS,
    option: list[str] = OPTION,
    suite: str | None = typer.Option(
        None, help="The papers' table: coco, imagenet, or prompts (--prompts)."
    ),
    captions: Path | None = typer.Option(
        None,
        help="COCO's captions_val2017.json, or a .jsonl of files and prompts; images are --images.",
    ),
    prompts: Path | None = typer.Option(
        None, help="Prompts without real images: lines, PartiPrompts.tsv or GenEval's .jsonl."
    ),
    count: int | None = typer.Option(
        None, min=2, max=bounds.MOST_SAMPLES, help="Prompts. Default: all."
    ),
    protocol: str | None = typer.Option(
        None, help="How to measure: lantern (coco, prompts), sjd, adm (imagenet)."
    ),
    features: str | None = typer.Option(
        None, help="efficientnet: in the place of Inception, to try a suite without its weights."
    ),
    reference: Path | None = typer.Option(
        None, help="Real images as --save-reference keeps them, or ADM's .npz."
    ),
    save_reference: Path | None = typer.Option(
        None, help="Keep what the network makes of the real images (.npz)."
    ),
    metric_weights: list[str] = typer.Option(
        [],
        metavar="NAME=PATH",
        help="Weights of a metric: inception, vgg16, ViT-B-32, ViT-B-16, hpsv2, imagereward.",
    ),
    metrics_on_host: bool = typer.Option(False, help="Run the metrics' networks on the processor."),
    work: Path | None = typer.Option(
        None, help="Folder of the pictures. Default: the output's name with .pictures."
    ),
    chunk: int = typer.Option(16, min=1, max=4096, help="Pictures that an interruption can lose."),
    batch: int = typer.Option(
        1, "--batch", "-b", min=1, max=bounds.MOST_BATCH, help="Pictures together."
    ),
    per_prompt: int = typer.Option(1, min=1, max=1000, help="Pictures per prompt."),
    geneval: Path | None = typer.Option(None, help="Also lay the pictures out here for GenEval."),
    pictures: list[str] = typer.Option(
        [], metavar="NAME=FOLDER", help="Also measure pictures of these prompts drawn elsewhere."
    ),
    write_prompts: Path | None = typer.Option(
        None, help="Only write the suite's prompts, for `generate --prompts` (.jsonl)."
    ),
    resamples: int = typer.Option(100, min=2, max=10_000, help="Of FID's bootstrap."),
    preset: str | None = typer.Option(
        None, help="Published sampling: lantern-accel models --presets."
    ),
    temperature: float | None = typer.Option(None, callback=finite),
    top_k: int | None = typer.Option(None),
    top_p: float | None = typer.Option(None, callback=finite),
    cfg_scale: float | None = typer.Option(None, callback=finite),
) -> None:
    """Measure a model: the papers' first experiments, or with --suite the papers' table.

    Parts: likelihood, ambiguity, interchange, frontier, distances, memorisation. With --suite only the
    parts that --part names are measured too. The table is written next to the JSON, as .md, .tex and
    .html; missing weights are named, with size and licence.
    """
    # ``context.obj``: the images that a model's own trainer knows, as its command line passes them.
    from lantern_accel.device.plugins import choose_device

    options = read_options(option, threads)
    choose_device(device, options)  # before torch: some devices read the environment then
    import lantern_accel
    from lantern_accel.errors import RequestError, did_you_mean
    from lantern_accel.evaluation.schema import PARTS, Settings
    from lantern_accel.files import check_target
    from lantern_accel.quality.imageset import CAPTIONS
    from lantern_accel.quality.progress import console_progress

    names = strategy_words(strategy, presets=grid is None)
    asked = None
    if suite is not None or prompts is not None:
        from lantern_accel.cli import suite as suites

        if grid is not None:
            raise RequestError("--grid draws a grid and --suite a table; ask for one of them")
        given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "cfg_scale": cfg_scale}
        asked = suites.read(
            suites.Asked(
                suite=suite,
                captions=captions,
                images=images,
                prompts=prompts,
                count=count,
                strategies=names,
                protocol=protocol,
                features=features,
                reference=reference,
                save_reference=save_reference,
                metric_weights=metric_weights,
                metrics_on_host=metrics_on_host,
                work=work,
                output=output,
                chunk=chunk,
                batch=batch,
                per_prompt=per_prompt,
                geneval=geneval,
                pictures=pictures,
                write_prompts=write_prompts,
                resamples=resamples,
                preset=preset,
                sampling={name: value for name, value in given.items() if value is not None},
                seed=seed,
            )
        )
        if write_prompts is not None:
            say(str(suites.write_prompts(asked)), label="wrote", style="bold green")
            return
        if images is not None and not (images / CAPTIONS).is_file():
            images = None  # the parts read another list
    elif captions is not None or reference is not None:
        raise RequestError("--captions and --reference belong to --suite; name it, such as coco")
    for name in part:
        if name not in PARTS:
            raise RequestError(f"no part is named {name!r}{did_you_mean(name, PARTS)}")
    check_target(output if grid is None else grid)
    if plots is not None and grid is None:
        from lantern_accel.quality.style import check_matplotlib

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
        weights=weights,
    ) as pipeline:
        if grid is not None:
            from lantern_accel.evaluation.grid import draw_grid
            from lantern_accel.evaluation.prompts import FORTY

            draw_grid(
                pipeline,
                prompt or FORTY,
                grid,
                seed=seed,
                strategies=names,
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
            parts=tuple(part) or (PARTS if asked is None else ()),
            suite=None if asked is None else suites.request(asked, pipeline),
            progress=console_progress,
        )
    for name, why in report.skipped.items():
        say(why, label=f"left out {name}", style="yellow", to_stderr=True)
    say(str(output), label="wrote", style="bold green")
    if report.suite is not None:
        from lantern_accel.evaluation.tables import markdown, tables, targets

        say(", ".join(map(str, targets(output))), label="wrote", style="bold green")
        show_markdown(markdown(tables(report.suite)[:1]))
    if plots is not None:
        say(str(plots), label="wrote", style="bold green")
