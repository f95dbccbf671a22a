"""Windows through the engine: exact when greedy, static, for every family, and clear about bad input."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from support.engines import GREEDY, SAMPLED, engine_of, finish
from support.tiny import tiny_models
from torch import Tensor
from unit.decoding.test_prompt_rows import contexts, decode, left_pad, models, tokens_of

from lantern_accel.errors import StrategyError
from lantern_accel.strategy.rules import Lantern, LanternPP
from lantern_accel.strategy.strategy import check_settings
from lantern_accel.strategy.trees import parse_tree, tree_paths
from lantern_accel.strategy.values import (
    WINDOW_STRATEGIES,
    Coupling,
    DynamicTree,
    Fresh,
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


@pytest.mark.parametrize("length", [4, 36])
@pytest.mark.parametrize("name", EXACT)
def test_greedy_windows_give_vanillas_tokens(name: str, length: int) -> None:
    interval = Sampling(temperature=0, cfg_scale=4.0, cfg_interval=9)
    accepted = 0
    for sampling in (GREEDY, Sampling(temperature=0), interval):
        small = tiny_models(0)
        plain = finish(engine_of(small, Strategy(), sampling, batch=4))
        fast = finish(engine_of(small, named(name, length), sampling, batch=4))
        assert torch.equal(plain.tokens, fast.tokens)
        accepted += int(fast.histogram[:, 1:].sum())
        gained = fast.histogram * torch.arange(1, length + 1)
        assert gained.sum(1).tolist() == [35] * 4, "every token is counted once"
    # SJD's fresh drafts are any code at all, and behind a refused draft the tail is the argmax again.
    assert accepted or name == "sjd", "drafts were accepted"


@pytest.mark.parametrize("fresh", [one for one in get_args(Fresh) if one != "head"])
def test_every_source_of_fresh_drafts_is_exact_when_greedy_and_draws_otherwise(
    fresh: Fresh,
) -> None:
    small = tiny_models(0)
    plain = finish(engine_of(small, Strategy(), GREEDY, batch=2))
    couplings: tuple[Coupling, ...] = ("invariant", "maximal")
    for coupling in couplings if fresh == "uniform" else couplings[:1]:
        window = Strategy(drafts=parse_tree(f"window:6,{fresh}"), coupling=coupling)
        assert torch.equal(finish(engine_of(small, window, GREEDY, batch=2)).tokens, plain.tokens)
        drawn = finish(engine_of(small, window, SAMPLED, batch=2))
        assert drawn.steps.max() <= 35 and drawn.tokens.max() < 64


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


def test_an_image_is_the_same_alone_and_in_a_batch() -> None:
    small = tiny_models(0)
    together = finish(engine_of(small, named("scd"), SAMPLED, batch=3), [2, 0, 1])
    alone = finish(engine_of(small, named("scd"), SAMPLED, batch=1), [0])
    assert torch.equal(together.tokens[1], alone.tokens[0])


@pytest.mark.parametrize("rule", [Lantern(k=10, delta=0.9), LanternPP(k=10, lam=20.0)])
def test_nothing_is_relaxed_in_a_window(rule: Lantern | LanternPP) -> None:
    with pytest.raises(StrategyError, match="as lantern and lantern"):
        named("scd").override(acceptance=rule)


def test_under_the_papers_coupling_a_window_is_sjds() -> None:
    for window in (Window(), Window(length=4, fresh="head"), Window.over((1, 4), fresh="uniform")):
        with pytest.raises(ValueError, match="choose the strategy 'sjd'"):
            Strategy(drafts=window, coupling="maximal")
    assert named("sjd").override(coupling="maximal").drafts == Window(length=6, fresh="uniform")


def test_steps_after_the_end_change_nothing() -> None:
    running = engine_of(tiny_models(0), named("scd"), SAMPLED, batch=4)
    finish(running)
    kept = {name: value.clone() for name, value in running.state.buffers.items()}
    with torch.inference_mode():
        running.step()
    changed = {
        name for name, value in running.state.buffers.items() if not torch.equal(value, kept[name])
    }
    kept_passes = {"row_tokens", "row_keys", "row_previous"}
    assert changed <= {"step", "q", "tokens", "newest", "last_length"} | kept_passes
    image: Tensor = running.state.tokens[:, :36]
    assert torch.equal(image, kept["tokens"][:, :36])


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
    found = parse_tree("window:24,uniform,passes=2")
    assert found == Window(length=24, fresh="uniform", passes=2)
    assert found.size == (24, 23)
    sjd = named("sjd", 16)
    assert sjd.override(tree=parse_tree("window:32")).drafts == Window(length=32, fresh="uniform")
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
        ("window:4,passes=x", "passes: Input should be a valid integer"),
        ("window:4,passes=17", "16 or less, not 17"),
        ("window:8,gumbel", "has no field 'gumbel'"),
        ("windows:8", "did you mean window:16"),
    ],
)
def test_windows_that_cannot_be_read(text: str, words: str) -> None:
    with pytest.raises(StrategyError) as said:
        parse_tree(text)
    assert words in str(said.value)


def test_trees_and_windows_do_not_take_each_others_place() -> None:
    with pytest.raises(StrategyError, match="'window' and takes none of the kind 'chain'"):
        named("scd").override(tree=parse_tree("chain:4"))
    eagle = named_strategy("eagle", static=STATIC, dynamic=DynamicTree(top_k=1, depth=0, total=2))
    with pytest.raises(StrategyError, match="takes none of the kind 'window'; choose 'sjd', 'scd'"):
        eagle.override(tree=parse_tree("window:8"))
    with pytest.raises(StrategyError, match="'eagle' has no window; choose one of"):
        eagle.override(window=8)
    with pytest.raises(StrategyError, match="'window' have no paths"):
        tree_paths(Window())


def test_settings_that_a_model_cannot_serve() -> None:
    small = tiny_models(0)
    with pytest.raises(StrategyError, match=r"37 tokens, but an image has 36 tokens; .* window"):
        engine_of(small, named("scd", 37), SAMPLED)
    with pytest.raises(StrategyError, match="k = 64 is too many for a codebook of 64 codes"):
        check_settings(Strategy(drafts=STATIC, acceptance=Lantern(k=64)), SAMPLED, 64)
    wide = Strategy(drafts=StaticTree(paths=tuple((rank,) for rank in range(5))))
    with pytest.raises(StrategyError, match="have 5 siblings, but there are 4 codes"):
        check_settings(wide, Sampling(), 4)
    with pytest.raises(StrategyError, match="needs a neighbour table"):
        relaxed = Strategy(drafts=STATIC, acceptance=LanternPP())
        engine_of(small, relaxed, SAMPLED, neighbours=None)
    with pytest.raises(StrategyError, match="these strategies need none: 'vanilla', 'sjd', 'scd'"):
        engine_of((small[0], None), Strategy(name="eagle", drafts=STATIC), SAMPLED)
