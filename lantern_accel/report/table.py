"""A run as a table in the terminal, and as plain records: what ``bench`` prints."""

from __future__ import annotations

from typing import Any

from lantern_accel.measure.record import STEP_PHASES, Cell, Run
from lantern_accel.quality.interval import Interval, relative_spread
from lantern_accel.report.rows import against, base_of, row_of, twin_of
from lantern_accel.report.writing import verdict_words

HEAD = (
    "| strategy | batch | T | tokens/s | ± | speed-up | tokens per step | over prompts | conversion "
    "| over exact on its tree | TV per token "
    "| draft / verify / accept / commit / host, ms per eager step |"
)


def plain_rows(run: Run) -> list[dict[str, Any]]:
    """Return one plain record per measured cell, as the table prints it; None: not known.

    Unlike in a report a relaxed speed-up is shown without its price in images: its TV per token stands
    next to it.
    """
    return [_plain_row(run, cell) for cell in run.cells if cell.samples]


def _plain_row(run: Run, cell: Cell) -> dict[str, Any]:
    row = row_of(run, cell)
    over, _, _ = against(cell, base_of(run, cell))
    exact, says, _ = against(cell, twin_of(run, cell) if cell.relaxed else None)
    tokens = sum(s.tokens for s in cell.samples)
    return {
        "strategy": cell.strategy.name,
        "batch": cell.batch,
        "temperature": cell.temperature,
        "tokens_per_second": cell.tokens_per_second,
        "spread": relative_spread(cell.rates),
        "speedup": _value(over),
        "speedup_interval": _ends(over),
        "step_compression": cell.step_compression,
        "step_compression_over_prompts": [row.over_prompts.low, row.over_prompts.high],
        "conversion": over.value / cell.step_compression if isinstance(over, Interval) else None,
        "over_exact": _value(exact),
        "over_exact_interval": _ends(exact),
        "over_exact_verdict": says if isinstance(exact, Interval) else None,
        "total_variation": sum(s.total_variation * s.tokens for s in cell.samples) / tokens,
        "samples": len(cell.samples),
        "phase_ms": {} if isinstance(cell.step_ms, str) else cell.step_ms,
    }


def _value(found: Interval | str) -> float | None:
    return found.value if isinstance(found, Interval) else None


def _ends(found: Interval | str) -> list[float] | None:
    return [found.low, found.high] if isinstance(found, Interval) and found.n > 1 else None


def table(run: Run) -> str:
    """Return the run as a Markdown table; what a single sample cannot show is left empty."""
    lines = [HEAD, "|---" * (HEAD.count("|") - 1) + "|"]
    for row in plain_rows(run):
        phases = " / ".join(
            f"{row['phase_ms'].get(name, float('nan')):.1f}" for name in (*STEP_PHASES, "host")
        )
        few = row["samples"] < 2
        spread = "" if few else f"{100 * row['spread']:.0f} %"
        low, high = row["step_compression_over_prompts"]
        speedup = "" if row["speedup"] is None else f"{row['speedup']:.2f}x"
        if row["speedup_interval"] and row["strategy"] != "vanilla":
            speedup += " ({:.2f} to {:.2f})".format(*row["speedup_interval"])
        conversion = "" if row["conversion"] is None else f"{row['conversion']:.2f}"
        exact = "" if row["over_exact"] is None else f"{row['over_exact']:.2f}x"
        if row["over_exact_interval"]:
            low_, high_ = row["over_exact_interval"]
            exact += f" ({low_:.2f} to {high_:.2f}, {verdict_words(row['over_exact_verdict'])})"
        lines.append(
            f"| {row['strategy']} | {row['batch']} | {row['temperature']:g} "
            f"| {row['tokens_per_second']:.0f} | {spread} | {speedup} "
            f"| {row['step_compression']:.2f} | {'' if few else f'{low:.2f} to {high:.2f}'} "
            f"| {conversion} | {exact} | {row['total_variation']:.3f} | {phases} |"
        )
    return "\n".join(lines)
