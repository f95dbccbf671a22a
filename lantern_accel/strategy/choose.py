"""From what a user writes to a strategy: a name or a value, with changes, over a model's defaults."""

from __future__ import annotations

from typing import Any

from lantern_accel.errors import StrategyError, shown
from lantern_accel.strategy.values import (
    AcceptanceRule,
    NoTree,
    Strategy,
    named_strategy,
    parse_rule,
)

#: What :func:`choose_strategy` takes beside a name.
CHANGES = (
    "tree",
    "window",
    "accept",
    "k",
    "delta",
    "lam",
    "residual",
    "neighbour_space",
    "tv_budget",
)


def choose_strategy(defaults: Any, strategy: str | Strategy, **changes: Any) -> Strategy:
    """Return a strategy by name over a model's ``defaults``, or a given one, with changes.

    ``changes``: those of :data:`CHANGES`; a tree and ``accept`` may be text; None leaves what is there.
    Raises :class:`StrategyError` for a name or value that cannot be, and for a change that the name
    does not allow.
    """
    if isinstance(changes.get("tree"), str):
        from lantern_accel.decoding.trees import parse_tree

        changes["tree"] = parse_tree(changes["tree"])
    accept = changes.pop("accept", None)
    if isinstance(accept, str):
        accept = parse_rule(accept)
    elif accept is not None and not isinstance(accept, AcceptanceRule):
        raise StrategyError(
            f"{shown(accept)} is no acceptance rule; write one, such as lantern++:k=10,lambda=2"
        )
    if isinstance(strategy, Strategy):
        chosen = strategy
    else:
        chosen = named_strategy(
            strategy,
            static=defaults.static_tree,
            dynamic=defaults.dynamic_tree,
            lantern=defaults.lantern,
            lantern_pp=defaults.lantern_pp,
        )
        _check_tree(chosen, changes.get("tree"))
    if accept is not None:
        name = chosen.name
        if not isinstance(strategy, Strategy) and accept.kind != chosen.acceptance.kind:
            name = f"{name} with {accept.kind}"
        chosen = chosen.override(acceptance=accept, name=name)
    return chosen.override(**changes)


def _check_tree(named: Strategy, tree: Any) -> None:
    """Refuse a tree under a name that says there is none, and none under one that drafts."""
    if tree is None or isinstance(tree, NoTree) == isinstance(named.tree, NoTree):
        return
    if isinstance(named.tree, NoTree):
        raise StrategyError(
            f"the strategy {named.name!r} drafts nothing, so it has no tree; use the strategy "
            "'eagle' (exact) or 'lantern++' (relaxed) with this tree"
        )
    raise StrategyError(
        f"the strategy {named.name!r} drafts over a tree, and the tree 'none' drafts nothing; use "
        "the strategy 'vanilla'"
    )
