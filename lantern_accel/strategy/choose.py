"""Makes a strategy of what a user writes: a name or a value, with changes, over a model's defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from lantern_accel.errors import StrategyError, shown
from lantern_accel.strategy.rules import AcceptanceRule, Lantern, LanternPP, parse_rule
from lantern_accel.strategy.sources import DraftSource, named_sources
from lantern_accel.strategy.values import (
    AUTO,
    DynamicTree,
    NoTree,
    StaticTree,
    Strategy,
    named_strategy,
)

Read = TypeVar("Read")
#: Changes that belong to one strategy, with those to ask for in place of auto.
ONE = {
    "tree": "'eagle' or 'lantern++'",
    "window": "'scd'",
    "accept": "'lantern++'",
    "k": "'lantern++'",
    "delta": "'lantern'",
    "lam": "'lantern++'",
    "residual": "'lantern++'",
    "neighbour_space": "'lantern++'",
}
#: What :func:`choose_strategy` takes beside a name.
CHANGES = (*ONE, "coupling", "tv_budget", "relaxed")


class Defaults(Protocol):
    """The drafts and rules of strategies by name."""

    @property
    def static_tree(self) -> StaticTree: ...
    @property
    def dynamic_tree(self) -> DynamicTree: ...
    @property
    def lantern(self) -> Lantern: ...
    @property
    def lantern_pp(self) -> LanternPP: ...


def choose_strategy(defaults: Defaults, strategy: str | Strategy, **changes: Any) -> Strategy:
    """Return a strategy by name over a model's ``defaults``, or a given one, with changes.

    ``changes``: those of :data:`CHANGES`; a tree and ``accept`` may be text; None leaves what is there.
    Raises :class:`StrategyError` for a name or value that cannot be, and for a change that the name
    does not allow.
    """
    if isinstance(changes.get("tree"), str):
        from lantern_accel.strategy.trees import parse_tree

        changes["tree"] = _read("tree", parse_tree, changes["tree"])
    own = getattr(changes.get("tree"), "kind", None)
    if strategy == AUTO and own in named_sources():  # one that is a strategy by itself
        strategy = own
    accept = changes.pop("accept", None)
    relaxed = changes.pop("relaxed", None)
    if strategy == AUTO:
        return _automatic(defaults, relaxed, {**changes, "accept": accept})
    if isinstance(accept, str):
        accept = _read("accept", parse_rule, accept)
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
    chosen = chosen.override(**changes)
    if relaxed is False and chosen.acceptance.relaxed:
        raise StrategyError(
            f"the strategy {chosen.name!r} is relaxed, and the request asks for an exact one; leave "
            "one of the two out",
            field="strategy",
        )
    return chosen


def _read(field: str, parse: Callable[[str], Read], text: str) -> Read:
    """Return what a setting's text stands for; raises StrategyError with the setting's name."""
    try:
        return parse(text)
    except StrategyError as error:
        error.field = field
        raise


def _automatic(defaults: Defaults, relaxed: bool | None, changes: dict[str, Any]) -> Strategy:
    """Return the strategy that is chosen later; raises StrategyError for what belongs to one strategy."""
    for name, ask in ONE.items():
        if changes.get(name) is not None:
            option = "lambda" if name == "lam" else name.replace("_", "-")
            raise StrategyError(
                f"the strategy 'auto' chooses its own drafts and rule and takes no {option}; name a "
                f"strategy that does, such as {ask}",
                field=name,
            )
    chosen = named_strategy(AUTO, static=defaults.static_tree, dynamic=defaults.dynamic_tree)
    coupling = changes.get("coupling")
    if coupling == "maximal":
        raise StrategyError(
            "the strategy 'auto' drafts where the seed decides every token; for the coupling 'maximal' "
            "name a strategy, such as 'sjd' or 'eagle'",
            field="coupling",
        )
    budget = changes.get("tv_budget")
    if relaxed is False and budget is not None:
        text = "an exact strategy spends no total variation; leave tv_budget out"
        raise StrategyError(text, field="tv_budget")
    if relaxed or budget is not None:
        chosen = chosen.override(acceptance=defaults.lantern_pp, tv_budget=budget)
    return chosen.override(coupling=coupling)


def _check_tree(named: Strategy, tree: DraftSource | None) -> None:
    """Refuse a tree under a name that says there is none, and none under one that drafts."""
    if tree is None or isinstance(tree, NoTree) == isinstance(named.drafts, NoTree):
        return
    if isinstance(named.drafts, NoTree):
        raise StrategyError(
            f"the strategy {named.name!r} drafts nothing, so it has no tree; use the strategy "
            "'eagle' (exact) or 'lantern++' (relaxed) with this tree"
        )
    raise StrategyError(
        f"the strategy {named.name!r} drafts over a tree, and the tree 'none' drafts nothing; use "
        "the strategy 'vanilla'"
    )
