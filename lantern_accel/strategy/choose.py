"""From what a user writes to a strategy: a name or a value, with changes, over a model's defaults."""

from __future__ import annotations

import typing
from typing import Any

from pydantic import BaseModel

from lantern_accel.errors import StrategyError, did_you_mean
from lantern_accel.strategy import values
from lantern_accel.strategy.values import NoTree, Strategy, named_strategy, validated

#: Fields that have another name where users write them.
SPELLED = {"lambda": "lam"}
#: What :func:`choose_strategy` takes beside a name.
CHANGES = ("tree", "accept", "k", "delta", "lam", "residual", "neighbour_space")


def acceptance_rules() -> dict[str, type[BaseModel]]:
    """Return the acceptance rules that :mod:`~lantern_accel.strategy.values` registers, by kind."""
    union = typing.get_args(values.Acceptance)[0]
    return {rule.model_fields["kind"].default: rule for rule in typing.get_args(union)}


def read_acceptance(text: str) -> BaseModel:
    """Read a rule from text, as ``--accept`` takes it: ``lantern++:k=10,lambda=2``, or a kind alone.

    Raises :class:`StrategyError` for a kind or a field that there is not, and for a value out of range.
    """
    kind, _, rest = text.strip().partition(":")
    rules = acceptance_rules()
    if kind not in rules:
        raise StrategyError(f"no acceptance rule is named {kind!r}{did_you_mean(kind, rules)}")
    rule = rules[kind]
    fields = [name for name in rule.model_fields if name != "kind"]
    written = [next((k for k, v in SPELLED.items() if v == name), name) for name in fields]
    given: dict[str, str] = {}
    for part in filter(None, (word.strip() for word in rest.split(","))):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not value:
            raise StrategyError(
                f"{part!r} in the acceptance rule {text!r} is not NAME=VALUE; write "
                f"{kind}:{','.join(f'{one}=...' for one in written) or ' nothing more'}"
            )
        if name not in written:
            raise StrategyError(
                f"the acceptance rule {kind!r} has no {name!r}{did_you_mean(name, written)}"
            )
        given[SPELLED.get(name, name)] = value
    return validated(rule, given, f"acceptance rule {kind!r}")


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
        accept = read_acceptance(accept)
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
        dumped = {**chosen.model_dump(), "acceptance": accept.model_dump(), "name": name}
        chosen = validated(Strategy, dumped, "strategy")
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
