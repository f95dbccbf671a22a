"""``lantern-accel generate``: images from prompts, with the figures of the run.

``--on`` draws a file of prompts into a folder of images, on this device or on a fleet.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lantern_accel.bounds import MOST_SEED, whole
from lantern_accel.cli.console import bar, note, print_json, say, warn
from lantern_accel.cli.options import LoadingParts, strategy_words, with_options
from lantern_accel.errors import RequestError, did_you_mean, shown
from lantern_accel.files import cache_dir, read_record, write_json, write_record
from lantern_accel.generation.settings import check_prompts, exactly, option_name, read_settings
from lantern_accel.prompts import read_prompts
from lantern_accel.strategy.values import StaticTree

if TYPE_CHECKING:
    from lantern_accel.generation.pipeline import Pipeline
    from lantern_accel.generation.result import GenerationResult, GenerationStats

#: What others are compared with: no drafts, and what is chosen by measurement.
BASES = ("vanilla", "auto")
#: Below this share of a base it is said; processes vary by less.
SLOWER = 0.85
#: A strategy that drafts and brings fewer tokens per step has hardly drafted anything.
FEW_TOKENS = 1.15


@with_options
def generate(
    *,
    prompts: list[str] = typer.Argument(
        None, metavar="PROMPT...", help="What to draw; class ids for class-conditional models."
    ),
    output: Path | None = typer.Option(
        None,
        "--output",
        "-o",
        help="Picture to write; several are numbered -0, -1, ... Default: lantern.png, or the next free "
        "name.",
    ),
    overwrite: bool = typer.Option(
        False, "--overwrite", help="Replace pictures that are there already."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the run's figures as JSON."),
    stats_path: Path = typer.Option(
        None, "--stats", metavar="FILE", help="Write the run's figures into this file, as JSON."
    ),
    prompts_file: Path = typer.Option(
        None,
        "--prompts",
        metavar="FILE",
        help="Prompts from a file: one per line, .jsonl, .tsv, .parquet, or COCO's .json.",
    ),
    on: str | None = typer.Option(
        None,
        "--on",
        metavar="WHERE",
        help="Draw a file of prompts into the folder --output: here, or ray (all its devices).",
    ),
    workers: str = typer.Option(
        "auto",
        metavar="KIND=N,...",
        help="With --on ray: how many workers on which devices, such as CPU=2,GPU=4.",
    ),
    seeds: str = typer.Option(None, help="Several seeds, such as 1,2,3; each draws every prompt."),
    compare: str = typer.Option(
        None,
        metavar="A,B,...",
        help="Draw with several strategies, a column for each, in one picture.",
    ),
    resume: bool = typer.Option(
        False, "--resume", help="Draw only what is missing after the same command was interrupted."
    ),
    load: LoadingParts,
    exact_dtype: bool = typer.Option(
        False,
        "--exact-dtype",
        help="Compute in float32, in which exact strategies draw what vanilla draws; it costs speed.",
    ),
    embeddings: Path = typer.Option(
        None, help="The prompts' features (.safetensors, .npz), in place of the text encoder."
    ),
    scale: int = typer.Option(1, min=1, max=16, help="Enlarge the written pictures."),
    grid: bool = typer.Option(False, help="Write all images into one picture, a row per prompt."),
    metadata: bool = typer.Option(
        True,
        "--metadata/--no-metadata",
        help="Note prompt, seed, model, strategy and version in a PNG's text (the default), or not.",
    ),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="Print nothing but errors."),
    **settings: Any,
) -> None:
    """Draw PROMPT and write a picture; each batch is written when it is done.

    Example: lantern-accel generate "red heart" --seed 7 -o heart.png
    """
    from lantern_accel.cli.pictures import Pictures, check_files, free_name

    if exact_dtype:
        load = replace(load, dtype=exactly(load.dtype))
    if on is not None:
        clash = {"PROMPT": prompts, "--json": as_json, "--stats": stats_path, "--seeds": seeds,
                 "--compare": compare, "--grid": grid, "--embeddings": embeddings, "--scale": scale != 1,
                 "--overwrite": overwrite, "--no-metadata": not metadata}  # fmt: skip
        for name, given in clash.items():
            if given:
                raise RequestError(f"--on draws a file of prompts, a file each; leave {name} out")
        settings = read_settings(settings, option_name).model_dump(exclude_none=True)
        return _draw_folder(prompts_file, output, on, workers, load, settings, resume, quiet)
    words = [*(prompts or []), *(read_prompts(prompts_file) if prompts_file else [])]
    check_prompts(words)
    columns = strategy_words([compare]) if compare is not None else []
    if isinstance(settings["strategy"], str) and "," in settings["strategy"]:
        raise RequestError("--strategy draws with one strategy; --compare A,B draws with several")
    if settings["strategy"] is not None:
        strategy_words([settings["strategy"]])
    if columns and (settings["strategy"] is not None or resume):
        raise RequestError(
            "--compare draws with several strategies; leave --strategy and --resume out"
        )
    asked = read_settings(settings, option_name)
    runs: list[dict[str, Any]] = [
        {**settings, "seed": seed, "strategy": name}
        for seed in (_seeds(seeds) if seeds is not None else [settings["seed"]])
        for name in (columns or [settings["strategy"]])
    ]
    count = len(words) * (settings["num_images"] or 1) * len(runs)
    files = 1 if grid or columns else count
    if output is None:
        output = Path("lantern.png") if overwrite or resume else free_name(files)
    check_files(output, stats_path, files, overwrite=overwrite, resume=resume)
    with load.opened(quiet, embeddings=embeddings, size=asked.size) as pipeline:
        requests = [pipeline.request(words if len(words) > 1 else words[0], **one) for one in runs]
        if columns:  # one seed for all of them
            runs = [{**one, "seed": one["seed"] or requests[0].seed} for one in runs]
        together = not (grid or columns)
        pictures = Pictures(
            output, count, scale, together, [words, load.model, runs], resume, metadata
        )
        try:
            results = _draw(pipeline, words, runs, pictures, quiet)
        except BaseException:  # Ctrl-C and a lost device too: what is finished is kept
            if kept := pictures.keep():
                names = ", ".join(map(str, kept))
                warn(names, "kept")
            raise
    bare = [one for one in results if not one.images]
    if bare:  # a prior, and nothing that paints
        pictures.write_tokens(bare)
    elif columns:
        pictures.write_columns(len(columns), len(runs))
    elif grid:
        pictures.write_grid(settings["num_images"] or 1)
    pictures.done()
    figures = [one.stats.model_dump(mode="json") for one in results]
    stats = figures[0] if len(figures) == 1 else figures  # a list where several runs were made
    if as_json:
        print_json(stats)
    if stats_path is not None:
        write_json(stats_path, stats)
    if not quiet and not as_json:
        if not results:
            say("every image is there already", label="nothing to draw", style="bold")
        for result in results:
            _summary(result)
            if (slower := remark(result.stats)) is not None:
                warn(slower, "slower than plain here")
        if pictures.written:
            say(", ".join(map(str, pictures.written)), label="wrote", style="bold green")


def _draw(
    pipeline: Pipeline,
    words: Sequence[str | int],
    runs: Sequence[dict[str, Any]],
    pictures: Any,
    quiet: bool,
) -> list[GenerationResult]:
    """Draw every run's missing images; each batch is written when it is done."""
    results = []
    each = pictures.count // len(runs)
    prompt = words[0] if len(words) == 1 else list(words)
    for number, one in enumerate(runs):
        left = [index for index in range(each) if not pictures.has(number * each + index)]
        if not left:
            continue
        seed = pictures.seed(number, one["seed"])
        one = one if seed is None else {**one, "seed": seed}
        request = pipeline.request(prompt, **one)
        pictures.begin(number, request.seed)

        def keep(first: int, images: list[Any], at: int = number * each, left: Any = left) -> None:
            for offset, image in enumerate(images):
                pictures.add(at + left[first + offset], image)

        with bar("decoding", quiet, unit="tokens") as report:
            results.append(
                pipeline.generate(
                    prompt,
                    on_progress=report,
                    on_images=keep,
                    only=None if len(left) == each else left,
                    **{**one, "seed": request.seed},
                )
            )
    return results


