"""Write tables and pictures of the evaluation's pages: ``python tools/evaluation_pages.py EVAL.json``.

Text between ``<!-- NAME -->`` and ``<!-- /NAME -->`` in docs/evaluation.md, dev/measurements.md and the
model card is replaced; what the rule for defaults picks is printed, and compared with the model's own
defaults.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lantern_accel.models.bundle import bundled_models, read_manifest
from lantern_accel.strategy.rules import OPTION_NAMES, AcceptanceRule, Lantern, LanternPP
from lantern_accel.strategy.values import Strategy
from lantern_accel_profiles.evaluation.parts import default_point
from lantern_accel_profiles.evaluation.schema import Evaluation, FrontierPoint
from lantern_accel_profiles.plot_style import BAR, RULE, colour_of, panels, plot_style, save
from lantern_accel_profiles.quality.interval import Interval

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    ROOT / "docs/evaluation.md",
    ROOT / "dev/measurements.md",
    ROOT / "lantern_accel/assets/lantern-emoji/README.md",
)


def text_of(figure: Interval | None, digits: int) -> str:
    """Return a figure with its interval."""
    if figure is None:
        return "not measured"
    return f"{figure.value:.{digits}f} ({figure.low:.{digits}f} to {figure.high:.{digits}f})"


def setting(point: FrontierPoint) -> str:
    """Return what a point is, in words."""
    rule = point.strategy.acceptance
    words = [point.strategy.name]
    if rule.relaxed:
        words.append(f"k = {rule.k}")
        if point.strategy.tv_budget is not None:
            words.append(f"budget {point.strategy.tv_budget:g}")
        elif rule.kind == "lantern":
            words.append(f"delta = {rule.runtime_values()[0]:g}")
        else:
            words.append(f"lambda = {rule.runtime_values()[0]:g}")
    return ", ".join(words)


def frontier(report: Evaluation) -> Iterator[str]:
    """Yield the table of every point."""
    yield "| setting | tokens per step | TV per token |"
    yield "|---|---|---|"
    for p in report.frontier or []:
        tokens, moved = text_of(p.step_compression, 2), text_of(p.total_variation_per_token, 4)
        yield f"| {setting(p)} | {tokens} | {moved if p.strategy.acceptance.relaxed else '0'} |"


def name_strategy(strategy: Strategy) -> str:
    """Return a strategy's name, and its rule's settings where it is relaxed."""
    rule = strategy.acceptance
    return f"{strategy.name}, {rule_words(rule)}" if rule.relaxed else strategy.name


def rule_words(rule: AcceptanceRule) -> str:
    """Return a relaxed rule's settings in words."""
    values = {OPTION_NAMES.get(k, k): v for k, v in rule.model_dump().items() if k != "kind"}
    return ", ".join(f"{name} = {value:g}" for name, value in values.items())


def distances(report: Evaluation) -> Iterator[str]:
    """Yield the table of distances to exact decoding."""
    power = "smallest KID detectable with 80 % power"
    yield f"| strategy | KID x 1000 to exact decoding | p | {power} | equal tokens, greedy |"
    yield "|---|---|---|---|---|"
    for i, row in enumerate(report.distances or []):
        name = "vanilla, another seed" if i == 0 else name_strategy(row.strategy)
        p = "" if row.p_value is None else f"{row.p_value:.2g}"
        least = "" if row.detectable is None else f"{row.detectable:.1f}"
        equal = "" if i == 0 else text_of(row.greedy_same_tokens, 2)
        yield f"| {name} | {text_of(row.kid, 1)} | {p} | {least} | {equal} |"


def rule(report: Evaluation) -> Iterator[str]:
    """Yield what the rule for defaults picks, and what the model's defaults are."""
    defaults = read_manifest(bundled_models()[report.model]).defaults
    for name, own in (("lantern", defaults.lantern), ("lantern++", defaults.lantern_pp)):
        picked = default_point(report.frontier or [], name)
        same = (
            "its default settings"
            if picked.strategy.acceptance == own
            else f"where its default settings are {rule_words(own)}"
        )
        yield f"- `{name}`: {setting(picked).removeprefix(name + ', ')}, {same}."


LINES = (("-", "o"), ("--", "s"), (":", "^"))


def _bars(axis: Any, names: Sequence[str], values: Sequence[float], title: str) -> None:
    axis.barh(range(len(names)), values, color=BAR)
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.invert_yaxis()
    axis.set_title(title)
    for i, value in enumerate(values):
        axis.text(value, i, f" {value:.3g}", va="center", fontsize=7)
    axis.margins(x=0.18)


def _intervals(axis: Any, names: Sequence[str], found: Sequence[Interval], title: str) -> None:
    axis.axvline(0, color=RULE, linewidth=1)
    for i, one in enumerate(found):
        axis.plot((one.low, one.high), (i, i), color=BAR)
        axis.plot(one.value, i, "o", color=BAR)
        axis.text(one.high, i, f"  {one.value:.3g}", va="center", fontsize=7)
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.invert_yaxis()
    axis.set_title(title)
    axis.margins(x=0.12, y=0.12)


