"""A run as a table in the terminal, and as plain records: what ``bench`` and ``stepcost`` print."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

from lantern_accel.records import markdown_table
from lantern_accel.strategy.lengths import compare_with_exact
from lantern_accel_profiles.measure.record import Cell, Run, is_measured
from lantern_accel_profiles.measure.work import floor_of
from lantern_accel_profiles.quality import interval as intervals
from lantern_accel_profiles.quality.interval import Interval, relative_spread
from lantern_accel_profiles.report.rows import base_of, seconds_of, twin_of, why_unjudged
from lantern_accel_profiles.report.writing import verdict_words

HEAD = "| strategy | batch | tokens/s | s/image | speed-up | verdict | tok/step | TV/token |"
#: Verdicts in a word or two; the reason of any other one stands below the table.
SHORT = {"faster": "faster", "slower": "slower", "same": "same", "ambiguous": "not shown"}


def plain_rows(run: Run) -> list[dict[str, Any]]:
    """Return one plain record per measured cell, as the table prints it; None: not known.

    Speeds are of decoding, text and pixels left out; seconds per image are of whole requests.
    Unlike in a report a relaxed speed-up is shown with its TV per token alone.
    """
    return [_plain_row(run, cell) for cell in run.cells if cell.samples]


def _plain_row(run: Run, cell: Cell) -> dict[str, object]:
    over: Interval | None = None
    verdict: str | None = None
    if (base := base_of(run, cell)) is not None:
        over = intervals.speed_ratio(cell.rates, base.rates)
        verdict = intervals.verdict(over, unsettled=why_unjudged(cell, base))
    twin = twin_of(run, cell) if cell.relaxed else None
    tokens = sum(s.tokens for s in cell.samples)
    moved = sum(s.total_variation_per_token * s.tokens for s in cell.samples)
    return {
        "strategy": cell.strategy.name,
        "batch": cell.batch,
        "temperature": cell.temperature,
        "tokens_per_second": cell.tokens_per_second,
        "spread": relative_spread(cell.rates),
        "seconds_per_image": statistics.median(seconds_of(cell)[0]),
        "speedup": over and over.value,
        "speedup_interval": [over.low, over.high] if over is not None and over.n > 1 else None,
        "verdict": verdict,
        "step_compression": cell.step_compression,
        "exact_step_compression": twin and twin.step_compression,
        "total_variation_per_token": moved / tokens,
        "samples": len(cell.samples),
        "phase_ms": {} if isinstance(cell.step_ms, str) else cell.step_ms,
    }


def table(run: Run) -> str:
    """Return the run as a Markdown table of at most 100 columns; :func:`plain_rows` has every figure."""
    lines = [HEAD, "|---" * (HEAD.count("|") - 1) + "|"]
    doubts, rows = list[str](), plain_rows(run)
    several = len({row["temperature"] for row in rows}) > 1
    for row in rows:
        at = f" T={row['temperature']:g}" if several else ""
        speedup = "" if row["speedup"] is None else f"{row['speedup']:.2f}x"
        word = "baseline"
        if row["strategy"] != "vanilla":
            if row["speedup_interval"]:
                speedup += " ({:.2f}-{:.2f})".format(*row["speedup_interval"])
            word = SHORT.get(row["verdict"], "no verdict")
            if word == "no verdict" and row["verdict"] is not None:
                doubts.append(verdict_words(row["verdict"]))
        lines.append(
            f"| {row['strategy']}{at} | {row['batch']} "
            f"| {row['tokens_per_second']:.0f} | {row['seconds_per_image']:.3g} | {speedup} | {word} "
            f"| {row['step_compression']:.2f} | {row['total_variation_per_token']:.3f} |"
        )
        if (exact := row["exact_step_compression"]) is not None:
            bound = compare_with_exact(exact, row["total_variation_per_token"])
            doubts.append(f"{row['strategy']}{at}: {bound}")
    for reason in dict.fromkeys(doubts):
        lines += ["", reason]
    return "\n".join(lines)


# --- cells of steps -------------------------------------------------------------------------------

#: Columns of the table of steps: the field of a row, and how it is written.
STEP_COLUMNS = {
    "step": ("step", ""), "batch": ("batch", ""), "nodes": ("nodes", ""), "rows": ("rows", ""),
    "ms": ("ms", ".3f"), "±": ("spread", ".0%"), "plain ms": ("plain_ms", ".3f"),
    "over plain": ("over_plain", ".2f"), "floor ms": ("floor_ms", ".3f"),
    "of the floor": ("of_floor", ".0%"), "operators": ("operators", ""),
}  # fmt: skip


def step_rows(run: Run) -> list[dict[str, Any]]:
    """Return one plain record per cell of steps, as the table prints it; None: not known.

    ``plain_ms`` is of plain decoding's step, or pass, timed in turns with this one.
    """
    rows: list[dict[str, object]] = []
    for cell in run.steps:
        if not cell.ms or isinstance(run.ceilings, str):
            continue
        ms, plain = statistics.median(cell.ms), statistics.median(cell.vanilla_ms)
        floor = floor_of(cell.floor_flops, cell.floor_bytes, run.ceilings, run.settings.dtype)
        row = {"step": cell.label, "batch": cell.batch, "nodes": cell.nodes, "rows": cell.rows}
        row |= {"ms": ms, "spread": relative_spread(cell.ms)}
        row |= {"plain_ms": plain, "over_plain": ms / plain}
        row["floor_ms"] = 1e3 * floor if is_measured(floor) else None
        row["of_floor"] = 1e3 * floor / ms if is_measured(floor) else None
        rows.append(row | {"operators": cell.operators, "phase_ms": cell.phase_ms})
    return rows


def _project(run: Run) -> list[str]:
    """Say how long plain decoding of an image would take, from its steps at the start and the end."""
    known: dict[int, dict[float, float]] = {}
    for cell in run.steps:
        if cell.kind == "vanilla" and cell.ms:
            known.setdefault(cell.batch, {})[cell.at] = statistics.median(cell.ms)
    lines, tokens = [], run.settings.tokens
    for batch, ms in known.items():
        if 0.0 in ms and 1.0 in ms:  # a step's time is linear between the places
            mean = sum((b - a) * (ms[a] + ms[b]) / 2 for a, b in itertools.pairwise(sorted(ms)))
            lines.append(
                f"\nprojected, not measured: {tokens} plain steps of batch {batch} take "
                f"{tokens * mean / 1e3:.3g} s"
            )
    return lines


def step_table(run: Run) -> str:
    """Return the ceilings and the cells of steps as Markdown, and the time of an image by its steps."""
    lines = []
    if not isinstance(run.ceilings, str):
        c, dtype = run.ceilings, run.settings.dtype
        figures = (
            ("copy", c.copy_bytes_per_s, 1e9, "GB/s"),
            ("read", c.read_bytes_per_s, 1e9, "GB/s"),
            ("matmuls", c.matmul_flops[dtype], 1e12, f"TFLOP/s in {dtype}"),
        )
        parts = (
            f"{name} {value / unit:.3g} {words}" if is_measured(value) else f"{name} {value}"
            for name, value, unit, words in figures
        )
        lines.append(", ".join(parts))
    if (weights := run.settings.weights) != "full":
        lines.append(f"{weights} weights, random ones: what rounding costs is not measured")
    rows = step_rows(run)
    cells = (
        ["" if row[k] is None else format(row[k], f) for k, f in STEP_COLUMNS.values()]
        for row in rows
    )
    lines += ["", *markdown_table([*STEP_COLUMNS], cells)]
    for row in rows:
        if row["phase_ms"]:
            phases = ", ".join(f"{name} {ms:.3f}" for name, ms in row["phase_ms"].items())
            lines.append(f"\n{row['step']}, batch {row['batch']}, ms by phase: {phases}")
    lines += _project(run)
    return "\n".join(lines)
