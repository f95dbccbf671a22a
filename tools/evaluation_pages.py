"""Write the tables of the evaluation's pages: ``python tools/evaluation_pages.py EVAL.json``.

Text between ``<!-- NAME -->`` and ``<!-- /NAME -->`` in docs/evaluation.md and the model card is
replaced; what the rule for defaults picks is printed, and compared with the model's own defaults.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from lantern_accel.evaluation.parts import chosen
from lantern_accel.evaluation.schema import Evaluation, FrontierPoint
from lantern_accel.models.bundle import bundled_models, read_manifest
from lantern_accel.quality.interval import Interval
from lantern_accel.strategy.rules import OPTION_NAMES, AcceptanceRule
from lantern_accel.strategy.values import Strategy

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    ROOT / "docs/evaluation.md",
    ROOT / "docs/notes.md",
    ROOT / "lantern_accel/assets/lantern-emoji/README.md",
)


def shown(figure: Interval | None, digits: int) -> str:
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
        tokens, moved = shown(p.step_compression, 2), shown(p.total_variation, 4)
        yield f"| {setting(p)} | {tokens} | {moved if p.strategy.acceptance.relaxed else '0'} |"


def named(strategy: Strategy) -> str:
    """Return a strategy's name, and its rule's settings where it is relaxed."""
    rule = strategy.acceptance
    return f"{strategy.name}, {rule_words(rule)}" if rule.relaxed else strategy.name


def rule_words(rule: AcceptanceRule) -> str:
    """Return a relaxed rule's settings in words."""
    values = {OPTION_NAMES.get(k, k): v for k, v in rule.model_dump().items() if k != "kind"}
    return ", ".join(f"{name} = {value:g}" for name, value in values.items())


def distances(report: Evaluation) -> Iterator[str]:
    """Yield the table of distances to exact decoding."""
    yield "| strategy | KID x 1000 to exact decoding | p | found in 4 of 5 cases | equal tokens, greedy |"
    yield "|---|---|---|---|---|"
    for i, row in enumerate(report.distances or []):
        name = "vanilla, another seed" if i == 0 else named(row.strategy)
        p = "" if row.p_value is None else f"{row.p_value:.2g}"
        least = "" if row.detectable is None else f"{row.detectable:.1f}"
        equal = "" if i == 0 else shown(row.greedy_same_tokens, 2)
        yield f"| {name} | {shown(row.kid, 1)} | {p} | {least} | {equal} |"


def rule(report: Evaluation) -> Iterator[str]:
    """Yield what the rule for defaults picks, and what the model's defaults are."""
    defaults = read_manifest(bundled_models()[report.model]).defaults
    for name, own in (("lantern", defaults.lantern), ("lantern++", defaults.lantern_pp)):
        picked = chosen(report.frontier or [], name)
        same = (
            "its default settings"
            if picked.strategy.acceptance == own
            else f"where its default settings are {rule_words(own)}"
        )
        yield f"- `{name}`: {setting(picked).removeprefix(name + ', ')}, {same}."


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
    print(texts.get("rule", "the frontier was not measured"))


if __name__ == "__main__":
    main()
