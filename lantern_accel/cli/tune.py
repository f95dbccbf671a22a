"""``lantern-accel tune``: the fastest static tree for this device and model."""

from __future__ import annotations

from pathlib import Path

import typer

from lantern_accel import bounds
from lantern_accel.cli.console import say
from lantern_accel.cli.options import OPTION, finite, read_options


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("tune")(tune)


def tune(
    device: str = typer.Option("auto"),
    model: str = typer.Option("lantern-emoji"),
    strategy: str = typer.Option("lantern++", help="eagle or lantern++ (they have static trees)."),
    temperature: float = typer.Option(1.0, min=0, max=bounds.MOST_TEMPERATURE, callback=finite),
    dtype: str = typer.Option("auto"),
    threads: int = typer.Option(None, min=1, max=bounds.MOST_THREADS),
    option: list[str] = OPTION,
    repeats: int = typer.Option(5, min=1, max=bounds.MOST_SAMPLES, help="Decodings per finalist."),
    output: Path = typer.Option(None, "--output", "-o", help="Also write the evidence here."),
) -> None:
    """Measure acceptance and step costs here, and keep the best tree; generate then uses it."""
    import lantern_accel
    from lantern_accel.errors import StrategyError
    from lantern_accel.files import write_json
    from lantern_accel.strategy.values import StaticTree

    options = read_options(option, threads)
    with lantern_accel.load(model, device=device, dtype=dtype, options=options) as pipeline:
        from lantern_accel.measure.tune import tune as find  # torch, which the device precedes
        from lantern_accel.strategy.store import tuned_path

        chosen = pipeline.strategy(strategy)
        if not isinstance(chosen.tree, StaticTree):
            raise StrategyError(f"{strategy} has no static tree to tune; choose eagle or lantern++")
        found = find(
            pipeline,
            chosen,
            temperature=temperature,
            repeats=repeats,
            say=lambda text: say(text, to_stderr=True, style="dim"),
        )
    if output is not None:
        write_json(output, found.model_dump(mode="json"))
    for level, row in enumerate(found.rates):
        say(
            " ".join(f"{rate:.2f}" for rate in row), label=f"accepted at depth {level + 1}, by rank"
        )
    words = ",".join("".join(map(str, path)) for path in found.tree.paths)
    ratio = found.tokens_per_second / found.vanilla_tokens_per_second
    say(f"{words} ({len(found.tree.paths)} drafts)", label="tree", style="bold green")
    say(
        f"{found.tokens_per_second:.0f} tokens/s, {ratio:.2f}x vanilla", label="speed", style="bold"
    )
    say(str(tuned_path(found.key)), label="kept", style="bold")
