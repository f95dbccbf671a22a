"""Writes the report of ``tools/on_device.py``: every stage's result, and what is asked of a card."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from lantern_accel.files import persistent_dir
from lantern_accel.records import markdown_table

#: The share of its floor that a plain step is asked to reach, by size: of most cards, and of those whose
#: memory is so fast that launches count for more. Targets from estimates; no card has been measured.
OF_FLOOR = {"llamagen-xl-384": (0.70, 0.45), "llamagen-3b-384": (0.75, 0.60)}
FAST = ("H100", "H200")
#: Kernels of a step that are shown.
SHOWN = 20
#: How much further apart than their floors two steps may be.
ROOM = 1.1
#: What is asked of a card at batch 1: size, step, figure, bound, and whether it is a least one.
TARGETS = (
    *((size, "vanilla", "of_floor", share, True) for size, (share, _) in OF_FLOOR.items()),
    ("llamagen-3b-384", "verify 60", "over_plain", 1.2, False),
    ("llamagen-xl-384", "lantern++", "over_plain", 1.35, False),
    ("llamagen-3b-384", "lantern++", "over_plain", 1.15, False),
)


def facts_text(found: dict[str, Any]) -> str:
    """Show what a device says about itself."""
    lines = [
        f"- {name}: {'; '.join(value) if isinstance(value, list) else value}"
        for name, value in found.items()
        if value not in (None, [])
    ]
    return "\n".join(lines)


def conform_text(found: dict[str, Any]) -> str:
    """Show the counts of checks, and those that did not pass."""
    outcomes = found["outcomes"]
    states = [one["state"] for one in outcomes]
    head = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    if left := found.get("not_run"):
        head += f"; not run yet: {', '.join(left)}"
    lines = [f"- {o['name']}: {o['detail']}" for o in outcomes if o["state"] != "passed"]
    return "\n".join([head or "none", "", *lines])


def generate_text(found: dict[str, Any]) -> str:
    """Show what the first pictures took."""
    return (
        f"`pictures.png` shows a heart and a dog's face; {found['tokens']} tokens in {found['steps']} "
        f"steps, {found['step_compression']:.2f} tokens per step, {found['dtype']}"
    )


def bench_text(found: dict[str, Any]) -> str:
    """Show the benchmark as its table."""
    from lantern_accel_profiles.measure.record import Run
    from lantern_accel_profiles.report.table import table

    return table(Run.model_validate(found))


def tune_text(found: dict[str, Any]) -> str:
    """Show what was chosen for each batch."""
    from lantern_accel.generation.decision import describe_auto
    from lantern_accel.strategy.choices import Choice

    lines = []
    for one in found["choices"]:
        choice = Choice.model_validate(one)
        speed = "" if choice.speedup is None else f"; measured {choice.speedup:.2f}x plain decoding"
        batch = int(str(choice.key.get("batch", 1)))
        lines.append(f"- batch {batch}: {describe_auto(choice.strategy, batch)}{speed}")
    return "\n".join(lines)


def profile_text(found: dict[str, Any]) -> str:
    """Say where the profile is."""
    return "in `profile.json`, for `lantern-accel compare`"


def stepcost_text(found: dict[str, Any]) -> str:
    """Show step costs as their table."""
    from lantern_accel_profiles.measure.record import Run
    from lantern_accel_profiles.report.table import step_table

    return step_table(Run.model_validate(found))


def kernels_text(found: dict[str, Any]) -> str:
    """Show the kernels of captured steps by name, the longest first."""
    lines = []
    for step in found["steps"]:
        rows = step["kernels"]
        launches, busy = (sum(row[key] for row in rows) for key in ("launches", "us"))
        lines += [
            f"{step['step']}: {1e3 * step['ms']:.0f} us a step, {launches:.0f} launches that take "
            f"{busy:.0f} us of the {step['watched']}",
            "",
        ]
        shown = ((r["name"][:80], f"{r['us']:.1f}", f"{r['launches']:.1f}") for r in rows[:SHOWN])
        lines += [*markdown_table(["kernel", "us", "launches"], shown), ""]
    return "\n".join(lines).strip()


def race_text(found: dict[str, Any]) -> str:
    """Show a race as its table, with its checks."""
    from tools.racing import Race

    report = Race.model_validate(found)
    return f"{report.table()}\n\n{report.checks or ''}".strip()


def targets(folder: Path) -> list[dict[str, Any]]:
    """Compare the best options' step costs at batch 1 with what is asked; None: not measured.

    Of all sets of options the one with the best figure is judged. A step that is bound by products
    cannot be as cheap as one that is bound by memory: where the floors themselves lie further apart than
    what is asked, the ratio of the floors is asked, and ``ROOM`` on it.
    """
    found = []
    for size, step, figure, bound, least in TARGETS:
        best: tuple[float, float, str] | None = None
        for path in sorted(folder.glob(f"stepcost-{size}*.json")):
            options = path.stem.removeprefix(f"stepcost-{size}").strip("-") or "default"
            for value, asked in _figures(path, size, step, figure, bound):
                better = best is None or (value > best[0] if least else value < best[0])
                best = (value, asked, options) if better else best
        judged: tuple[float | None, float, str | None] = best or (None, bound, None)
        reached, asked, chosen = judged
        met = None if reached is None else reached >= asked if least else reached <= asked
        found.append(
            {
                "size": size,
                "step": step,
                "figure": figure,
                "asked": asked,
                "found": reached,
                "options": chosen,
                "met": met,
            }
        )
    return found


def _figures(
    path: Path, size: str, step: str, figure: str, bound: float
) -> list[tuple[float, float]]:
    """Return a figure of a measurement and what is asked of it; [] where it was not measured."""
    device, here = _read_steps(path)
    if step not in here:
        return []
    asked = bound
    if figure == "of_floor" and any(name in device for name in FAST):
        asked = OF_FLOOR[size][1]
    if figure == "over_plain" and "vanilla" in here:
        floors = here[step]["floor_ms"], here["vanilla"]["floor_ms"]
        if None not in floors:
            asked = max(bound, ROOM * floors[0] / floors[1])
    return [(here[step][figure], asked)]


def _read_steps(path: Path) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return a measurement's device and its steps at batch 1 by name; without steps if it has none."""
    from lantern_accel_profiles.measure.record import Run
    from lantern_accel_profiles.report.table import step_rows

    try:
        run = Run.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the stage's own part of the report says that it cannot be shown
        return "", {}
    rows = {row["step"]: row for row in step_rows(run) if row["batch"] == 1}
    return run.environment.device.name, rows


