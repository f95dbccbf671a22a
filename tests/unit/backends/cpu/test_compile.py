"""Steps compiled by torch on the CPU: the same decisions, one graph, and said when it cannot be."""

from __future__ import annotations

import pytest
import torch
from support.generated import generated, whole_caches

from lantern_accel.device.plugins import open_backend
from lantern_accel.errors import BackendError
from lantern_accel.testing.tiny import start, tiny_engine
from lantern_accel_cpu import compile as compiling
from lantern_accel_cpu.linear import packs

needs_compiler = pytest.mark.skipif(compiling.compiler() is None, reason="no C++ compiler")


@needs_compiler
@pytest.mark.long
def test_a_compiled_step_decides_alike_and_is_one_graph() -> None:
    import torch._dynamo.utils as dynamo

    with open_backend("cpu", {"compile": "on"}) as backend, torch.inference_mode():
        assert backend.support("capture")
        engine = tiny_engine(backend, "lantern++")
        captured = backend.capture(engine.step, "step")
        assert captured.captured
        assert captured.seconds > 0
        graphs = dynamo.counters["stats"]["unique_graphs"]
        for seed in (0, 1):
            start(engine, seed)
            got = engine.run(captured)
            start(engine, seed)
            want = engine.run()
            assert torch.equal(got.tokens, want.tokens)
            assert torch.equal(got.histogram, want.histogram)
        assert dynamo.counters["stats"]["unique_graphs"] == graphs
        # A second engine has a graph of its own, though its step is the same code.
        other = tiny_engine(backend, "vanilla", temperature=0.0)
        replay = backend.capture(other.step, "step")
        start(other, 0)
        vanilla = other.run(replay)
        assert vanilla.steps.tolist() == [other.geometry.tokens - 1]
        captured.release()
        with pytest.raises(BackendError, match="was released"):
            captured()


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "compiler", lambda: None)
    with (
        open_backend("cpu", {"compile": "on"}) as backend,
        pytest.raises(BackendError, match=r"needs a C\+\+ compiler.*install g\+\+"),
    ):
        backend.capture(lambda: None)
    with open_backend("cpu", {"native": "off"}) as backend:
        replay = backend.capture(lambda: None)
        replay.expect(10**12)
        assert not replay.captured


@pytest.mark.parametrize(("calls", "compiled"), [(100, 0), (10**9, 1)])
def test_only_a_long_request_is_compiled(
    monkeypatch: pytest.MonkeyPatch, calls: int, compiled: int
) -> None:
    made = []

    def fake(step, name):
        made.append(name)
        return step

    monkeypatch.setattr(compiling, "compile_step", fake)
    monkeypatch.setattr(compiling, "compiler", lambda: "g++")
    numbers = torch.zeros(4)
    with open_backend("cpu", {"compile": "auto", "native": "off"}) as backend:
        replay = backend.capture(lambda: numbers.add_(1), "step")
        replay.expect(calls)
        assert len(made) == compiled
        assert replay.captured is bool(compiled)
        replay.expect(calls)
        assert len(made) == compiled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 7, 24])
def test_packed_products_are_the_plain_ones(dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(48, 32, generator=generator).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype)
    x = torch.randn(2, rows, 32, generator=generator).to(dtype)
    with open_backend("cpu", {"native": "off"}) as backend, torch.inference_mode():
        packed = backend.pack(weight)
        assert (packed is weight) is not packs(weight)
        assert packed.shape == weight.shape
        for b in (None, bias):
            got = backend.linear(x, packed, b).double()
            want = torch.nn.functional.linear(
                x.double(), weight.double(), None if b is None else b.double()
            )
            tolerance = 1e-5 if dtype == torch.float32 else 0.1
            assert got.shape == want.shape
            assert float((got - want).abs().max()) < tolerance


@pytest.mark.long
def test_the_generated_code_updates_caches_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_backend("cpu", {"threads": 1, "native": "off"}) as backend, torch.inference_mode():
        engine = tiny_engine(backend, "lantern++")
        start(engine, 1)
        code = generated(engine.step, monkeypatch)
    shape = engine.caches[0].layout.shape
    assert not whole_caches(code, {cache.layout.shape for cache in engine.caches})
    copied = f"buf1 = empty_strided_cpu(({', '.join(map(str, shape))}), (1, 1), torch.float32)"
    assert whole_caches(f"{code}\n{copied}", {shape}) == [copied]
