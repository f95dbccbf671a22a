"""How many kernels a first picture waits for: those that its kernels' checks compile."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
from support.compilations import Compilations
from support.cuda_double import doubled_backend
from support.interpreter import compiles

from lantern_accel.decoding.engine import Engine
from lantern_accel.models.bundle import load_model
from lantern_accel.models.locate import find_model
from lantern_accel.strategy.rules import Exact
from lantern_accel.strategy.values import AUTO_LENGTHS, Strategy, Window
from lantern_accel.testing.result import Failed, Measured
from lantern_accel_cuda import agreement
from lantern_accel_cuda.options import EVERY_STEP

#: Of the checks of a first picture of the bundled model, and of two that it does not need: products with
#: quantized weights, and a walk down a tree by one rule.
MOST, MOST_ROUNDED, MOST_WALK = 40, 13, 3
#: Variants that prefill and steps of two lengths have.
MOST_STEPS = 26


def counted(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> dict[str, int]:
    """Return the variants that checks compile; they compare what nothing has computed."""
    made = Compilations(monkeypatch)
    monkeypatch.setattr(agreement, "_near", lambda *given: Measured())
    monkeypatch.setattr(agreement, "within", lambda *given: Measured())
    monkeypatch.setattr(torch, "equal", lambda *given: True)
    site = agreement.Site(torch.device("cpu"), 132, (torch.bfloat16,))
    for name in names:
        with contextlib.suppress(Failed), torch.inference_mode():
            agreement.KERNELS[name](site)
    return made.names()


@compiles
def test_the_checks_of_a_first_picture_compile_few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of what prefill and the steps of ``auto`` ask for, with the bundled draft head."""
    with monkeypatch.context() as patch:
        steps = Compilations(patch)
        for where, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            made = getattr(where, name)  # kernels that do not run leave what they were given
            patch.setattr(where, name, lambda *a, made=made, **k: made(*a, **k).zero_())
        backend, _ = doubled_backend(patch, preset="fast", graph="off")
        asked: set[str] = set()
        patch.setattr(backend, "trust", lambda check: asked.add(check) or True)
        loaded = load_model(
            find_model("lantern-emoji"), backend, dtype=torch.bfloat16, device=backend.device
        )
        windows = Window.over((AUTO_LENGTHS[0], AUTO_LENGTHS[-1]), fresh="head")
        strategy = Strategy(name="x", drafts=windows, acceptance=Exact(), coupling="invariant")
        sampling = loaded.manifest.defaults.sampling
        engine = Engine(loaded.target, None, backend, strategy, sampling, batch=1)
        with torch.inference_mode():
            for run in engine.host_functions().values():
                run()
    names = {check.split(" in ")[0] for check in asked}
    assert names <= {*EVERY_STEP, "guess"} and "guess" in names
    assert set(EVERY_STEP) == set(backend_together(monkeypatch))
    assert sum(steps.names().values()) <= MOST_STEPS, steps.names()
    found = counted(monkeypatch, [*EVERY_STEP, "guess"])
    assert len(found) >= 12  # they were launched
    assert sum(found.values()) <= MOST, found


def backend_together(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the kernels whose checks run with the first one's."""
    backend, _ = doubled_backend(monkeypatch, preset="fast")
    return [check.split(" in ")[0] for check in backend.together("guide")]


@compiles
def test_what_a_first_picture_does_not_need_is_few_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    found = counted(monkeypatch, ["rounded"])
    assert 6 < sum(found.values()) <= MOST_ROUNDED, found
    one = partial(agreement.walks, forms=agreement.walk_forms()[:1])
    monkeypatch.setattr(agreement, "KERNELS", {"accept": one})
    found = counted(monkeypatch, ["accept"])
    assert sum(found.values()) <= MOST_WALK, found
