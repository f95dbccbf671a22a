"""Drafts and settings that cannot be: tables of what is refused, each with a fragment of the reason."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from support.engines import NAMED, engine_of
from support.tiny import captions, tiny_models

from lantern_accel.errors import RequestError, StrategyError
from lantern_accel.strategy.rules import Lantern, LanternPP, validate_model
from lantern_accel.strategy.sources import DraftConfig, DraftLength
from lantern_accel.strategy.strategy import check_settings
from lantern_accel.strategy.trees import (
    EAGLE2_TREE,
    NAIVE_EXTEND_57,
    SMALL_12,
    parse_drafts,
    tree_paths,
)
from lantern_accel.strategy.values import (
    ChainTree,
    DynamicTree,
    NoTree,
    Sampling,
    SelfDrafts,
    StaticTree,
    Strategy,
    Window,
    named_strategy,
)

#: Texts of drafts.
TEXTS = [
    ("chain:x", "'chain' has no field 'x'; it has length=..."),
    ("chain:4,4", "has no field '4'"),
    ("dynamic:1,2", "total 59 asks for more nodes"),
    ("chain:65", "64 or less"),
    ("dynamic:2,1,9", "asks for more nodes"),
    ("0,00,02", "no sibling of rank 1"),
    ("small_9", "unknown tree 'small_9'; did you mean small_8"),
    ("chan:4", "did you mean chain:4"),
    ("none:1", "'none' has no field '1'; it has no fields"),
    ("static:1", "unknown tree"),
    ("window:1", "2 or more, not 1"),
    ("window:1000", "256 or less, not 1000"),
    (
        "window:16,below",
        "has no field 'below'; it has length=..., fresh=uniform|above|head, passes",
    ),
    ("window:4,siblings=3.2", "has no field 'siblings'"),
    ("window:4,passes=x", "passes takes an integer"),
    ("window:4,passes=17", "16 or less, not 17"),
    ("windows:8", "did you mean window:16"),
    ("self:0", "length"),
    ("self:4,window=1", "2 tokens or more"),
    ("self:4,passes=2", "passes"),
    ("self:4,int5", "int8"),
    ("self:4,fast", "no field 'fast'"),
]


@pytest.mark.parametrize(("text", "says"), TEXTS)
def test_a_text_of_drafts_is_refused(text: str, says: str) -> None:
    with pytest.raises(StrategyError) as caught:
        parse_drafts(text)
    assert says in str(caught.value)


#: A named strategy, what is changed of it, and fragments of the sentence.
CHANGES: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("eagle", {"delta": 0.1}, ("'eagle' has no delta: its acceptance rule is 'exact'",)),
    ("lantern", {"lam": 2.0}, ("'lantern' has no lambda", "leave lambda out")),
    ("lantern++", {"delta": 0.1}, ("'lantern++' has no delta",)),
    ("vanilla", {"k": 3}, ("'vanilla' has no k",)),
    ("lantern", {"kind": "exact"}, ("has no kind",)),
    ("lantern", {"delta": 0}, ("delta", "above 0", "not 0")),
    ("lantern", {"delta": 1.5}, ("delta", "1 or less", "not 1.5")),
    ("lantern++", {"lam": 0.5}, ("lambda", "1 or more", "not 0.5")),
    ("lantern", {"k": 0}, ("k", "1 or more", "not 0")),
    ("lantern", {"residual": "none"}, ("residual must be 'aggregate'", "not 'none'")),
    ("lantern", {"drafts": NoTree()}, ("drafts nothing that could be relaxed",)),
    ("eagle", {"tv_budget": 0.1}, ("strategy: exact acceptance uses", "leave tv_budget out")),
    ("eagle", {"tv_budget": 2}, ("strategy: tv_budget must be below 1",)),
    ("lantern", {"tv_budget": 0.1, "residual": "official"}, ("leave tv_budget out",)),
    ("scd", {"acceptance": Lantern()}, ("as lantern and lantern",)),
    ("scd", {"acceptance": LanternPP()}, ("as lantern and lantern",)),
    ("scd", {"drafts": ChainTree()}, ("'window' and takes none of the kind 'chain'",)),
    ("scd", {"drafts": SelfDrafts()}, ("takes none of the kind 'self'; choose 'self'",)),
    ("eagle", {"drafts": Window()}, ("takes none of the kind 'window'; choose 'sjd', 'scd'",)),
    ("eagle", {"window": 8}, ("'eagle' has no window; choose one of",)),
    ("self", {"coupling": "maximal"}, ("seed decides",)),
]


def named(name: str) -> Strategy:
    return named_strategy(name, static=NAIVE_EXTEND_57, dynamic=EAGLE2_TREE)


@pytest.mark.parametrize(("name", "changes", "says"), CHANGES)
def test_a_change_is_refused_with_one_sentence(
    name: str, changes: dict[str, Any], says: tuple[str, ...]
) -> None:
    with pytest.raises(StrategyError) as caught:
        named(name).override(**changes)
    text = str(caught.value)
    assert all(part in text for part in says) and "\n" not in text
    assert text.count("strategy:") <= 1, "what a value is called stands once"


#: Values, and the field that is out of range.
RANGES: list[tuple[Any, dict[str, Any], str]] = [
    (Lantern, {"delta": 0}, "delta"),
    (Lantern, {"delta": 1.5}, "delta"),
    (Lantern, {"delta": float("nan")}, "delta"),
    (Lantern, {"k": 0}, "k"),
    (Lantern, {"lam": 2}, "lam"),
    (LanternPP, {"lam": 0.5}, "lam"),
    (LanternPP, {"lam": float("nan")}, "lam"),
    (LanternPP, {"k": 0}, "k"),
    (LanternPP, {"delta": 0.1}, "delta"),
    (ChainTree, {"length": 0}, "length"),
    (DynamicTree, {"top_k": 0}, "top_k"),
    (DynamicTree, {"depth": -1}, "depth"),
    (DynamicTree, {"total": 1}, "total"),
    (Sampling, {"temperature": -1}, "temperature"),
    (Sampling, {"temperature": 1e-45}, "temperature"),
    (Sampling, {"temperature": float("nan")}, "temperature"),
    (Sampling, {"top_p": 0}, "top_p"),
    (Sampling, {"top_p": 1.1}, "top_p"),
    (Sampling, {"top_k": -1}, "top_k"),
    (Sampling, {"cfg_scale": -1}, "cfg_scale"),
    (Sampling, {"cfg_scale": float("inf")}, "cfg_scale"),
    (Sampling, {"cfg_interval": -2}, "cfg_interval"),
    (Sampling, {"order": "random"}, "order"),
    (Strategy, {"residual": "best"}, "residual"),
]


@pytest.mark.parametrize(("kind", "values", "field"), RANGES)
def test_a_value_out_of_range_is_refused(kind: Any, values: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        kind(**values)
    with pytest.raises(StrategyError, match=r"what: .*" + ("lambda" if field == "lam" else field)):
        validate_model(kind, values, "what")


def rising(*lengths: int) -> dict[str, Any]:
    return {"draft_lengths": tuple(DraftLength(length=n) for n in lengths)}


#: Values that do not belong together, and a fragment.
TOGETHER: list[tuple[Any, dict[str, Any], str]] = [
    (StaticTree, {"paths": [[0], [0, 1]]}, "no sibling of rank 0"),
    (StaticTree, {"paths": [[1]]}, "no sibling of rank 0"),
    (StaticTree, {"paths": [[0], [1, 0]]}, "the node [1, 0] has no parent [1]"),
    (StaticTree, {"paths": [[0], [0]]}, "every node once"),
    (StaticTree, {"paths": [[0], []]}, "not a path of ranks"),
    (StaticTree, {"paths": [[0], [-1]]}, "not a path of ranks"),
    (StaticTree, {"paths": []}, "at least 1"),
    (DynamicTree, {"top_k": 2, "depth": 1, "total": 8}, "(6 and the root)"),
    (ChainTree, {"length": 3, **rising(1, 2)}, "do not rise to 4"),
    (ChainTree, {"length": 3, **rising(2, 1, 4)}, "do not rise to 4"),
    (ChainTree, {"length": 3, **rising(4, 4)}, "do not rise to 4"),
    (Strategy, {"drafts": NoTree(), "acceptance": Lantern()}, "nothing that could be relaxed"),
    *(
        (Strategy, {"drafts": window, "coupling": "maximal"}, "choose the strategy 'sjd'")
        for window in (Window(), Window(fresh="head"), Window.over((1, 4), fresh="uniform"))
    ),
]


@pytest.mark.parametrize(("kind", "values", "says"), TOGETHER)
def test_values_that_do_not_belong_together_are_refused(
    kind: Any, values: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        kind(**values)
    assert says in str(caught.value)


def test_ends_of_the_ranges_are_allowed() -> None:
    assert (Lantern(delta=1.0, k=1).delta, LanternPP(lam=1.0).lam) == (1.0, 1.0)
    assert Sampling(temperature=0).greedy
    assert DynamicTree(top_k=2, depth=1, total=7).total == 7


def relaxed(drafts: DraftConfig = SMALL_12, **values: Any) -> Strategy:
    return Strategy(drafts=drafts, acceptance=Lantern(**values))


#: What no engine can be made for: strategy, sampling, changes of the tiny models' parts, a fragment.
ENGINES: list[tuple[Strategy, dict[str, Any], dict[str, Any], str]] = [
    (NAMED["eagle"], {}, {"drafter": None}, "no drafter"),
    (NAMED["lantern"], {}, {"neighbours": None}, "needs a neighbour table"),
    (relaxed(k=20), {}, {}, "reads 20 neighbours, the table has 10"),
    (relaxed(k=64), {}, {}, "k = 64"),
    (relaxed(k=63).override(residual="official"), {}, {}, "k between 1 and 62"),
    (Strategy(drafts=ChainTree(length=36)), {}, {}, "36 drafts deep"),
    (Strategy(drafts=Window(length=37)), {}, {}, "37 tokens, but an image has 36 tokens"),
    (Strategy(), {"top_k": 65}, {}, "top_k = 65"),
    (NAMED["lantern"].override(tv_budget=0.02), {"temperature": 0}, {}, "at temperature 0"),
    (Strategy(drafts=SelfDrafts()), {}, {"copy": None}, "none was given"),
    (Strategy(drafts=Window(fresh="head")), {}, {}, "window:16,above"),
]


@pytest.mark.parametrize(("strategy", "sampling", "parts", "says"), ENGINES)
def test_an_engine_that_cannot_be_is_refused_before_decoding(
    strategy: Strategy, sampling: dict[str, Any], parts: dict[str, Any], says: str
) -> None:
    target, drafter = tiny_models(0)
    models = target, parts.get("drafter", drafter)
    made = {name: one for name, one in parts.items() if name != "drafter"}
    with pytest.raises(StrategyError) as caught:
        engine_of(models, strategy, Sampling(**sampling), **made)
    assert says in str(caught.value)


def test_trees_that_are_wider_than_the_codebook_and_have_no_paths_are_refused() -> None:
    wide = Strategy(drafts=StaticTree(paths=tuple((rank,) for rank in range(5))))
    for tree in (wide, Strategy(drafts=DynamicTree(top_k=5))):
        with pytest.raises(StrategyError, match="5 siblings, but there are 4 codes"):
            check_settings(tree, Sampling(), 4)
    for drafts, says in (
        (EAGLE2_TREE, "before they are made"),
        (Window(), "'window' have no paths"),
    ):
        with pytest.raises(StrategyError, match=says):
            tree_paths(drafts)


def test_randomness_of_fewer_images_is_refused() -> None:
    engine = engine_of(tiny_models(0), Strategy(), Sampling(), 3)
    condition, mask = captions(engine.verifying.target, 3)
    with pytest.raises(RequestError, match="keys has shape"):
        engine.start(condition, mask, engine.randomness(0, [0]))
