"""The stages of the bundled model's training as commands: ``python tools/lantern-emoji STAGE``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from lantern_accel.cli import evaluate, run
from lantern_accel.cli.console import say
from lantern_accel.cli.options import OPTION, read_options
from lantern_accel.cli.train import (
    CONFIG,
    DEVICE,
    MINUTES,
    RESUME,
    SEED,
    STEPS,
    THREADS,
    WORK,
    explaining_the_disk,
    print_report,
)

app = typer.Typer(
    name="lantern-emoji",
    help="Train and evaluate lantern-emoji, the bundled model. All stages resume.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
evaluate.register(app)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one stage and return its exit code."""

    def with_images(**words: Any) -> None:
        from lantern_emoji.heldout import EmojiImages

        app(obj=EmojiImages, **words)

    return run(with_images, argv, "python tools/lantern-emoji")


@app.command("data")
def data() -> None:
    """Fetch the openly licensed emoji sets and render them to the cache."""
    from lantern_accel.quality.progress import console_progress
    from lantern_emoji.data import prepare_data

    with explaining_the_disk(Path("the cache")):
        made = prepare_data(progress=console_progress())
    say(f"{len(made.records)} images, {len(made.split('heldout'))} of them held out", label="data")
    for style, skipped in made.manifest["skipped"].items():
        named = ", ".join(f"{code} ({why})" for code, why in list(skipped.items())[:5])
        more = ", ..." if len(skipped) > 5 else ""
        say(f"{len(skipped)} pictures of {style}: {named}{more}", label="skipped", style="yellow")


def _stage(
    stage: str,
    work: Path,
    config: Path | None,
    resume: bool,
    device: str,
    options: dict[str, Any],
    **overrides: Any,
) -> None:
    from lantern_accel.device.plugins import choose_device

    # Choose the device before torch is imported: some vendors read the environment then.
    found = choose_device(device, options)
    from lantern_accel.quality.progress import console_progress
    from lantern_accel.training.device import TrainDevice
    from lantern_accel.training.folder import read_config
    from lantern_emoji import workspace

    kind, train = workspace.STAGES[stage]
    chosen = read_config(kind, config, **overrides)
    opened = TrainDevice(found.open(), chosen.precision)
    try:
        with explaining_the_disk(work):
            report = train(chosen, work, console_progress(), resume=resume, device=opened)
    finally:
        opened.backend.close()
    if opened.main:
        print_report(report, work / workspace.folder_of(chosen))


@app.command("tokenizer")
def tokenizer(
    work: Path = WORK,
    config: Path = CONFIG,
    steps: int = STEPS,
    minutes: float = MINUTES,
    seed: int = SEED,
    resume: bool = RESUME,
    device: str = DEVICE,
    threads: int = THREADS,
    option: list[str] = OPTION,
) -> None:
    """Train the VQ tokenizer and encode the images."""
    over: dict[str, Any] = {"steps": steps, "max_minutes": minutes, "seed": seed}
    _stage("tokenizer", work, config, resume, device, read_options(option, threads), **over)


@app.command("target")
def target(
    work: Path = WORK,
    config: Path = CONFIG,
    steps: int = STEPS,
    minutes: float = MINUTES,
    seed: int = SEED,
    resume: bool = RESUME,
    device: str = DEVICE,
    threads: int = THREADS,
    option: list[str] = OPTION,
    folder: str = typer.Option(None, help="Its folder in WORK; drafter and bundle read `target`."),
) -> None:
    """Train the target, a text-conditional LlamaGen transformer, with its text encoder."""
    over: dict[str, Any] = {"steps": steps, "max_minutes": minutes, "seed": seed, "folder": folder}
    _stage("target", work, config, resume, device, read_options(option, threads), **over)


@app.command("drafter")
def drafter(
    work: Path = WORK,
    config: Path = CONFIG,
    steps: int = STEPS,
    minutes: float = MINUTES,
    seed: int = SEED,
    resume: bool = RESUME,
    device: str = DEVICE,
    threads: int = THREADS,
    option: list[str] = OPTION,
) -> None:
    """Train the EAGLE drafter on the final target."""
    over: dict[str, Any] = {"steps": steps, "max_minutes": minutes, "seed": seed}
    _stage("drafter", work, config, resume, device, read_options(option, threads), **over)
