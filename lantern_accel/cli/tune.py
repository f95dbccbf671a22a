"""``lantern-accel tune``: what is fastest on this device with this model, kept for later requests."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import typer

from lantern_accel import bounds
from lantern_accel.cli.console import say
from lantern_accel.cli.options import (
    DEVICE,
    DTYPE,
    MODEL,
    OPTION,
    THREADS,
    finite,
    read_options,
    strategy_words,
    whole_numbers,
)


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("tune")(tune)


def tune(
    device: str = DEVICE,
    model: str = MODEL,
    strategy: str = typer.Option(
        "auto",
        help="auto (windows, trees and plain decoding), eagle or lantern++ (their tree), or one that "
        "drafts in a window, such as scd (its length and siblings).",
    ),
    batch: list[str] = typer.Option(
        ["1,2,4,8,16,32"], "--batch", "-b", help="Batch sizes to choose for, such as 1,4."
    ),
    temperature: float = typer.Option(1.0, min=0, max=bounds.MOST_TEMPERATURE, callback=finite),
    relaxed: bool = typer.Option(False, "--relaxed", help="Choose for `generate --relaxed`."),
    tv_budget: float = typer.Option(
        None, callback=finite, help="Choose for `generate --tv-budget` with this budget."
    ),
    max_seconds: float = typer.Option(
        None,
        "--max-seconds",
        min=1,
        max=bounds.MOST_SECONDS,
        callback=finite,
        help="The most seconds that choosing for auto may take.",
    ),
    dtype: str = DTYPE,
    threads: int = THREADS,
    option: list[str] = OPTION,
    repeats: int = typer.Option(3, min=1, max=bounds.MOST_SAMPLES, help="Decodings per finalist."),
    output: Path = typer.Option(
        None, "--output", "-o", help="Also write what was measured, as JSON."
    ),
) -> None:
    """Measure acceptance and step costs here, and keep what is fastest; generate then uses it.

    If it is interrupted, run the same command again to go on.
    """
    import lantern_accel
    from lantern_accel.errors import StrategyError
    from lantern_accel.files import check_target, write_json
    from lantern_accel.strategy.values import StaticTree, Window

    if output is not None:
        check_target(output)
    options = read_options(option, threads)
    sizes = whole_numbers("--batch", batch, 1, bounds.MOST_BATCH)
    strategy_words([strategy])
    with lantern_accel.load(model, device=device, dtype=dtype, options=options) as pipeline:
        log = partial(say, to_stderr=True, style="dim")
        if strategy == "auto":
            from lantern_accel.tuning.auto import tune_auto

            asked = pipeline.strategy("auto", relaxed=relaxed or None, tv_budget=tv_budget)
            choices, evidence = tune_auto(
                pipeline,
                asked,
                temperature=temperature,
                batches=sizes,
                repeats=repeats,
                budget=max_seconds,
                say=log,
            )
            _tell(choices, sizes)
            if output is not None:
                made = [one.sealed().model_dump(mode="json") for one in choices]
                write_json(output, evidence.model_dump(mode="json") | {"choices": made})
            return
        asked = pipeline.strategy(strategy)
        if isinstance(asked.tree, Window):
            from lantern_accel.tuning.windows import tune_windows

            kept = tune_windows(
                pipeline,
                asked,
                temperature=temperature,
                batches=sizes,
                repeats=repeats,
                say=log,
            )
            _tell_windows(kept, sizes)
            if output is not None:
                write_json(
                    output, {"choices": [one.sealed().model_dump(mode="json") for one in kept]}
                )
            return
        from lantern_accel.strategy.choices import choice_path
        from lantern_accel.tuning.trees import tune_tree  # torch, which the device precedes

        chosen = asked
        if not isinstance(chosen.tree, StaticTree):
            raise StrategyError(
                f"{strategy} has no static tree and no window to tune; choose auto, eagle, lantern++ or "
                "scd"
            )
        found = tune_tree(
            pipeline,
            chosen,
            temperature=temperature,
            repeats=repeats,
            say=log,
        )
    if output is not None:
        write_json(output, found.sealed().model_dump(mode="json"))
    for level, row in enumerate(found.evidence["rates"]):
        say(
            " ".join(f"{rate:.2f}" for rate in row), label=f"accepted at depth {level + 1}, by rank"
        )
    paths = found.strategy.tree.shape or ()
    words = ",".join("".join(map(str, path)) for path in paths)
    fastest = max(one.tokens_per_second for one in found.measured[1:])
    say(f"{words} ({len(paths)} drafts)", label="tree", style="bold green")
    say(f"{fastest:.0f} tokens/s, {found.speedup:.2f}x vanilla", label="speed", style="bold")
    say(str(choice_path(found.key)), label="kept", style="bold")


def _tell(choices: list[Any], batches: list[int]) -> None:
    """Print what was chosen per batch, and where it is kept."""
    from lantern_accel.generation.auto import describe_auto
    from lantern_accel.strategy.choices import choices_dir

    for size, choice in zip(batches, choices, strict=True):
        speed = f"{describe_auto(choice.strategy)}; measured {choice.speedup:.2f}x plain decoding"
        say(speed, label=f"batch {size}", style="bold green")
    say(str(choices_dir()), label="kept in", style="bold")


def _tell_windows(choices: list[Any], batches: list[int]) -> None:
    """Print the window that was kept per batch, and where it is kept."""
    from lantern_accel.strategy.choices import choices_dir
    from lantern_accel.tuning.windows import words

    for size, choice in zip(batches, choices, strict=True):
        window = words(choice.strategy.tree)
        speed = f"{window}; measured {choice.speedup:.2f}x plain decoding"
        say(speed, label=f"batch {size}", style="bold green")
    say(str(choices_dir()), label="kept in", style="bold")
