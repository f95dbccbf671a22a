"""``lantern-accel evaluate``: the papers' first experiments and tables, for a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lantern_accel import bounds
from lantern_accel.cli.console import note, say, warn
from lantern_accel.cli.options import LoadingParts, option, strategy_words, with_options
from lantern_accel.errors import RequestError, did_you_mean
from lantern_accel.files import check_target
from lantern_accel.prompts import read_prompts
from lantern_accel_profiles.commands.tables import show_markdown

if TYPE_CHECKING:
    from lantern_accel.generation.pipeline import Pipeline
    from lantern_accel_profiles.evaluation.suite.generation import SuiteRequest

#: Suites, and the files that each needs.
SUITES = {"coco": ("--captions", "--images"), "imagenet": (), "prompts": ("--prompts",)}
#: Options that the request takes as they are.
AS_ASKED = ("chunk", "batch", "reference", "resamples")


@dataclass(frozen=True)
class SuiteOptions:
    """The options of a suite as they were typed."""

    suite: str | None = option("Make the papers' table: coco, imagenet, or prompts (--prompts).")
    captions: Path | None = option(
        "COCO's captions_val2017.json, or a .jsonl of files and prompts. --images has the images."
    )
    prompts: Path | None = option("Prompts without real images: lines, PartiPrompts.tsv or .jsonl.")
    count: int | None = option("Number of prompts. Default: all.", min=2, max=bounds.MOST_SAMPLES)
    protocol: str | None = option("Protocol: lantern (coco, prompts), sjd, or adm (imagenet).")
    reference: Path | None = option("Real images, as an .npz in ADM's layout.")
    metric_weights: list[str] = option(
        "Weights of a metric: inception, vgg16, ViT-B-32, ViT-B-16 or hpsv2. Repeatable.",
        default=[],
        metavar="NAME=PATH",
    )
    metrics_on_host: bool = option("Run the metrics' networks on the processor.", default=False)
    work: Path | None = option("Folder for the images. Default: the output's name with .pictures.")
    chunk: int = option("Most images that an interruption loses.", default=16, min=1, max=4096)
    batch: int = option("Batch size.", "--batch", "-b", default=1, min=1, max=bounds.MOST_BATCH)
    pictures: list[str] = option(
        "Also measure images from elsewhere. Repeatable.", default=[], metavar="NAME=FOLDER"
    )
    write_prompts: Path | None = option(
        "Only write the suite's prompts to this .jsonl, for `generate --prompts`."
    )
    resamples: int = option("Bootstrap resamples of FID.", default=100, min=2, max=10_000)
    preset: str | None = option("Published sampling, from `lantern-accel models --presets`.")
    temperature: float | None = option("Sampling temperature; 0 is greedy.")
    top_k: int | None = option("Keep the k most likely tokens. 0 keeps all.")
    top_p: float | None = option("Keep the most likely tokens up to this probability.")
    cfg_scale: float | None = option("Guidance scale.")

    @property
    def name(self) -> Any:
        """The suite's name; ``prompts`` where only a file of prompts is named, None without either."""
        return self.suite or ("prompts" if self.prompts is not None else None)

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling settings that were given."""
        given = {n: getattr(self, n) for n in ("temperature", "top_k", "top_p", "cfg_scale")}
        return {name: value for name, value in given.items() if value is not None}


@with_options
def evaluate(
    *,
    context: typer.Context,
    output: Path | None = typer.Option(
        None,
        "--output",
        "-o",
        help="JSON file of the results. An interrupted run continues in it. Default: eval.json, quick: "
        "eval-quick.json.",
    ),
    load: LoadingParts,
    quick: bool = typer.Option(
        False, help="Measure few images and settings, for a first look only."
    ),
    part: list[str] = typer.Option([], help="Measure only this part. Repeatable."),
    images: Path | None = typer.Option(
        None, help="Folder of captions.jsonl and images that the model was not trained on."
    ),
    grid: Path | None = typer.Option(
        None, help="Only write this PNG: forty fixed prompts with every strategy."
    ),
    prompt: list[str] = typer.Option([], help="A prompt of --grid, not the forty. Repeatable."),
    strategy: list[str] = typer.Option(
        ["vanilla,eagle,eagle2,lantern,lantern++"],
        "--strategy",
        "-s",
        help="Strategies of --suite and --grid, separated by commas. --suite also takes presets. "
        "A strategy with settings needs its own --strategy: lantern++:k=10,lambda=2.",
    ),
    seed: int = typer.Option(0, min=0, max=bounds.MOST_SEED, help="Random seed."),
    suite: SuiteOptions,
) -> None:
    """Measure a model by the papers' first experiments, or with --suite by their table.

    Parts: likelihood, ambiguity, interchange, frontier, distances. With --suite only the parts that
    --part names are measured too. Tables are written next to the JSON, as .md; missing weights are
    named, with size and licence.
    """
    # ``context.obj``: the images that a model's own trainer knows, as its command line passes them.
    from lantern_accel.device.plugins import choose_device

    choose_device(load.device, load.options)  # before torch: some devices read the environment then
    from lantern_accel.progress import console_progress
    from lantern_accel.training.imageset import CAPTIONS
    from lantern_accel_profiles.evaluation.schema import PARTS, EvaluationSettings
    from lantern_accel_profiles.evaluation.tables import (
        check_targets,
        first_experiments,
        markdown,
        tables,
    )

    output = output or Path("eval-quick.json" if quick else "eval.json")
    names = strategy_words(strategy, presets=grid is None)
    ready = None
    if suite.suite is not None or suite.prompts is not None:
        if grid is not None:
            raise RequestError("--grid generates a grid and --suite a table; ask for one of them")
        ready = _read(suite, images, output)
        if suite.write_prompts is not None:
            from lantern_accel_profiles.evaluation.suite.captions import write_prompts

            if (captioned := ready.keywords["captioned"]) is None:
                raise RequestError("--write-prompts is for captions; class ids are counted from 0")
            write_prompts(suite.write_prompts, captioned.prompts)
            return say(str(suite.write_prompts), label="wrote", style="bold green")
        if images is not None and not (images / CAPTIONS).is_file():
            images = None  # the parts read another list
    elif suite.captions is not None or suite.reference is not None:
        raise RequestError("--captions and --reference belong to --suite; name it, such as coco")
    for name in part:
        if name not in PARTS:
            raise RequestError(f"no part is named {name!r}{did_you_mean(name, PARTS)}")
    if grid is None:
        check_targets(output)
    else:
        check_target(grid)
    with load.open() as pipeline:
        from lantern_accel_profiles.evaluation.grid import FORTY, save_grid
        from lantern_accel_profiles.evaluation.run import Evaluator

        if grid is not None:
            drawn = prompt or FORTY
            save_grid(pipeline, drawn, grid, seed=seed, strategies=names, say=note)
            return say(str(grid), label="wrote", style="bold green")
        settings = EvaluationSettings.quick(seed) if quick else EvaluationSettings(seed=seed)
        source = context.obj(settings.images, settings.seed) if context.obj else None
        made = None if ready is None else _request(ready, suite, pipeline, names, seed)
        run = Evaluator(pipeline, output, settings, images, source, console_progress())
        report = run.run(tuple(part) or (PARTS if ready is None else ()), made)
        written = [output, output.with_suffix(".md")]
        if quick and made is None and not part:
            target, shown = pipeline.manifest.target, ["vanilla", "scd"]
            if pipeline.model.drafter is not None:
                shown = ["vanilla", "eagle"]
                if pipeline.strategy("lantern++").neighbours < target.vocab_size:
                    shown.append("lantern++")
            classes = getattr(target, "conditioning", "text") == "class"
            drawn = ["0", "1"] if classes else [*FORTY[:4]]
            written.append(output.with_suffix(".png"))
            save_grid(pipeline, drawn, written[-1], seed=seed, strategies=shown)
    found = tables(report.suite)[:1] if report.suite is not None else [*first_experiments(report)]
    show_markdown(markdown(found))
    reasons: dict[str, list[str]] = {}
    for name, why in report.skipped.items():
        reasons.setdefault(why, []).append(name)
    if reasons:
        text = "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items())
        warn(text, "left out")
    say(", ".join(map(str, written)), label="wrote", style="bold green")


def _read(asked: SuiteOptions, images: Path | None, output: Path) -> partial[SuiteRequest]:
    """Read a suite as far as that goes without a model; raises a LanternError in one sentence.

    ``images``: the folder of the captions' images.
    """
    from lantern_accel_profiles.evaluation.suite.captions import Captioned, read_captions
    from lantern_accel_profiles.evaluation.suite.generation import SuiteRequest
    from lantern_accel_profiles.evaluation.suite.networks import read_given
    from lantern_accel_profiles.evaluation.suite.protocol import PROTOCOLS, USUAL

    if asked.name not in SUITES:
        raise RequestError(
            f"no suite is named {asked.name!r}{did_you_mean(str(asked.name), SUITES)}"
        )
    _fits(asked, images)
    wanted = asked.protocol or USUAL[asked.name]
    if wanted not in PROTOCOLS:
        raise RequestError(f"no protocol is named {wanted!r}{did_you_mean(wanted, PROTOCOLS)}")
    protocol = PROTOCOLS[wanted]
    if asked.write_prompts is not None:
        check_target(asked.write_prompts)
    captioned: Any = None  # of classes: the model says how many
    if asked.name == "coco":
        assert asked.captions is not None and images is not None
        captioned = read_captions(asked.captions, images, protocol.caption)
    elif asked.name == "prompts":
        assert asked.prompts is not None
        captioned = Captioned(read_prompts(asked.prompts))
    return partial(
        SuiteRequest,
        name=asked.name,
        protocol=protocol,
        captioned=captioned and captioned.first(asked.count),
        prompts_source=str((asked.captions or asked.prompts or Path("class ids")).name),
        work=asked.work or output.with_suffix(".pictures"),
        pictures=dict(map(_named_folder, asked.pictures)),
        weights=read_given(list(asked.metric_weights)),
        host=asked.metrics_on_host,
        **{name: getattr(asked, name) for name in AS_ASKED},
    )


def _named_folder(text: str) -> tuple[str, Path]:
    label, equals, folder = text.partition("=")
    if not (label.strip() and equals and folder):
        raise RequestError(
            f"--pictures takes NAME=FOLDER, such as official=images, not {text[:80]!r}"
        )
    return label.strip(), Path(folder)


def _fits(asked: SuiteOptions, images: Path | None) -> None:
    """Refuse files that the suite does not take, and say which it needs."""
    needs = SUITES[asked.name]
    given = {"--captions": asked.captions, "--images": images, "--prompts": asked.prompts}
    lacks = [kind for kind in needs if given[kind] is None]
    over = [kind for kind, value in given.items() if value is not None and kind not in needs]
    if lacks or over:
        wrong = f"{lacks[0]} is missing" if lacks else f"leave {over[0]} out"
        raise RequestError(
            f"the suite {asked.name} takes {' and '.join(needs) or 'no files of prompts'}; {wrong}"
        )


def _request(
    ready: partial[SuiteRequest],
    asked: SuiteOptions,
    pipeline: Pipeline,
    strategies: Sequence[str],
    seed: int,
) -> SuiteRequest:
    """Return the suite's request on a loaded model, its strategies resolved and tried."""
    from lantern_accel_profiles.evaluation.suite.captions import class_prompts
    from lantern_accel_profiles.evaluation.suite.generation import choose_strategies

    target, known = pipeline.model.manifest.target, ready.keywords
    of_classes = getattr(target, "conditioning", "text") == "class"
    if of_classes != (asked.name == "imagenet"):
        kind = "is class-conditional" if of_classes else "generates from text"
        better = "--suite imagenet" if of_classes else "--suite coco or --prompts FILE"
        raise RequestError(f"the model {pipeline.model.manifest.name!r} {kind}; use {better}")
    captioned = known["captioned"] or class_prompts(
        target.num_classes, asked.count, known["protocol"].count
    )
    example = captioned.prompts[0]
    settings = {"batch_size": asked.batch, **asked.sampling}
    sampling = pipeline.request(example, preset=asked.preset, **settings).sampling
    chosen = choose_strategies(pipeline, strategies, sampling, asked.batch, example)
    return ready(captioned=captioned, strategies=chosen, sampling=sampling, seed=seed)