def _seeds(text: str) -> list[int]:
    found = []
    for word in (one.strip() for one in text.split(",")):
        if (seed := whole(word, most=MOST_SEED)) is None:
            raise RequestError(f"{word[:40]!r} is not a seed; write numbers such as 1,2,3")
        found.append(seed)
    return found


def _summary(result: GenerationResult) -> None:
    from lantern_accel.report.rows import detail_of

    stats = result.stats
    seconds = stats.seconds
    if stats.tokens_per_second is None:
        speed = f"{stats.tokens} tokens on the {stats.device_name}, a simulation whose times mean nothing"
        rest = ""
    else:
        busy = seconds.prefill + seconds.decode
        speed = f"{stats.tokens} tokens in {busy:.2f} s ({stats.tokens_per_second:.0f} tokens/s)"
        rest = f"; text {seconds.text:.2f} s, pixels {seconds.pixels:.2f} s"
    say(
        f"{speed}, {stats.step_compression:.2f} tokens per step{rest}",
        label="decoded",
        style="bold",
    )
    if stats.auto is not None:
        say(stats.auto, label="auto", style="bold")
    if stats.rounding is not None:
        say(stats.rounding.text(), label="price", style="bold")
    tree, how = stats.strategy.drafts, "auto"
    if stats.auto is None:
        how = stats.strategy.name
        if isinstance(tree, StaticTree) and not tree.name.startswith("custom"):
            how += f" over the tree {tree.name}"
        how += f" ({detail_of(stats.strategy)})"
    say(
        f"{how} on {stats.device} "
        f"({stats.device_name}, {stats.dtype}), model {stats.model}, seed {stats.seed}",
        label="with",
        style="bold",
    )