def target_lines(folder: Path) -> list[str]:
    """Return the table of what is asked and what was found; [] where nothing was measured."""
    rows = targets(folder)
    if all(row["found"] is None for row in rows):
        return []
    cells = []
    for row in rows:
        verdict = {None: "not measured", True: "met", False: "missed"}[row["met"]]
        value = "" if row["found"] is None else f"{row['found']:.2f}, "
        by = "" if row["options"] is None else f" ({row['options']})"
        figure, asked = row["figure"].replace("_", " "), f"{row['asked']:.3g}"
        cells.append([row["size"], row["step"], figure, asked, f"{value}{verdict}{by}"])
    title = ["", "## What is asked of a card at batch 1", "", "Targets, from estimates.", ""]
    return title + markdown_table(["size", "step", "figure", "asked", "found"], cells)


def stored_kernels() -> dict[str, Any]:
    """Return what a backend keeps of its kernels' checks and times in the cache folder, by file."""
    folder = persistent_dir("kernels")
    found = {}
    for path in sorted(folder.glob("*.json")) if folder is not None else ():
        with contextlib.suppress(OSError, ValueError):
            found[path.name] = json.loads(path.read_text(encoding="utf-8"))
    return found


def stored_kernel_lines(kept: dict[str, Any]) -> list[str]:
    """Return what is kept of kernels, as lines; [] where nothing is."""
    blocks = (
        ["", f"`{name}`", "", "```", json.dumps(one, indent=1), "```"] for name, one in kept.items()
    )
    return ["", "## Kept of kernels", *(line for block in blocks for line in block)] if kept else []


def weight_lines(folder: Path) -> list[str]:
    """Return a table of what weights in fewer bits take, over the same step with all of them; [] without.

    With all bits products of more than 64 rows are torch's own, on the matrix that codes stand for.
    """
    rows = []
    for path in sorted(folder.glob("weights-*.json")):
        size, _, weights = path.stem.removeprefix("weights-").rpartition("-")
        _, whole = _read_steps(folder / f"stepcost-{size}.json")
        for step, row in _read_steps(path)[1].items():
            if step in whole:
                all_bits, ms = whole[step]["ms"], row["ms"]
                cells = [f"{all_bits:.3g}", f"{ms:.3g}", f"{ms / all_bits:.2f}"]
                rows.append([size, weights, step, *cells])
    if not rows:
        return []
    head = ["size", "weights", "step", "ms with all bits", "ms", "of them"]
    return ["", "## Quantized weights at batch 1", "", *markdown_table(head, rows)]
