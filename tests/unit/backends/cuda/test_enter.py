"""Whole steps in kernels: what stands before a pass, to the bit, and the step as the operators do it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.compilations import Compilations
from support.cuda_double import doubled_backend
from support.engines import engine_of
from support.interpreter import compiles, interpreted

from lantern_accel.device.operations import TensorOps
from lantern_accel.device.plan import FusedStep
from lantern_accel.strategy.rules import Exact
from lantern_accel.strategy.values import NoTree, Sampling, Strategy, Window
from lantern_accel.testing import tiny
from lantern_accel.testing.result import Failed
from lantern_accel_cuda import agreement, steps

SITE = agreement.Site(torch.device("cpu"), 132, (torch.float32,))
SAMPLING = Sampling(temperature=1.0, cfg_scale=2.0, top_k=12)


def entering(backend: Any, tree: Any, batch: int = 1) -> Any:
    asked = Strategy(name="asked", drafts=tree, acceptance=Exact(), coupling="invariant")
    model = tiny.tiny_model(backend, backend.device, torch.float32)
    engine = engine_of((model.target, None), asked, SAMPLING, batch, ops=backend)
    vars(engine)["model"] = model
    return engine


@interpreted
def test_a_pass_begins_as_by_the_operators() -> None:
    assert agreement.enter(SITE).error == 0.0


@interpreted
@pytest.mark.parametrize("fault", ["room", "prefix"])
def test_a_fault_is_found_by_the_check_of_first_use(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lantern_accel_cuda.kernels import enter

    honest = enter.enter

    def wrong(tokens: Any, length: Any, mask: Any, table: Any, rotary: Any, *given: int) -> Any:
        if fault == "prefix":
            mask = ~mask
        else:
            given = (*given[:2], given[2] + 1, *given[3:])
        return honest(tokens, length, mask, table, rotary, *given)

    monkeypatch.setattr(enter, "enter", wrong)
    with pytest.raises(Failed, match="is not what the operators begin with"):
        agreement.enter(SITE)


class Operators(agreement._Noting):
    """The reference's arithmetic with a GPU's layout, for what a whole step hands from part to part."""

    serves_few = staticmethod(lambda x: False)

    def trunk(self, *given: Any) -> Any:
        return TensorOps.trunk(self, *given)

    def attend(self, q: Any, kv: Any, layer: int, mask: Any) -> Any:
        return super().attend(q, kv, layer, mask.bool())

    def attend_dense(self, q: Any, k: Any, v: Any, mask: Any) -> Any:
        return super().attend_dense(q, k, v, None if mask is None else mask.bool())


@interpreted
@pytest.mark.parametrize(("tree", "batch"), [(NoTree(), 1), (Window(length=3), 2)])
def test_a_whole_step_gives_the_rows_that_operators_give(
    tree: Any, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lantern_accel_cuda.kernels import advance

    ops, rows = Operators(), []
    engine = entering(ops, tree, batch)
    monkeypatch.setattr(advance.Advance, "__call__", lambda self, weights: rows.append(weights))
    step = steps.fused_step(ops, engine.longest.plan())
    assert isinstance(step, FusedStep)
    with torch.inference_mode():
        tiny.start(engine, 0, engine.prefill)
        engine.state.length.add_(torch.arange(batch))
        want = ops.filter(
            engine.source.verify(engine.state, engine.source.draft(engine.state))[1],
            engine.session.filters.given,
        )
        cache = [one.clone() for one in engine.verifying.cache.buffers]
        for one in engine.verifying.cache.buffers:
            one[-1] = 0.0
        assert step.run(None)
    torch.testing.assert_close(rows[0], want, rtol=1e-4, atol=1e-6)
    for got, other in zip(engine.verifying.cache.buffers, cache, strict=True):
        torch.testing.assert_close(got, other, rtol=1e-4, atol=1e-6)


@interpreted
@pytest.mark.long
@pytest.mark.parametrize(("tree", "batch"), [(Window(length=3, fresh="head"), 2)])
def test_a_whole_step_writes_what_the_operators_do(
    tree: Any, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, _ = doubled_backend(monkeypatch, preset="fast")
    safe, _ = doubled_backend(monkeypatch)
    ours, theirs = (entering(one, tree, batch) for one in (backend, safe))
    assert ours.longest.fused is not None and theirs.longest.fused is None
    assert theirs.longest.fused_end is None
    with torch.inference_mode():
        for engine in (ours, theirs):
            tiny.start(engine, 0, engine.prefill)
            for _ in range(2):
                engine.step()
    assert int(theirs.state.length.min()) > 0
    held = {**ours.state.buffers, **ours.finite.buffers}
    for name, want in {**theirs.state.buffers, **theirs.finite.buffers}.items():
        got = held[name]
        if not want.is_floating_point():
            # The last column is for what is past the image.
            cut = (slice(None), slice(-1)) if name == "tokens" else ()
            assert torch.equal(got[cut], want[cut]), name
        elif name == "q" and want.dim() == 3:
            torch.testing.assert_close(got[:, :-1], want[:, :-1], rtol=1e-3, atol=1e-4)


@compiles
@pytest.mark.parametrize(
    ("tree", "kernels"),
    [
        (NoTree(), ["_choose", "_advance"]),
        (Window(length=4), ["_choose", "_advance", "_fresh", "_drafted"]),
        (
            Window(length=3, fresh="head"),
            ["_choose", "_advance", "_guide", *["_logits", "_weigh", "_settle"] * 2],
        ),
    ],
)
def test_one_kernel_stands_before_the_pass(
    tree: Any, kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, _ = doubled_backend(monkeypatch, preset="fast")
    engine, made = entering(backend, tree), Compilations(monkeypatch)
    with torch.inference_mode():
        engine.step()
    layer = [
        "_rms_norm",
        "_rotate_write",
        "_attend",
        "_rms_norm",
        "_swiglu",
    ]  # float32: no few rows
    layers = len(engine.verifying.target.layers)
    after = ["_rms_norm", "_guide", "_filter", *kernels]
    assert made.launches == ["_enter", *layer * layers, *after]


@compiles
def test_a_step_is_whole_where_its_kernels_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, _ = doubled_backend(monkeypatch, preset="fast")
    assert entering(backend, NoTree()).longest.fused is not None
    backend.trust = lambda kernel: kernel != "enter"
    engine = entering(backend, NoTree())
    assert engine.longest.fused is None and engine.longest.fused_end is not None
    backend.trust = lambda kernel: kernel != "rotate_write in float32"
    assert entering(backend, NoTree()).longest.fused is None


@compiles
def test_a_target_that_no_kernel_multiplies_goes_by_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lantern_accel.nn.rounding import ROUNDINGS
    from lantern_accel.nn.transformer import pack

    backend, _ = doubled_backend(monkeypatch, preset="fast")
    model = tiny.tiny_model(backend, backend.device, torch.float32)
    backend.trust = lambda kernel: not kernel.startswith("rounded")
    pack(model.target, backend, ROUNDINGS["int8"])
    asked = Strategy(name="asked", drafts=NoTree(), acceptance=Exact(), coupling="invariant")
    engine = engine_of((model.target, None), asked, SAMPLING, ops=backend)
    assert "quantized" in steps.refused(engine.longest.plan())
    assert engine.longest.fused is None and engine.longest.fused_end is not None