def draw_ambiguity(report: Evaluation) -> Any:
    """Top-1, top-10 mass and entropy: images with and without guidance."""
    assert report.ambiguity
    rows = report.ambiguity
    names = [f"{row.of}, CFG {row.cfg:g}" for row in rows]
    figure, axes = panels(3)
    _bars(axes[0], names, [row.top1_mean for row in rows], "likeliest token, mean probability")
    _bars(axes[1], names, [row.top10_mass for row in rows], "mass of the ten likeliest")
    _bars(axes[2], names, [row.entropy for row in rows], "entropy (nats)")
    for axis in axes[1:]:
        axis.set_yticklabels([])
    return figure


def draw_interchange(report: Evaluation) -> Any:
    """Damage when every code is replaced."""
    assert report.interchange
    rows = report.interchange[1:]
    names = [row.replaced_by for row in rows]
    measured = all(row.feature_distance is not None for row in rows)
    figure, axes = panels(2 if measured else 1)
    _bars(axes[0], names, [row.psnr for row in rows], "PSNR to the undamaged picture (dB)")
    if measured:
        values = [row.feature_distance or 0.0 for row in rows]
        _bars(axes[1], names, values, "feature distance to it")
        axes[1].set_yticklabels([])
    return figure


def draw_frontier(report: Evaluation) -> Any:
    """Accepted length against the total variation that it costs."""
    assert report.frontier
    figure, (axis,) = panels(1, width=6.0, height=4.2)
    series: dict[str, list[tuple[float, float, str]]] = {}
    for point in report.frontier:
        rule, text = point.strategy.acceptance, ""
        name = point.strategy.name
        if isinstance(rule, Lantern):
            name, text = f"lantern, k = {rule.k}", f"{rule.delta:g}"
        elif isinstance(rule, LanternPP):
            name, text = f"lantern++, k = {rule.k}", f"{rule.lam:g}"
        if point.strategy.tv_budget is not None:
            name = f"{point.strategy.name}, k = {rule.k}, budget"
            text = f"{point.strategy.tv_budget:g}"
        where = (point.total_variation_per_token.value, point.step_compression.value, text)
        series.setdefault(name, []).append(where)
    seen: dict[str, int] = {}
    for name, points in series.items():
        points.sort()
        # A strategy has its colour everywhere; its settings differ in lines and markers.
        own = name.partition(",")[0]
        form = seen[own] = seen.get(own, -1) + 1
        xs, ys = [p[0] for p in points], [p[1] for p in points]
        line, marker = LINES[form % len(LINES)]
        axis.plot(xs, ys, ls=line, marker=marker, label=name, color=colour_of(own))
        for x, y, text in points:
            axis.annotate(text, (x, y), fontsize=7, xytext=(3, 3), textcoords="offset points")
    axis.set_xlabel("total variation per token")
    axis.set_ylabel("tokens per target forward")
    axis.set_title("numbers: delta, lambda, or budget")
    axis.grid(True)
    axis.legend()
    return figure


def draw_distances(report: Evaluation) -> Any:
    """Distance of each strategy's pictures from exact decoding's."""
    assert report.distances
    rows = report.distances
    names = ["vanilla, another seed", *(row.strategy.name for row in rows[1:])]
    figure, axes = panels(2)
    if all(row.kid is not None for row in rows):
        found = [row.kid for row in rows if row.kid is not None]
        _intervals(axes[0], names, found, "KID x 1000, with its 95 % interval")
    else:
        axes[0].set_axis_off()
    same = [row.greedy_same_tokens.value if row.greedy_same_tokens else 0.0 for row in rows[1:]]
    _bars(axes[1], names[1:], same, "greedy: share of equal tokens")
    return figure


def draw(report: Evaluation, folder: Path) -> None:
    """Write a picture of each part that was measured."""
    for make in (draw_ambiguity, draw_interchange, draw_frontier, draw_distances):
        name = make.__name__.removeprefix("draw_")
        if getattr(report, name):
            with plot_style():
                save(make(report), folder / f"{name}.png")


def main() -> None:
    """Rewrite the marked tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figures", type=Path)
    report = Evaluation.model_validate_json(parser.parse_args().figures.read_text(encoding="utf-8"))
    made = {
        "frontier": frontier(report) if report.frontier else None,
        "rule": rule(report) if report.frontier else None,
        "distances": distances(report) if report.distances else None,
    }
    texts = {name: "\n".join(lines) for name, lines in made.items() if lines is not None}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for name, table in texts.items():
            found = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
            text = found.sub(lambda m, t=table: f"{m[1]}{t}\n{m[2]}", text)  # type: ignore[misc]
        page.write_text(text, encoding="utf-8")
    draw(report, ROOT / "docs/evaluation")
    print(texts.get("rule", "the frontier was not measured"))


if __name__ == "__main__":
    main()
