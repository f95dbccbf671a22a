"""Ten faults that once passed every test: each is planted in the source, and its law must find it.

A law takes the module that it is about, and holds of the module as it is. ``tests/mutants.py`` plants
faults of its own; dev/testing.md says what survived.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from support.engines import engine_of
from support.tree_tensors import draft_tree
from torch import Tensor

from lantern_accel.decoding.decoded import Decoded
from lantern_accel.decoding.rule import Rule
from lantern_accel.device.operations import TensorOps
from lantern_accel.families.registry import family
from lantern_accel.strategy.rules import Lantern
from lantern_accel.strategy.values import NoTree, Sampling, Strategy, Window
from lantern_accel.testing.tiny import tiny_model
from lantern_accel_profiles.quality.set_metrics import kernel_distance

Law = Callable[[Any], None]


@contextmanager
def planted(name: str, old: str, new: str) -> Iterator[ModuleType]:
    """Give a copy of a module whose source has ``new`` in the one place where it has ``old``."""
    sound = importlib.import_module(name)
    assert sound.__file__ is not None
    with open(sound.__file__, encoding="utf-8") as file:
        source = file.read()
    assert source.count(old) == 1, f"{name} has {old!r} {source.count(old)} times"
    copy = types.ModuleType(f"{name}_planted")
    copy.__package__, copy.__file__ = name.rpartition(".")[0], sound.__file__
    sys.modules[copy.__name__] = copy
    try:
        exec(compile(source.replace(old, new), sound.__file__, "exec"), copy.__dict__)
        yield copy
    finally:
        del sys.modules[copy.__name__]


# --- laws ----------------------------------------------------------------------------------------


def _rows_used(engine: Any) -> list[float]:
    """Run an image and return the first uniform of the row that each step reads."""
    generator = torch.Generator().manual_seed(5)
    engine.state.uniforms.copy_(torch.rand(engine.state.uniforms.shape, generator=generator))
    numbers = engine.state.uniforms[0, :, 0].tolist()
    read: list[float] = []
    rows = engine.state.uniforms

    class Watched(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None):
            out = super().__torch_function__(func, kinds, args, kwargs or {})
            if func is Tensor.index_select:
                read.append(float(out.as_subclass(Tensor)[0, 0, 0]))
            return out.as_subclass(Tensor) if isinstance(out, Tensor) else out

    engine.prefill()
    engine.state.uniforms = rows.as_subclass(Watched)  # type: ignore[arg-type]
    with torch.inference_mode():
        for _ in range(20):
            engine.step()
    assert set(read) <= set(numbers)
    return read


def _llamagen() -> Any:
    ops = TensorOps()
    return tiny_model(ops, torch.device("cpu"), torch.float32, family("llamagen").name)


def _draw_as(module: Any, engine: Any) -> None:
    """Let an engine's state draw by the planted module's code."""
    engine.state.drawn = types.MethodType(module.State.drawn, engine.state)


def every_step_has_numbers_of_its_own(module: Any) -> None:
    model = _llamagen()
    strategy = Strategy(drafts=NoTree(), coupling="maximal")
    engine = engine_of((model.target, None), strategy, Sampling())
    _draw_as(module, engine)
    read = _rows_used(engine)
    assert len(set(read)) == len(read) == 20


def every_window_has_numbers_of_its_own(module: Any) -> None:
    model = _llamagen()
    strategy = Strategy(drafts=Window(length=2, fresh="uniform"), coupling="maximal")
    engine = engine_of((model.target, None), strategy, Sampling())
    _draw_as(module, engine)
    assert len(set(_rows_used(engine))) >= 20  # a step reads its own for tests, then for drafts


def where_nothing_is_left_the_target_draws(module: Any) -> None:
    p = torch.tensor([[0.5, 0.25, 0.25, 0.0]])
    rule = Rule(Lantern(k=1, delta=0.1), "aggregate", torch.tensor([[1], [0], [3], [2]]))
    test = module.examine(rule, p, p, torch.tensor([2]), 0, None)
    assert torch.allclose(module.residual(rule, test), p)


def the_price_is_per_token(module: Any) -> None:
    done = Decoded(torch.zeros(2, 10).long(), torch.tensor([2, 5]), None, torch.tensor([1.0, 3.0]))  # type: ignore[arg-type]
    assert module.relaxed_mass(done).tolist() == pytest.approx([0.1, 0.3])


def the_floor_is_what_chance_gives(module: Any) -> None:
    rng = np.random.default_rng(1)
    plain, other = rng.normal(size=(8, 4)), rng.normal(size=(8, 4))
    sets = {("vanilla", 0): plain, ("vanilla", module.OTHER_SEED): other, ("far", 0): plain + 3}
    study = object.__new__(module.PriceStudy)
    study.images, study.seed = 8, 0
    study._load = lambda: None
    study._of = lambda network, strategy, seed: sets[strategy.name, seed]
    found = study._distance(Strategy(name="far"))
    assert found.floor == kernel_distance(other, plain)
    assert found.value == kernel_distance(plain + 3, plain)


def what_disturbs_both_cancels(module: Any) -> None:
    rng = np.random.default_rng(2)
    disturbed = np.exp(rng.normal(size=24))
    ratio = module.paired(
        lambda a, b: np.median(a, -1) / np.median(b, -1), 2 * disturbed, disturbed
    )
    assert ratio.low == pytest.approx(2) == ratio.high


def _walk(
    module: Any,
    rule: Rule,
    p: Tensor,
    codes: list[int],
    tests: list[float],
    q: Tensor | None = None,
) -> Any:
    """Try ``codes`` at the root of an image; every later distribution is ``p`` too."""
    nodes = len(codes) + 1
    tree = draft_tree([[0] * nodes], torch.tensor([[0, *codes]]))
    if q is not None:
        tree = type(tree)(
            **{**vars(tree), "q": q.view(1, 1, -1), "group": torch.zeros(1, nodes).long()}
        )
    probs = p.view(1, 1, -1).expand(1, nodes, -1)
    return module.accept_sampling(tree, probs, rule, torch.tensor([tests]), torch.tensor([0.5]))


def a_refused_draft_has_its_price(module: Any) -> None:
    p = torch.tensor([0.3, 0.2, 0.5])
    rule = Rule(Lantern(k=1, delta=0.25), "aggregate", torch.tensor([[1], [0], [0]]))
    for test in (0.01, 0.99):
        assert float(_walk(module, rule, p, [0], [test]).price.sum()) == pytest.approx(0.2)


def the_price_is_a_distance(module: Any) -> None:
    # q = 0.25 and p = 0.2 with 0.2 borrowed: the test is passed for certain, and 0.2 more often.
    p, q = torch.tensor([0.2, 0.2, 0.6]), torch.tensor([0.25, 0.25, 0.5])
    rule = Rule(Lantern(k=1, delta=0.3), "aggregate", torch.tensor([[1], [0], [0]]))
    assert float(_walk(module, rule, p, [0], [0.9], q).price.sum()) == pytest.approx(0.2)


def a_budget_is_spent_once(module: Any) -> None:
    p = torch.tensor([0.2, 0.2, 0.2, 0.4])
    near = torch.tensor([[3], [3], [3], [0]])
    rule = Rule(Lantern(k=1, delta=1.0), "optimal", near, budget=torch.tensor([0.1]))
    # The first sibling spends all of it, so that the second is tested exactly.
    found = _walk(module, rule, p, [0, 1], [0.99, 0.99])
    assert float(found.price.sum()) == pytest.approx(0.1)


# --- what is planted -----------------------------------------------------------------------------

DECODING = "lantern_accel.decoding."
MUTANTS: dict[str, tuple[Law, str, str, str]] = {
    "the same uniforms for every later step": (
        every_step_has_numbers_of_its_own,
        DECODING + "state",
        "step.clamp(max=self.uniforms.shape[1] - 1)",
        "step.clamp(max=8)",
    ),
    "the same uniforms for every later window": (
        every_window_has_numbers_of_its_own,
        DECODING + "state",
        "step.clamp(max=self.uniforms.shape[1] - 1)",
        "step.clamp(max=8)",
    ),
    "aggregate falls back to all codes alike": (
        where_nothing_is_left_the_target_draws,
        DECODING + "draft_test",
        "return normalised((target - q).clamp(min=0.0), p)",
        "return normalised((target - q).clamp(min=0.0), p * 0 + 1 / p.shape[-1])",
    ),
    "total variation divided by steps": (
        the_price_is_per_token,
        "lantern_accel_profiles.measure.price",
        "done.price / done.tokens.shape[1]",
        "done.price / done.steps",
    ),
    "the strategy's own distance as the floor": (
        the_floor_is_what_chance_gives,
        "lantern_accel_profiles.measure.price",
        "floor=kernel_distance(other, plain)",
        "floor=kernel_distance(relaxed, plain)",
    ),
    "an unpaired bootstrap of the speed-up": (
        what_disturbs_both_cancels,
        "lantern_accel_profiles.quality.interval",
        "of(*(column[chosen] for column in data))",
        "of(*(column[picks(n, i)] for i, column in enumerate(data)))",
    ),
    "only kept drafts have a price": (
        a_refused_draft_has_its_price,
        DECODING + "accept",
        "torch.where(open_, found.mass, found.px)",
        "torch.where(kept, found.mass, found.px)",
    ),
    "the borrowed mass as the price": (
        the_price_is_a_distance,
        DECODING + "accept",
        "lift(px, mass, shares)",
        "((mass - px) / shares)",
    ),
    "a budget for every sibling": (
        a_budget_is_spent_once,
        DECODING + "accept",
        "left = torch.where(refused, rest.clamp(max=1.0), left)",
        "left = left",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_breaks_its_law(name: str) -> None:
    law, module, old, new = MUTANTS[name]
    law(importlib.import_module(module))
    with planted(module, old, new) as wrong, pytest.raises(AssertionError):
        law(wrong)
