"""``lantern-accel generate``: images from prompts, with the figures of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lantern_accel.cli.console import bar, note, print_json, print_log, say, warn
from lantern_accel.cli.options import LoadingParts, strategy_words, with_options
from lantern_accel.errors import RequestError
from lantern_accel.files import write_json
from lantern_accel.generation.journal import asked_of
from lantern_accel.generation.like import Like
from lantern_accel.generation.result import LOSS
from lantern_accel.generation.settings import check_prompts, option_name, read_settings
from lantern_accel.prompts import read_prompts
from lantern_accel.strategy.choose import read_strategy
from lantern_accel.strategy.values import StaticTree

if TYPE_CHECKING:
    from lantern_accel.cli.output_images import OutputImages
    from lantern_accel.generation.pipeline import Pipeline
    from lantern_accel.generation.result import GenerationResult, GenerationStats


@with_options
def generate(
    *,
    prompts: list[str] = typer.Argument(
        None, metavar="PROMPT...", help="Text to generate. Class-conditional models take class ids."
    ),
    output: Path | None = typer.Option(
        None,
        "--output",
        "-o",
        help="Image file. Several images are numbered -0, -1, ... Default: lantern.png, or the next free "
        "name. With --prompts also a folder, for one file per prompt.",
    ),
    overwrite: bool = typer.Option(False, "--overwrite", help="Overwrite existing images."),
    as_json: bool = typer.Option(False, "--json", help="Print the result's figures as JSON."),
    stats_path: Path = typer.Option(
        None, "--stats", metavar="FILE", help="Write the result's figures to this JSON file."
    ),
    prompts_file: Path = typer.Option(
        None,
        "--prompts",
        metavar="FILE",
        help="File of prompts: one per line, .jsonl, .csv, .tsv, .parquet, or COCO's .json.",
    ),
    like: Path | None = typer.Option(
        None,
        metavar="FILE.png",
        help="Generate this PNG's image again, with its prompt, strategy, seed, model, dtype and device. "
        "--model, --use, --device and --dtype override them.",
    ),
    share: str | None = typer.Option(
        None,
        metavar="K/N",
        help="Generate share K of N of the rows of --prompts into a folder, such as 1/8. Run one command "
        "per device.",
    ),
    resume: bool = typer.Option(
        False,
        "--resume",
        help="Generate only the missing images of an interrupted command. A partly decoded image "
        "continues where it stopped. Repeating the command with the same --seed does this too.",
    ),
    load: LoadingParts,
    grid: bool = typer.Option(
        False, "--grid", help="Write all images to one file, one row per prompt."
    ),
    no_metadata: bool = typer.Option(
        False,
        "--no-metadata",
        help="Do not store settings in the PNG. --like needs them.",
    ),
    verbose: bool = typer.Option(
        False, "--verbose", help="Also print the decisions made before the first image."
    ),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="Print errors only."),
    **settings: Any,
) -> None:
    """Generate an image of PROMPT with the fastest exact strategy, and write it as a PNG.

    Example: lantern-accel generate "red heart" --seed 7 -o heart.png
    """
    from lantern_accel.cli.output_images import OutputImages, check_files, free_name

    made = None
    if like is not None:
        clash = {"PROMPT": prompts, "--prompts": prompts_file, "--share": share, "--resume": resume,
                 "--grid": grid, "--weights": load.weights != LoadingParts.weights}  # fmt: skip
        clash |= {option_name(name): value is not None for name, value in settings.items()}
        for name, given in clash.items():
            if given:
                raise RequestError(f"--like takes it from {like}; leave {name} out")
        made = Like.read(like)
        prompts, settings = [made.prompt], {**made.settings}
        said = [name for name in made.loading if getattr(load, name) != getattr(LoadingParts, name)]
        load = replace(load, **{n: v for n, v in made.loading.items() if n not in said})
    elif settings["strategy"] is not None:
        named = strategy_words([settings["strategy"]], presets=True)
        if len(named) > 1:
            raise RequestError("--strategy takes one strategy; name one of them")
        settings |= {"strategy": None} | read_strategy(named[0])
    if prompts_file is not None and output is not None and not output.suffix:
        clash = {"PROMPT": prompts, "--json": as_json, "--stats": stats_path, "--grid": grid,
                 "--use embeddings": "embeddings" in load.keywords(), "--overwrite": overwrite,
                 "--no-metadata": no_metadata}  # fmt: skip
        for name, given in clash.items():
            if given:
                raise RequestError(f"a folder gets one file per row of prompts; leave {name} out")
        settings = read_settings(settings, option_name).model_dump(exclude_none=True)
        return _draw_folder(prompts_file, output, share or "1/1", load, settings, resume, quiet)
    if share is not None:
        raise RequestError("--share takes a file of prompts and a folder: --prompts FILE -o FOLDER")
    words = [*(prompts or []), *(read_prompts(prompts_file) if prompts_file else [])]
    check_prompts(words)
    asked = read_settings(settings, option_name)
    count = 1 if made else len(words) * (asked.num_images or 1)
    files = 1 if grid else count
    if output is None:
        output = Path("lantern.png") if overwrite or resume else free_name(files)
    check_files(output, stats_path, files, overwrite=overwrite, resume=resume)
    loading = load.open(quiet, size=asked.size, strategy=asked.drafting)
    with made.open_pipeline(loading) if made else loading as pipeline:
        prompt = words[0] if len(words) == 1 else words
        pipeline.request(prompt, **settings)
        asks = asked_of(load.keywords(), asked.model_dump())
        pictures = OutputImages(output, words, count // len(words), not grid, asks, not no_metadata)
        if resume:
            pictures.resume(asked.seed, overwrite)
        try:
            result = _generate_missing(pipeline, prompt, settings, pictures, quiet, made)
        except BaseException:  # Ctrl-C and a lost device too: what is finished is kept
            if kept := pictures.keep():
                warn(", ".join(map(str, kept)), "kept")
            raise
    if result is not None and not result.images:  # a prior, and nothing that paints
        pictures.write_tokens(result)
    elif grid:
        pictures.write_grid(asked.num_images or 1)
    pictures.discard_notes()
    if made and result is not None and not quiet:
        _compare(made, result.stats)
    stats = [] if result is None else result.stats.model_dump(mode="json")
    if as_json:
        print_json(stats)
    if stats_path is not None:
        write_json(stats_path, stats)
    if not quiet and not as_json:
        if result is None:
            say("every image is there already", label="nothing to generate", style="bold")
        else:
            _summary(result)
            for line in result.stats.decision.text() if verbose else ():
                say(line, label="decided", style="bold")
        if pictures.written:
            say(", ".join(map(str, pictures.written)), label="wrote", style="bold green")


def _compare(like: Like, stats: GenerationStats) -> None:
    """Say whether an image has the tokens of the PNG that it was made after."""
    if stats.tokens_sha256 == like.tokens_sha256:
        return note(f"the tokens are those of {like.path}")
    pairs = [
        (getattr(like.decision, n), getattr(stats.decision, n))
        for n in ("backend", "device", "dtype")
    ]
    why = ", ".join(f"{was} is {now} here" for was, now in pairs if was != now)
    warn(f"the tokens are not those of {like.path}: {why or 'its batch was another'}", "differs")


def _generate_missing(
    pipeline: Pipeline,
    prompt: str | int | Sequence[str | int],
    settings: dict[str, Any],
    pictures: OutputImages,
    quiet: bool,
    like: Like | None = None,
) -> GenerationResult | None:
    """Generate the missing images; each batch is written when it is done. None: nothing was missing."""
    journal = pictures.journal
    left = [index for index in range(pictures.count) if index not in journal.finished]
    if not left:
        return None
    if journal.seed is not None:
        settings = {**settings, "seed": journal.seed}
    journal.seed = pipeline.request(prompt, **settings).seed

    def keep(first: int, images: list[Any]) -> None:
        for offset, image in enumerate(images):
            pictures.add(left[first + offset], image)

    only = None if len(left) == pictures.count else left
    if like is not None:  # one image of those under its seed
        decision = like.decision.model_copy(update=pipeline.runtime.place)
        only, settings = [like.image], {**settings, "decision": decision}
    with print_log(quiet), bar("decoding", quiet, unit="tokens") as report:
        return pipeline.generate(
            prompt,
            on_progress=report,
            on_images=keep,
            only=only,
            unfinished=pictures.unfinished,
            **{**settings, "seed": journal.seed},
        )


def _summary(result: GenerationResult) -> None:
    stats, seconds = result.stats, result.stats.seconds
    if stats.tokens_per_second is None:
        speed = f"on the {stats.device_name}, a simulation whose times mean nothing"
        rest = ""
    else:
        busy = seconds.prefill + seconds.decode
        speed = f"in {busy:.2f} s ({stats.tokens_per_second:.0f} tokens/s)"
        rest = f"; text {seconds.text:.2f} s, pixels {seconds.pixels:.2f} s"
    lines = {
        "decoded": f"{stats.tokens} tokens {speed}, {stats.step_compression:.2f} tokens per step{rest}"
    }
    tree, how = stats.strategy.drafts, "auto"
    if stats.auto is not None:
        lines["auto"] = stats.auto
    else:
        how = stats.strategy.name
        if isinstance(tree, StaticTree) and not tree.name.startswith("custom"):
            how += f" over the tree {tree.name}"
        how += f" ({stats.strategy.detail})"
    if seconds.measuring:
        lines["measured"] = f"which drafts are faster here, in {seconds.measuring:.1f} s"
    lines[LOSS] = stats.quality_loss
    lines["with"] = (
        f"{how} on {stats.device} ({stats.device_name}, {stats.dtype}), model {stats.model}, "
        f"seed {stats.seed}"
    )
    for label, text in lines.items():
        say(text, label=label, style="bold")


def _draw_folder(
    prompts: Path,
    output: Path,
    share: str,
    load: LoadingParts,
    settings: Mapping[str, object],
    resume: bool,
    quiet: bool,
) -> None:
    """Generate a file of prompts into a folder, and print the speed. Raises RequestError."""
    from lantern_accel.generation.folder import generate_file

    said = read_settings(settings)
    opened = partial(load.open, quiet, size=said.size, strategy=said.drafting)
    with bar("generating", quiet, unit="images") as report:
        summary = generate_file(
            prompts,
            output,
            opened,
            load.keywords(),
            settings,
            share=share,
            resume=resume,
            on_progress=report,
        )
    if quiet:
        return
    one = summary["this_call"]
    speed = one["images_per_second"]
    if speed is not None:
        say(f"{one['images']} images, {speed:.2f} images/s", label="generated", style="bold")
    for number, text in list(summary["failed"].items())[:10]:
        warn(f"row {int(number) + 1}: {text}", "not generated")
    if (moved := one["total_variation_per_token"]) is not None:
        say(f"{moved:.4f}", label=LOSS, style="bold")
    text = f"{summary['images']} images in {output}, seed {summary['seed']}"
    say(text, label="wrote", style="bold green")
