"""Makes a strategy of what a user writes: a name or a value, with changes, over a model's defaults."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from lantern_accel.errors import StrategyError, did_you_mean, show
from lantern_accel.files import read_text_file
from lantern_accel.records import Frozen
from lantern_accel.strategy.presets import PRESETS
from lantern_accel.strategy.rules import OPTION_NAMES, AcceptanceRule, Lantern, LanternPP
from lantern_accel.strategy.sources import (
    DraftConfig,
    DynamicTree,
    NoTree,
    StaticTree,
    named_sources,
)
from lantern_accel.strategy.trees import EAGLE2_TREE, NAIVE_EXTEND_57, parse_drafts
from lantern_accel.strategy.values import AUTO, Sampling, Strategy, named_strategy

Read = TypeVar("Read")
#: Changes that belong to one strategy, with those to ask for in place of auto.
ONE = {
    "drafts": "'eagle' or 'lantern++'",
    "window": "'scd'",
    "accept": "'lantern++'",
    "k": "'lantern++'",
    "delta": "'lantern'",
    "lam": "'lantern++'",
    "residual": "'lantern++'",
    "neighbour_space": "'lantern++'",
}
#: What :func:`choose_strategy` takes next to a name.
CHANGES = (*ONE, "coupling", "tv_budget", "relaxed")


def read_strategy(text: str) -> dict[str, Any]:
    """Read a strategy as commands take it, into the settings of a request.

    ``NAME:SETTING=VALUE,...`` over a strategy or a preset, or a ``.json`` file that holds a strategy.
    ``drafts`` and ``accept`` come last, since their text may have commas. Raises :class:`StrategyError`.
    """
    if text.endswith(".json"):
        try:
            return {"strategy": Strategy.model_validate_json(read_text_file(Path(text)))}
        except (OSError, ValueError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or "not a strategy"
            raise StrategyError(f"{text} cannot be read as a strategy ({why})") from None
    name, colon, rest = text.partition(":")
    kind = "preset" if name in {one.name for one in PRESETS} else "strategy"
    found: dict[str, Any] = {kind: name}
    fields = {OPTION_NAMES.get(one, one): one for one in CHANGES}
    short, *long = re.split(r"(?:^|,)(?=(?:drafts|accept)=)", rest)
    for pair in [*filter(None, short.split(",")), *long] if colon else ():
        key, _, value = (part.strip() for part in pair.partition("="))
        key = key.replace("-", "_")
        if not value:
            raise StrategyError(
                f"the strategy {show(text)} cannot be read; write NAME:SETTING=VALUE,SETTING=VALUE, "
                "such as lantern++:k=10,lambda=2"
            )
        if fields.get(key, key) not in CHANGES:
            raise StrategyError(f"a strategy has no {show(key)}{did_you_mean(key, fields)}")
        found[fields.get(key, key)] = value if pair in long else _number(value)
    return found


def _number(text: str) -> int | float | str:
    """Return the number that a text is, else the text."""
    for kind in (int, float):
        with suppress(ValueError):
            if len(text) < 64 and text.isascii():
                return kind(text)
    return text


class ModelDefaults(Frozen):
    """What a request gets that does not say otherwise."""

    sampling: Sampling = Sampling()
    static_tree: StaticTree = NAIVE_EXTEND_57
    dynamic_tree: DynamicTree = EAGLE2_TREE
    lantern: Lantern = Lantern()
    lantern_pp: LanternPP = LanternPP()
    style: str | None = Field(
        None,
        description="what a prompt without a style word asks for, where training settled on one",
    )

    def within(self, vocab: int) -> ModelDefaults:
        """Return these defaults with every k reduced below a codebook of ``vocab`` codes."""
        sampling = self.sampling
        if sampling.top_k > vocab:
            sampling = sampling.model_copy(update={"top_k": 0})
        most = max(vocab - 2, 1)
        rules = {
            name: one.model_copy(update={"k": min(one.k, most)})
            for name, one in (("lantern", self.lantern), ("lantern_pp", self.lantern_pp))
        }
        return self.model_copy(update={"sampling": sampling, **rules})


def choose_strategy(defaults: ModelDefaults, strategy: str | Strategy, **changes: Any) -> Strategy:
    """Return a strategy by name over a model's ``defaults``, or a given one, with changes.

    ``changes``: those of :data:`CHANGES`; ``drafts`` and ``accept`` may be text; None changes nothing.
    Raises :class:`StrategyError` for a name or value that cannot be, and for a change that the name
    does not allow.
    """
    drafts = changes.get("drafts")
    if isinstance(drafts, str):
        drafts = changes["drafts"] = _read("drafts", parse_drafts, drafts)
    if strategy == AUTO and isinstance(drafts, DraftConfig) and drafts.kind in named_sources():
        strategy = drafts.kind  # one that is a strategy by itself
    accept = changes.pop("accept", None)
    relaxed = changes.pop("relaxed", None)
    if strategy == AUTO:
        return _automatic(defaults, relaxed, {**changes, "accept": accept})
    if isinstance(accept, str):
        accept = _read("accept", AcceptanceRule.read, accept)
    elif accept is not None and not isinstance(accept, AcceptanceRule):
        raise StrategyError(
            f"{show(accept)} is not an acceptance rule; write one, such as lantern++:k=10,lambda=2"
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
        _check_drafts(chosen, changes.get("drafts"))
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


def _automatic(
    defaults: ModelDefaults, relaxed: bool | None, changes: dict[str, object]
) -> Strategy:
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
        text = "an exact strategy uses no total variation; leave tv_budget out"
        raise StrategyError(text, field="tv_budget")
    if relaxed or budget is not None:
        chosen = chosen.override(acceptance=defaults.lantern_pp, tv_budget=budget)
    return chosen.override(coupling=coupling)


def _check_drafts(named: Strategy, drafts: DraftConfig | None) -> None:
    """Refuse a tree under a name that says there is none, and none under one that drafts."""
    if drafts is not None and isinstance(drafts, NoTree) != isinstance(named.drafts, NoTree):
        raise StrategyError(
            f"the strategy {named.name!r} cannot have the drafts {drafts.kind!r}; use 'vanilla' for "
            "none, 'eagle' (exact) or 'lantern++' (relaxed) for a tree"
        )
