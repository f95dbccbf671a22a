"""``lantern-accel train``: a drafter for any model, a target, and the folder that parts make."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from lantern_accel import bounds
from lantern_accel.cli.console import print_json, say
from lantern_accel.cli.options import (
    OnDevice,
    TextPart,
    TokenizerPart,
    option,
    with_options,
)
from lantern_accel.errors import DataError, DiskFullError, StrategyError
from lantern_accel.files import disk_is_full
from lantern_accel.generation.settings import read_size
from lantern_accel.prompts import read_prompts
from lantern_accel.strategy.rules import Lantern, LanternPP, validated
from lantern_accel.strategy.values import DynamicTree, Sampling, StaticTree

train = typer.Typer(
    help="Train a drafter for any model, or a target of your own. All stages resume.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@dataclass(frozen=True)
class Training(OnDevice):
    """What every trainer takes."""

    work: Path = option(
        "Folder of the training run.", "--work", "-w", default=Path("lantern-train")
    )
    config: Path | None = option("JSON or TOML with the trainer's settings.")
    steps: int | None = option("Optimizer steps.", min=1, max=bounds.MOST_STEPS)
    minutes: float | None = option(
        "Minutes for all runs together; the schedule ends then.",
        min=0.01,
        max=bounds.MOST_SECONDS,
    )
    seed: int | None = option("Fixes all random numbers.", min=0, max=bounds.MOST_SEED)
    resume: bool = option(
        "Continue from the checkpoint, or start over.", "--resume/--restart", default=True
    )

    def settings(self, kind: type[Any], **more: Any) -> Any:
        """Return a trainer's settings, ``kind``: of the file, then of these options and ``more``."""
        from lantern_accel.training.folder import read_config

        own = {"steps": self.steps, "max_minutes": self.minutes, "seed": self.seed}
        return read_config(kind, self.config, **own, **more)


@contextmanager
def explaining_the_disk(where: Path) -> Iterator[None]:
    """Explain an error of the disk in one sentence."""
    try:
        yield
    except OSError as error:
        kind = DiskFullError if disk_is_full(error) else DataError
        raise kind(
            f"{error.filename or where} cannot be read or written ({error.strerror or error}); "
            "make it accessible or free some space, and run the same command to continue"
        ) from error


def moved(stage: str, what: str, instead: str = "") -> DataError:
    """Return the error that says where a stage of the bundled model's training is now."""
    return DataError(
        f"{what} moved out of the package, next to the bundled model's settings: in a copy of the "
        f"repository, run `python tools/lantern-emoji {stage}` with the same options{instead}"
    )


def _moved_command(stage: str, what: str) -> None:
    words = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}

    @train.command(stage, hidden=True, context_settings=words)
    def command() -> None:
        raise moved(stage, what)


_moved_command("data", "fetching the bundled model's training images")
_moved_command("tokenizer", "training an image tokenizer on them")


def print_report(report: dict[str, Any], folder: Path) -> None:
    """Print a trainer's figures as JSON, and say where it wrote."""
    left_out = ("curve", "config", "environment")
    print_json({k: v for k, v in report.items() if k not in left_out})
    say(str(folder), label="wrote", style="bold green")


@train.command("target")
@with_options
def target(
    *,
    given: Training,
    folder: str = typer.Option(None, help="Its folder in WORK; bundle reads `target`."),
    images: Path | None = typer.Option(
        None, help="Folder with captions.jsonl and images to learn from."
    ),
    model: str = typer.Option(
        "lantern-emoji", help="The LlamaGen model whose image tokenizer reads and draws pictures."
    ),
) -> None:
    """Train a target of your own, a text-conditional LlamaGen transformer, on captioned images."""
    options = given.options
    if images is None:
        raise moved(
            "target",
            "training on the bundled model's images",
            "; to train on your own, name a folder of captioned ones with --images",
        )
    from lantern_accel.device.plugins import choose_device

    choose_device(given.device, options)  # before torch: some vendors read the environment then
    import lantern_accel
    from lantern_accel.quality.progress import console_progress
    from lantern_accel.training.device import TrainDevice
    from lantern_accel.training.target import TargetConfig, run_captioned_target

    chosen = given.settings(TargetConfig, folder=folder)
    with (
        explaining_the_disk(given.work),
        lantern_accel.load(model, device=given.device, options=options, drafter="none") as pipeline,
    ):
        device = TrainDevice(pipeline.backend, chosen.precision)
        report = run_captioned_target(
            pipeline, chosen, given.work, images, device, console_progress(), resume=given.resume
        )
    print_report(report, given.work / chosen.folder)


