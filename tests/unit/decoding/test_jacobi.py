"""Windows through the engine: exact when greedy, static, for every family, and clear about bad input."""

from __future__ import annotations

import pytest
import torch
from support.engines import SAMPLED, engine_of
from support.tiny import tiny_models
from unit.decoding.test_prompt_rows import contexts, decode, left_pad, models, tokens_of

from lantern_accel.errors import StrategyError
from lantern_accel.strategy.rules import Lantern, LanternPP
from lantern_accel.strategy.strategy import check_settings
from lantern_accel.strategy.trees import parse_drafts, tree_paths
from lantern_accel.strategy.values import (
    WINDOW_STRATEGIES,
    DynamicTree,
    Sampling,
    StaticTree,
    Strategy,
    Window,
    named_strategy,
)

STATIC = StaticTree(paths=((0,),))
EXACT = ("sjd", "scd")


def named(name: str, length: int = 6) -> Strategy:
    found = named_strategy(name, static=STATIC, dynamic=DynamicTree(top_k=1, depth=0, total=2))
    return found.override(window=length)


@pytest.mark.parametrize("newline", [False, True], ids=["anole", "lumina"])
@pytest.mark.parametrize("guided", [False, True], ids=["plain", "guided"])
@pytest.mark.parametrize("name", EXACT)
def test_rows_with_prompts_of_their_own_and_forced_codes(
    name: str, guided: bool, newline: bool
) -> None:
    prompts = [[0, 5, 6, 7, 3], [0, 9, 3]]
    greedy = Sampling(temperature=0, cfg_scale=2.0 if guided else 1.0)
    plain = tokens_of(decode(prompts, sampling=greedy, newline=newline))
    target, _ = models(newline)
    c = target.config
    fitted = target.resized(prefix_length=8)
    for sampling in (greedy, greedy.model_copy(update={"temperature": 1.0, "top_k": 12})):
        running = engine_of((fitted, None), named(name), sampling, batch=2)
        ids, mask = left_pad(contexts(prompts, sampling.branches), 8, pad=1)
        with torch.inference_mode():
            running.start(ids, mask, running.randomness(5, [0, 1]))
            tokens = running.run().tokens
        if sampling.greedy:
            assert torch.equal(tokens, plain)
        if newline:
            ends = tokens.view(2, c.height, c.width + 1) == c.newline
            assert ends[..., -1].all() and not ends[..., :-1].any()


@pytest.mark.parametrize("rule", [Lantern(k=10, delta=0.9), LanternPP(k=10, lam=20.0)])
def test_nothing_is_relaxed_in_a_window(rule: Lantern | LanternPP) -> None:
    with pytest.raises(StrategyError, match="as lantern and lantern"):
        named("scd").override(acceptance=rule)


def test_under_the_papers_coupling_a_window_is_sjds() -> None:
    for window in (Window(), Window(length=4, fresh="head"), Window.over((1, 4), fresh="uniform")):
        with pytest.raises(ValueError, match="choose the strategy 'sjd'"):
            Strategy(drafts=window, coupling="maximal")
    assert named("sjd").override(coupling="maximal").drafts == Window(length=6, fresh="uniform")


def test_windows_need_no_drafter_and_hold_no_cache_of_one() -> None:
    for name in WINDOW_STRATEGIES:
        assert not named(name).needs_drafter
        running = engine_of(tiny_models(0), named(name), SAMPLED, batch=4)
        assert not running.geometry.drafted
        g = running.geometry
        assert g.target_slots == g.prefix + g.tokens + 1, "no slot for a draft"
        held = running.verifying.cache.layout.nbytes + running.state.nbytes
        assert (
            running.nbytes == held + running.session.runtime_params.nbytes + running.finite.nbytes
        )


# --- as text, and where it cannot be -------------------------------------------------------------


def test_windows_as_text() -> None:
    found = parse_drafts("window:24,uniform,passes=2")
    assert found == Window(length=24, fresh="uniform", passes=2)
    assert found.size == (24, 23)
    sjd = named("sjd", 16)
    assert sjd.override(drafts=parse_drafts("window:32")).drafts == Window(
        length=32, fresh="uniform"
    )
    assert Strategy.model_validate_json(sjd.model_dump_json()) == sjd


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("window:1", "2 or more, not 1"),
        ("window:1000", "256 or less, not 1000"),
        (
            "window:16,below",
            "has no field 'below'; it has length=..., fresh=uniform|above|head, passes",
        ),
        ("window:4,siblings=3.2", "has no field 'siblings'"),
        ("window:4,passes=x", "passes takes an integer"),
        ("window:4,passes=17", "16 or less, not 17"),
        ("window:8,gumbel", "has no field 'gumbel'"),
        ("windows:8", "did you mean window:16"),
    ],
)
def test_windows_that_cannot_be_read(text: str, words: str) -> None:
    with pytest.raises(StrategyError) as said:
        parse_drafts(text)
    assert words in str(said.value)


def test_trees_and_windows_do_not_take_each_others_place() -> None:
    with pytest.raises(StrategyError, match="'window' and takes none of the kind 'chain'"):
        named("scd").override(drafts=parse_drafts("chain:4"))
    eagle = named_strategy("eagle", static=STATIC, dynamic=DynamicTree(top_k=1, depth=0, total=2))
    with pytest.raises(StrategyError, match="takes none of the kind 'window'; choose 'sjd', 'scd'"):
        eagle.override(drafts=parse_drafts("window:8"))
    with pytest.raises(StrategyError, match="'eagle' has no window; choose one of"):
        eagle.override(window=8)
    with pytest.raises(StrategyError, match="'window' have no paths"):
        tree_paths(Window())


def test_settings_that_a_model_cannot_serve() -> None:
    small = tiny_models(0)
    with pytest.raises(StrategyError, match=r"37 tokens, but an image has 36 tokens; .* window"):
        engine_of(small, named("scd", 37), SAMPLED)
    wide = Strategy(drafts=StaticTree(paths=tuple((rank,) for rank in range(5))))
    with pytest.raises(StrategyError, match="have 5 siblings, but there are 4 codes"):
        check_settings(wide, Sampling(), 4)