def _draw_folder(
    prompts: Path | None,
    output: Path | None,
    on: str,
    workers: str,
    load: LoadingParts,
    settings: Mapping[str, Any],
    resume: bool,
    quiet: bool,
) -> None:
    """Draw, and say how fast every worker was; raises RequestError for what cannot be drawn so."""
    from lantern_accel.distributed.run import draw_file

    if on not in ("here", "ray"):
        raise RequestError(f"--on cannot be {shown(on)}{did_you_mean(on, ['here', 'ray'])}")
    if prompts is None:
        raise RequestError("--on draws a file of prompts; name it with --prompts FILE")
    if output is None or output.suffix:
        instead = "" if output is None else f", not {output}"
        raise RequestError(f"--on writes a folder of images; name one with --output{instead}")
    if workers != "auto" and on != "ray":
        raise RequestError("--workers says what Ray is asked for; give --on ray, or leave it out")
    if on == "ray" and load.device != "auto":
        raise RequestError("with --on ray the devices are those of --workers; leave --device out")
    make = partial(_workers, on, load, settings, workers, quiet)
    with bar("drawing", quiet, unit="images") as report:
        summary = draw_file(
            prompts, output, make, load.keywords(), settings, resume=resume, on_progress=report
        )
    if quiet:
        return
    for name, one in summary["workers_of_this_call"].items():
        speed = one["images_per_second"]
        rate = "whose times mean nothing" if speed is None else f"{speed:.2f} images/s"
        say(f"{one['images']} images on {one['device']}, {rate}", label=name, style="bold")
    for text in summary["lost_workers"]:
        warn(text, "lost")
    for number, text in list(summary["failed"].items())[:10]:
        warn(f"row {int(number) + 1}: {text}", "not drawn")
    say(f"{summary['images']} images in {output}, seed {summary['seed']}", label="wrote",
        style="bold green")  # fmt: skip


@contextmanager
def _workers(
    on: str, load: LoadingParts, settings: Mapping[str, Any], workers: str, quiet: bool
) -> Iterator[Any]:
    """Give what draws: a worker in this process, or a fleet on Ray."""
    slots = settings.get("batch_size")
    if on == "here":
        from lantern_accel.distributed.painter import Painter
        from lantern_accel.distributed.run import Here

        with Here(Painter(load.keywords(), settings, slots=slots)) as here:
            yield here
        return
    from lantern_accel.distributed.fleet import Fleet, connected, read_workers

    with connected() as ray:
        kinds = read_workers(workers, ray.cluster_resources(), load.threads)
        if not quiet:
            note(f"workers: {', '.join(map(str, kinds))}")
        given = replace(load, threads=None).keywords()  # a kind of device has its own
        tell = partial(warn, label="fleet")
        with closing(
            Fleet(ray, kinds, given, settings, threads=load.threads, slots=slots, say=tell)
        ) as fleet:
            yield fleet


def remark(stats: GenerationStats) -> str | None:
    """Keep a base's rate, or say that a named strategy was slower than one; None: nothing to say.

    Rates are kept for the device, model, dtype, batch and guidance, the highest of each base.
    """
    rate = stats.tokens_per_second
    if rate is None or stats.simulated:
        return None
    name = "auto" if stats.auto is not None else stats.strategy.name
    path = _path(stats)
    kept: dict[str, float] = read_record(path) or {}
    if name in BASES:
        if rate > kept.get(name, 0.0):
            write_record(path, {**kept, name: rate})
        return None
    base = max(kept, key=lambda one: kept[one], default=None)
    if base is not None and rate < SLOWER * kept[base]:
        plain = "plain decoding" if base == "vanilla" else "auto"
        return (
            f"{stats.strategy.name} drew {rate:.0f} tokens/s, and {plain} drew {kept[base]:.0f} here "
            "before; leave --strategy and --preset out to let auto choose"
        )
    if stats.step_compression < FEW_TOKENS:
        return (
            f"{stats.step_compression:.2f} tokens per step: hardly a draft was accepted, so plain "
            "decoding is likely faster; leave --strategy and --preset out to let auto choose"
        )
    return None


def _path(stats: GenerationStats) -> Path:
    kind = [stats.device_name, stats.device, stats.backend, stats.backend_version, stats.model]
    kind += [stats.weights_hash, stats.dtype, str(stats.batch_size), str(stats.sampling.guided)]
    kind += [stats.torch, "" if stats.rounding is None else stats.rounding.text()]
    digest = hashlib.sha256("\n".join(kind).encode()).hexdigest()[:24]
    return cache_dir() / "rates" / f"{digest}.json"