@train.command("drafter")
@with_options
def drafter(
    *,
    given: Training,
    model: str | None = typer.Option(
        None, help="The model: whatever generate takes, official files included."
    ),
    images: Path | None = typer.Option(
        None, help="A folder with captions.jsonl and images to learn from."
    ),
    prompts: Path | None = typer.Option(
        None,
        help="Without --images: a file with one prompt per line, which the target draws.",
    ),
    samples: int = typer.Option(
        256,
        min=2,
        max=bounds.MOST_IMAGES,
        help="Without --images: how many images the target draws.",
    ),
    size: str | None = typer.Option(
        None,
        metavar="WxH",
        help="For a model that draws several sizes: width and height in pixels.",
    ),
    vq: TokenizerPart = None,
    text_encoder: TextPart = None,
    into: Path | None = typer.Option(
        None, help="For a model that is a folder: write a copy of it here, with the new drafter."
    ),
) -> None:
    """Train an EAGLE drafter for a model, on captioned images or on what the model draws."""
    options = given.options
    if model is None:
        raise moved(
            "drafter",
            "training a drafter on the bundled model's images",
            "; for any other model, name it with --model",
        )
    from lantern_accel.device.plugins import choose_device

    choose_device(given.device, options)  # before torch, as above
    import lantern_accel
    from lantern_accel.models.bundle import bundled_models
    from lantern_accel.quality.progress import console_progress
    from lantern_accel.training.anymodel import run_model_drafter
    from lantern_accel.training.device import TrainDevice
    from lantern_accel.training.drafter import DrafterTrainConfig
    from lantern_accel.training.folder import with_drafter

    chosen = given.settings(DrafterTrainConfig)

    pixels = read_size(size) if size else None
    folder = bundled_models().get(model, Path(model))
    if into is not None and not (folder / "model.json").is_file():
        raise DataError(
            f"--into writes a model folder, and {model} has no model.json; leave it out and name the "
            f"drafter when drawing: --drafter {given.work / 'drafter'}"
        )
    lines = [] if prompts is None else [str(one) for one in read_prompts(prompts)]
    with lantern_accel.load(
        model,
        device=given.device,
        options=options,
        vq=vq,
        drafter="none",
        text_encoder=text_encoder,
    ) as pipeline:
        report = run_model_drafter(
            pipeline,
            chosen,
            given.work / "drafter",
            TrainDevice(pipeline.backend, chosen.precision),
            console_progress(),
            resume=given.resume,
            images=images,
            prompts=lines,
            samples=samples,
            size=pixels,
        )
    print_report(report, given.work / "drafter")
    if into is not None:
        say(
            str(with_drafter(folder, given.work / "drafter", into)),
            label="wrote",
            style="bold green",
        )


@train.command("bundle")
def bundle(
    to: Path = typer.Argument(
        ..., metavar="FOLDER", help="Folder to write; generate takes it as --model."
    ),
    work: Path = typer.Option(
        Path("lantern-train"), "--work", "-w", help="Folder of the training run."
    ),
    name: str = typer.Option("my-model", help="The model's name."),
    cfg_scale: float = typer.Option(3.0, help="Default guidance."),
    top_k: int = typer.Option(0, help="Default top-k; 0 keeps all codes."),
    top_p: float = typer.Option(1.0, help="Default top-p; 1 keeps all codes."),
    tree: str = typer.Option("small_8", help="Default static tree."),
    dynamic_tree: str = typer.Option("dynamic:4,3,12", help="Default dynamic tree."),
    k: int = typer.Option(10, help="LANTERN++'s default k."),
    lam: float = typer.Option(2.0, "--lambda", help="LANTERN++'s default lambda."),
    lantern_k: int = typer.Option(100, help="LANTERN's default k."),
    delta: float = typer.Option(0.2, help="LANTERN's default delta."),
    summary: str = typer.Option("", help="One line about the model, for listings."),
    licence: str = typer.Option("", help="Its licence, for listings."),
) -> None:
    """Put the trained parts together as a model folder."""
    from lantern_accel.families.manifest import ModelDefaults
    from lantern_accel.strategy.trees import parse_tree
    from lantern_accel.training.folder import bundle as put_together

    static, dynamic = parse_tree(tree), parse_tree(dynamic_tree)
    if not isinstance(static, StaticTree):
        raise StrategyError(f"--tree {tree} is not a static tree; name one or list its paths")
    if not isinstance(dynamic, DynamicTree):
        raise StrategyError(f"--dynamic-tree {dynamic_tree} is not dynamic:TOP_K,DEPTH,TOTAL")
    sampling = {"cfg_scale": cfg_scale, "top_k": top_k, "top_p": top_p}
    defaults = ModelDefaults(
        sampling=validated(Sampling, sampling, "sampling"),
        static_tree=static,
        dynamic_tree=dynamic,
        lantern=validated(Lantern, {"k": lantern_k, "delta": delta}, "lantern"),
        lantern_pp=validated(LanternPP, {"k": k, "lam": lam}, "lantern++"),
    )
    made = put_together(work, to, name, defaults, summary, licence)
    say(str(made), label="wrote", style="bold green")
