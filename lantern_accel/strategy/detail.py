"""Says a strategy in a few words."""

from __future__ import annotations

from lantern_accel.strategy.values import Strategy


def detail_of(strategy: Strategy) -> str:
    """Say source of drafts and acceptance rule in a few words."""
    drafts, rule = strategy.drafts, strategy.acceptance
    nodes, deep = drafts.size
    words = [
        f"{drafts.kind}, {nodes - 1} drafts, {deep} deep" if nodes > 1 else "one token per step"
    ]
    words += [f"in {bits}"] if (bits := getattr(drafts, "weights", "")) else []
    fields = rule.model_dump(exclude={"kind"}) if rule.relaxed else {}
    symbols = {"delta": "δ", "lam": "λ"}
    words += [
        f"{symbols.get(name, name)} {value:g}" if isinstance(value, float | int) else str(value)
        for name, value in fields.items()
    ]
    if strategy.tv_budget is not None:
        words.append(f"TV {strategy.tv_budget:g} at most")
    if fields and strategy.residual != "aggregate":
        words.append(f"{strategy.residual} residual")
    return ", ".join(words)
