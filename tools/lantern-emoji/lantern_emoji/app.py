"""The stages of the bundled model's training as commands: ``python tools/lantern-emoji STAGE``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from lantern_accel.cli import run
from lantern_accel.cli.console import say
from lantern_accel.cli.help import tidy
from lantern_accel.cli.options import with_options
from lantern_accel.cli.train import TrainerOptions, print_report
from lantern_accel_profiles.commands.evaluate import evaluate

app = typer.Typer(
    name="lantern-emoji",
    help="Train and evaluate lantern-emoji, the bundled model. All stages resume.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("evaluate")(evaluate)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one stage and return its exit code."""

    def with_images(**words: Any) -> None:
        from lantern_emoji.heldout import EmojiImages

        app(obj=EmojiImages, **words)

    return run(with_images, argv, "python tools/lantern-emoji")


@app.command("data")
def data() -> None:
    """Fetch the openly licensed emoji sets and render them to the cache."""
    from lantern_accel.progress import console_progress
    from lantern_emoji.data import prepare_data

    made = prepare_data(progress=console_progress())
    say(f"{len(made.records)} images, {len(made.split('heldout'))} of them held out", label="data")
    for style, skipped in made.manifest["skipped"].items():
        named = ", ".join(f"{code} ({why})" for code, why in list(skipped.items())[:5])
        more = ", ..." if len(skipped) > 5 else ""
        say(f"{len(skipped)} pictures of {style}: {named}{more}", label="skipped", style="yellow")


def _stage(stage: str, given: TrainerOptions, **more: Any) -> None:
    from lantern_accel.device.plugins import choose_device

    # Choose the device before torch is imported: some vendors read the environment then.
    found = choose_device(given.device, given.options)
    from lantern_accel.progress import console_progress
    from lantern_accel.training.device import TrainDevice
    from lantern_emoji import workspace

    kind, train = workspace.STAGES[stage]
    chosen = given.settings(kind, **more)
    opened = TrainDevice(found.open(), chosen.precision)
    try:
        report = train(chosen, given.work, console_progress(), resume=given.resume, device=opened)
    finally:
        opened.backend.close()
    print_report(report, given.work / workspace.folder_of(chosen))


@app.command("tokenizer")
@with_options
def tokenizer(given: TrainerOptions) -> None:
    """Train the VQ tokenizer and encode the images."""
    _stage("tokenizer", given)


@app.command("target")
@with_options
def target(
    given: TrainerOptions,
    folder: str = typer.Option(None, help="Its folder in WORK; drafter and bundle read `target`."),
) -> None:
    """Train the target, a text-conditional LlamaGen transformer, with its text encoder."""
    _stage("target", given, folder=folder)


@app.command("drafter")
@with_options
def drafter(given: TrainerOptions) -> None:
    """Train the EAGLE drafter on the final target."""
    _stage("drafter", given)


@app.command("bundle")
def bundle(
    to: Path = typer.Argument(
        ..., metavar="FOLDER", help="Folder to write; generate takes it as --model."
    ),
    work: Path = typer.Option(
        Path("lantern-train"), "--work", "-w", help="Folder of the training run."
    ),
    name: str = typer.Option("lantern-emoji", help="The model's name."),
    config: Path = typer.Option(
        Path(__file__).parents[1] / "defaults.json",
        show_default="lantern-emoji's",
        help="JSON or TOML with the model's defaults: sampling, trees, acceptance rules.",
    ),
    summary: str = typer.Option("", help="One line about the model, for listings."),
    licence: str = typer.Option("", help="Its licence, for listings."),
) -> None:
    """Put the trained parts together as a model folder."""
    from lantern_accel.strategy.choose import ModelDefaults
    from lantern_accel.training.folder import read_config
    from lantern_emoji.folder import bundle as put_together

    defaults = read_config(ModelDefaults, config)
    made = put_together(work, to, name, defaults, summary, licence)
    say(str(made), label="wrote", style="bold green")


@app.command("prompts")
def prompts(
    count: int = typer.Option(8400, min=1, help="How many."),
    seed: int = typer.Option(0, min=0, help="Of the choice."),
) -> None:
    """Print prompts that a draft head learns from: none of those that anything is reported on."""
    from lantern_emoji.captions import prompts_of

    typer.echo("\n".join(prompts_of(count, seed)))


tidy(app)
