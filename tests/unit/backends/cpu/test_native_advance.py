"""All that follows a pass over a window in one native call, against the engine's own steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import native
from support.engines import SAMPLED, engine_of, start
from support.tiny import tiny_models
from torch import Tensor

from lantern_accel.device.operations import TensorOps
from lantern_accel.device.plan import FusedStep, Refused, StepPlan
from lantern_accel.strategy.sources import DraftLength
from lantern_accel.strategy.values import Sampling, Strategy, Window
from lantern_accel_cpu.native import races, sampling, steps
from lantern_accel_cpu.native.kernels import Kernels

pytestmark = native.needs_native
UNITS = native.unit_cases()
PLAIN = Sampling(temperature=0.9, top_k=0, top_p=1.0, cfg_scale=2.0)


class Pieces(TensorOps):
    """The native operations that a step is made of, one by one."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self.kernels, self.calls = kernels, 0

    def filter(self, logits: Tensor, given: Any, tables: object | None = None) -> Tensor:
        found = sampling.filter(self.kernels.library, logits, given)
        assert found is not None
        return found

    def draw(self, weights: Tensor, uniform: Tensor, sums: Tensor | None = None) -> Tensor:
        found = sampling.draw(self.kernels.library, weights, uniform.unsqueeze(-1))
        assert found is not None
        return found.squeeze(-1)

    def race(
        self, weights: Tensor, keys: Tensor, positions: Tensor, count: int | None = None
    ) -> Tensor:
        found = races.race(self.kernels.library, weights, keys, positions)
        assert found is not None
        return found


class Whole(Pieces):
    """The same, and what follows a pass at once."""

    def fused_step(self, plan: StepPlan) -> FusedStep | Refused:
        if plan.target:
            return Refused("only what follows a pass")
        made = steps.fused_step(self.kernels, self, plan)
        if isinstance(made, Refused):
            return made
        run = made.run

        def counted(logits: Tensor | None) -> bool:
            self.calls += 1
            return run(logits)

        return FusedStep(counted)


def made(ops: Pieces, strategy: Strategy, given: Sampling, batch: int) -> Any:
    """Return an engine that has been given its request."""
    model = tiny_models(0)[0]
    engine = engine_of((model, None), strategy, given, batch, ops=ops)
    start(engine, seed=3)
    return engine


def kept(engine: Any) -> dict[str, Tensor]:
    """Return what a step changes, without what nobody reads: all that is of positions past the image."""
    state, finite = engine.state, engine.finite
    found = {name: t.clone() for name, t in state.buffers.items() if name not in ("uniforms",)}
    found["tokens"] = found["tokens"][:, :-1]
    if engine.geometry.in_place:  # fresh drafts go as far as the next window does, or farther
        if engine.geometry.kept:
            found["q"] = found["q"][:, :-1]
        reach = state.length + getattr(engine, "now", engine.geometry.depth + 1)
        behind = torch.arange(found["tokens"].shape[1]) >= reach.unsqueeze(1)
        found["tokens"].masked_fill_(behind, 0)
        late = found["row_keys"] // engine.geometry.vocab >= engine.geometry.tokens
        for name in ("row_keys", "row_previous", "row_tokens"):
            found[name].masked_fill_(late, 0)
    return found | _watched(finite)


def _watched(finite: Any) -> dict[str, Tensor]:
    return {name: getattr(finite, name).clone() for name in ("count", "holds", "report")}


def compare(one: Any, other: Any, when: object) -> None:
    for (name, a), (_, b) in zip(kept(one).items(), kept(other).items(), strict=True):
        assert torch.equal(a, b), (name, when)


def window(length: int, **changes: Any) -> Strategy:
    return Strategy(name="scd", drafts=Window(length=length, **changes))


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(name="vanilla", coupling="maximal"),
        window(2),
        window(5),
        window(5, passes=0),
        window(5, fresh="uniform"),
        window(16),
    ],
)
def test_every_step_leaves_what_the_engine_leaves(unit: str, strategy: Strategy) -> None:
    kernels = native.kernels(unit)
    with torch.inference_mode():
        for given, batch in ((SAMPLED, 3), (PLAIN, 1)):
            one, whole = Pieces(kernels), Whole(kernels)
            want, got = made(one, strategy, given, batch), made(whole, strategy, given, batch)
            compare(want, got, "prefill")
            steps = want.geometry.tokens + 3  # past the end too
            for step in range(steps):
                want.step()
                got.step()
                compare(want, got, step)
            assert whole.calls == steps
            assert int(got.state.length.min()) == want.geometry.tokens - 1


@pytest.mark.parametrize("unit", UNITS)
def test_moves_between_lengths_leave_what_the_engine_leaves(unit: str) -> None:
    kernels = native.kernels(unit)
    draft_lengths = tuple(DraftLength(length=n, cost=1.0, tokens_per_step=1.0) for n in (1, 3, 8))
    strategy = window(8, draft_lengths=draft_lengths)
    whole = Whole(kernels)
    with torch.inference_mode():
        want, got = made(Pieces(kernels), strategy, SAMPLED, 2), made(whole, strategy, SAMPLED, 2)
        make = torch.Generator().manual_seed(4)
        for step in range(40):
            length = (1, 3, 8)[int(torch.randint(0, 3, (), generator=make))]
            for engine in (want, got):
                engine.move(length)
                engine.step()
            compare(want, got, (step, length))
    assert whole.calls == 40


def test_a_number_that_is_not_finite_is_counted() -> None:
    kernels = native.kernels(UNITS[0])
    with torch.inference_mode():
        engines = [made(one, window(4), SAMPLED, 2) for one in (Pieces(kernels), Whole(kernels))]
        for engine in engines:
            real = engine.verifying.guidance

            def damaged(*given: Any, real: Any = real) -> Tensor:
                logits: Tensor = real(*given).clone()
                logits[1, 2, 4] = float("nan")
                return logits

            engine.step()
            engine.verifying.guidance = damaged
            engine.step()
            assert engine.finite.count.tolist() == [3, 2]


def test_what_has_no_kernel_goes_the_engines_way() -> None:
    sjd = Strategy(drafts=Window(length=5, fresh="uniform"), coupling="maximal")
    with torch.inference_mode():
        engine = made(Whole(native.kernels(UNITS[0])), sjd, SAMPLED, 2)
    assert engine.longest.fused_end is None
