"""``lantern-accel tune``: finds the fastest settings of a device, and stores them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from lantern_accel import bounds
from lantern_accel.cli.console import note, say
from lantern_accel.cli.options import Loading, strategy_words, with_options
from lantern_accel.files import check_target, write_json
from lantern_accel.strategy.values import AUTO
from lantern_accel_profiles.commands.tables import whole_numbers

if TYPE_CHECKING:
    from lantern_accel.strategy.choices import Choice


@with_options
def tune(
    load: Loading,
    strategy: str = typer.Option(
        "auto", help="auto (windows, trees and plain decoding), eagle or lantern++ (the tree)."
    ),
    batch: list[str] = typer.Option(
        ["1,2,4,8,16,32"], "--batch", "-b", help="Batch sizes to tune, such as 1,4."
    ),
    temperature: float = typer.Option(1.0, min=0, max=bounds.MOST_TEMPERATURE, help="0: greedy."),
    relaxed: bool = typer.Option(False, "--relaxed", help="Tune for `generate --relaxed`."),
    tv_budget: float = typer.Option(
        None, help="Tune for `generate --strategy auto:tv_budget=` this value."
    ),
    max_seconds: float = typer.Option(
        None,
        "--max-seconds",
        min=1,
        max=bounds.MOST_SECONDS,
        help="Time limit of tuning auto in seconds.",
    ),
    repeats: int = typer.Option(
        3, min=1, max=bounds.MOST_SAMPLES, help="Timed generations per remaining candidate."
    ),
    output: Path = typer.Option(None, "--output", "-o", help="JSON file of the measurements."),
) -> None:
    """Measure acceptance rates and step times, and store the fastest settings for `generate`.

    If it is interrupted, run the same command again to go on.
    """
    if output is not None:
        check_target(output)
    sizes = whole_numbers("--batch", batch, 1, bounds.MOST_BATCH)
    strategy_words([strategy])
    with load.open() as pipeline:
        # torch, which the device precedes
        from lantern_accel.generation.decision import describe_auto
        from lantern_accel.strategy.choices import choices_dir
        from lantern_accel_profiles.tuning.auto import AutoTuner
        from lantern_accel_profiles.tuning.trees import TreeTuner

        auto = strategy == AUTO
        more, budget = (relaxed or None, tv_budget) if auto else (None, None)
        asked = pipeline.strategy(strategy, relaxed=more, tv_budget=budget)
        tree = asked.name != AUTO
        tuner: type[AutoTuner | TreeTuner] = TreeTuner if tree else AutoTuner
        search = tuner(pipeline, asked, temperature=temperature, budget=max_seconds, say=note)
        choices = search.run([1] if tree else sizes, repeats)
        if output is not None:
            write_json(output, search.dump(choices))
    if tree:
        return _print_tree(choices[0])
    for size, choice in zip(sizes, choices, strict=True):
        speed = f"{describe_auto(choice.strategy)}; measured {choice.speedup:.2f}x plain decoding"
        say(speed, label=f"batch {size}", style="bold green")
    say(str(choices_dir()), label="stored in", style="bold")


def _print_tree(found: Choice) -> None:
    """Print the chosen tree, its acceptance rates, and where it is stored."""
    from lantern_accel.strategy.choices import choice_path

    for level, row in enumerate(found.evidence["rates"]):
        say(
            " ".join(f"{rate:.2f}" for rate in row), label=f"accepted at depth {level + 1}, by rank"
        )
    paths = found.strategy.drafts.shape or ()
    words = ",".join("".join(map(str, path)) for path in paths)
    fastest = max(one.tokens_per_second for one in found.measured[1:])
    say(f"{words} ({len(paths)} drafts)", label="tree", style="bold green")
    say(f"{fastest:.0f} tokens/s, {found.speedup:.2f}x vanilla", label="speed", style="bold")
    say(str(choice_path(found.key)), label="stored", style="bold")
