"""What follows a pass in kernels: every buffer is what the operators write, to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.compilations import Compilations
from support.cuda_double import doubled_backend
from support.engines import engine_of
from support.interpreter import compiles, interpreted

from lantern_accel.decoding.sources.window import InvariantWindow
from lantern_accel.device import plan
from lantern_accel.device.plan import FusedStep
from lantern_accel.strategy.rules import Exact
from lantern_accel.strategy.values import NoTree, Sampling, Strategy, Window
from lantern_accel.testing.result import Failed
from lantern_accel_cuda import agreement, steps

SITE = agreement.Site(torch.device("cpu"), 132, (torch.float32,))
#: Codes of a row that one program takes: the interpreter is slow. The check of first use has more.
CODES = 48


@interpreted
def test_two_steps_write_what_the_operators_do() -> None:
    assert agreement.advance(SITE, 2, CODES).error == 0.0


@interpreted
@pytest.mark.long
def test_every_buffer_is_the_operators_and_the_data_show_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recalled: list[int] = []
    honest = InvariantWindow._recalled

    def counted(self: Any, state: Any, window: Any, tokens: Any, first: Any) -> Any:
        found = honest(self, state, window, tokens, first)
        recalled.append(int((found != tokens).sum()))
        gained.append(int(first.max()))
        return found

    gained: list[int] = []
    monkeypatch.setattr(InvariantWindow, "_recalled", counted)
    assert agreement.advance(SITE).error == 0.0
    # Drafts were kept and refused, and tokens taken from earlier passes: else nothing was compared.
    assert max(gained) > 1
    assert sum(recalled) > 0


@interpreted
@pytest.mark.parametrize(
    "fault", ["source", *(pytest.param(f, marks=pytest.mark.long) for f in ("row", "count", "end"))]
)
def test_a_fault_is_found_by_the_check_of_first_use(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lantern_accel_cuda.kernels import advance

    honest = advance.Advance.__call__

    def narrower(self: advance.Advance, weights: torch.Tensor) -> None:
        source = self.source
        if isinstance(source, plan.WindowPlan):
            source = replace(source, width=source.width - 1)
        honest(replace(self, source=source), weights)

    if fault == "source":
        monkeypatch.setattr(advance.Advance, "__call__", narrower)
    elif fault == "row":
        roll = lambda self, weights: honest(self, weights.roll(1, -1))  # noqa: E731
        monkeypatch.setattr(advance.Advance, "__call__", roll)
    elif fault == "count":
        fewer = lambda self, w: honest(replace(self, count=max(self.count - 1, 1)), w)  # noqa: E731
        monkeypatch.setattr(advance.Advance, "__call__", fewer)
    else:
        sooner = lambda self, weights: honest(replace(self, last=self.last - 1), weights)  # noqa: E731
        monkeypatch.setattr(advance.Advance, "__call__", sooner)
    with pytest.raises((Failed, RuntimeError), match="is not what the operators write"):
        agreement.advance(SITE, codes=CODES)


@interpreted
@pytest.mark.long
def test_a_heads_guesses_are_those_of_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a step that takes another token for the one on the left is found."""
    from lantern_accel_cuda.kernels import guess

    found = agreement.guesses(SITE, 2, CODES).detail.split()
    assert found[0] == found[2]
    right = guess.Guesses.__call__

    def shifted(self: Any, noted: Any, guided: torch.Tensor) -> None:
        right(self, (noted[0], noted[1].roll(1, 1), noted[2]), guided)

    monkeypatch.setattr(guess.Guesses, "__call__", shifted)
    with pytest.raises(Failed, match="with a draft head"):
        agreement.guesses(SITE, 1, CODES)


@compiles
@pytest.mark.parametrize(
    ("tree", "kernels"),
    [
        (NoTree(), ["_choose", "_advance"]),
        (Window(length=4), ["_choose", "_advance", "_fresh", "_drafted"]),
    ],
)
def test_a_step_launches_so_many(
    tree: Any, kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Compilations(monkeypatch)
    engine = agreement._engine(agreement.TensorOps(), strategy(tree))
    after = steps.fused_step(agreement.TensorOps(), replace(engine.longest.plan(), target=None))
    assert isinstance(after, FusedStep)
    after.run(torch.zeros(2, engine.geometry.nodes, engine.geometry.vocab))
    assert made.launches == kernels


def strategy(tree: Any, rule: Any = None, coupling: Any = "invariant") -> Strategy:
    return Strategy(name="asked", drafts=tree, acceptance=rule or Exact(), coupling=coupling)


@compiles
@pytest.mark.parametrize(
    ("asked", "temperature", "served"),
    [
        (strategy(NoTree()), 1.0, True),
        (strategy(Window(length=4)), 1.0, True),
        (strategy(Window(length=4, fresh="uniform")), 1.0, False),
        (strategy(Window(length=4)), 0.0, False),
        (strategy(Window(length=4, fresh="uniform"), coupling="maximal"), 1.0, False),
    ],
)
def test_what_has_no_kernel_goes_by_operators(
    asked: Strategy, temperature: float, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lantern_accel.testing.tiny import tiny_model

    backend, _ = doubled_backend(monkeypatch)
    model = tiny_model(backend, backend.device, torch.float32)
    sampling = Sampling(temperature=temperature, cfg_scale=2.0)
    engine = engine_of((model.target, None), asked, sampling, ops=backend)
    why = steps.refused(replace(engine.longest.plan(), target=None))
    assert (why == "") == served
    assert engine.longest.fused_end is None  # preset=safe
