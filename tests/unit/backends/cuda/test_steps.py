"""Steps in kernels: every buffer is what the operators write, and what has no kernel goes by these."""

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
from lantern_accel.nn.rounding import ROUNDINGS
from lantern_accel.nn.transformer import pack
from lantern_accel.strategy.rules import Exact
from lantern_accel.strategy.values import NoTree, Sampling, Strategy, Window
from lantern_accel.testing import tiny
from lantern_accel_cuda import agreement, steps

SITE = agreement.Site(torch.device("cpu"), 132, (torch.float32,))
SAMPLING = Sampling(temperature=1.0, cfg_scale=2.0, top_k=12)


def strategy(tree: Any, coupling: Any = "invariant") -> Strategy:
    return Strategy(name="asked", drafts=tree, acceptance=Exact(), coupling=coupling)


def entering(backend: Any, asked: Any, batch: int = 1, sampling: Sampling = SAMPLING) -> Any:
    asked = asked if isinstance(asked, Strategy) else strategy(asked)
    model = tiny.tiny_model(backend, backend.device, torch.float32)
    engine = engine_of((model.target, None), asked, sampling, batch, ops=backend)
    vars(engine)["model"] = model
    return engine


@interpreted
@pytest.mark.long
def test_the_check_of_first_use_compares_drafts_that_were_kept_refused_and_recalled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recalled: list[int] = []
    gained: list[int] = []
    honest = InvariantWindow._recall

    def counted(self: Any, state: Any, window: Any, tokens: Any, first: Any) -> Any:
        found = honest(self, state, window, tokens, first)
        recalled.append(int((found != tokens).sum()))
        gained.append(int(first.max()))
        return found

    monkeypatch.setattr(InvariantWindow, "_recall", counted)
    assert agreement.advance(SITE).error == 0.0
    assert max(gained) > 1 and sum(recalled) > 0


@interpreted
@pytest.mark.long
@pytest.mark.parametrize(
    ("tree", "batch"),
    [(NoTree(), 1), (Window(length=3), 2), (Window(length=3, fresh="head"), 2)],
)
def test_a_whole_step_writes_what_the_operators_do(
    tree: Any, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, _ = doubled_backend(monkeypatch, preset="fast")
    safe, _ = doubled_backend(monkeypatch)
    ours, theirs = (entering(one, tree, batch) for one in (backend, safe))
    assert ours.longest.fused is not None and theirs.longest.fused is None
    assert theirs.longest.fused_end is None
    held = []
    with torch.inference_mode():
        for engine in (ours, theirs):
            tiny.start(engine, 0, engine.prefill)
            for _ in range(2):
                engine.step()
            cache = {str(n): one[:-1] for n, one in enumerate(engine.verifying.cache.buffers)}
            held.append({**engine.state.buffers, **engine.finite.buffers, **cache})
    assert int(theirs.state.length.min()) > 0
    for name, want in held[1].items():
        got = held[0][name]
        # The last column is for what is past the image.
        cut = (slice(None), slice(-1)) if name == "tokens" or want.dim() == 3 else ()
        if want.is_floating_point():
            torch.testing.assert_close(got[cut], want[cut], rtol=1e-3, atol=1e-4, msg=name)
        else:
            assert torch.equal(got[cut], want[cut]), name


@compiles
@pytest.mark.parametrize(
    ("tree", "kernels"),
    [
        (NoTree(), ["_choose", "_advance"]),
        (Window(length=4), ["_choose", "_advance", "_fresh", "_best_drafts"]),
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
    # float32: no few rows
    layer = ["_rms_norm", "_rotate_write", "_attend", "_rms_norm", "_swiglu"]
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
@pytest.mark.parametrize(
    ("asked", "temperature", "why"),
    [
        (NoTree(), 1.0, ""),
        (Window(length=4), 1.0, ""),
        (Window(length=4, fresh="uniform"), 1.0, "fresh drafts"),
        (Window(length=4), 0.0, "noise"),
        (strategy(Window(length=4, fresh="uniform"), coupling="maximal"), 1.0, "noise"),
    ],
)
def test_what_has_no_kernel_goes_by_operators(
    asked: Any, temperature: float, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, _ = doubled_backend(monkeypatch)
    engine = entering(backend, asked, sampling=Sampling(temperature=temperature, cfg_scale=2.0))
    found = steps.explain_refusal(replace(engine.longest.plan(), target=None))
    assert why in found and bool(why) == bool(found)


@compiles
def test_a_target_that_no_kernel_multiplies_goes_by_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, _ = doubled_backend(monkeypatch, preset="fast")
    model = tiny.tiny_model(backend, backend.device, torch.float32)
    backend.trust = lambda kernel: not kernel.startswith("rounded")
    pack(model.target, backend, ROUNDINGS["int8"])
    engine = engine_of((model.target, None), strategy(NoTree()), SAMPLING, ops=backend)
    assert "quantized" in steps.explain_refusal(engine.longest.plan())
    assert engine.longest.fused is None and engine.longest.fused_end is not None
