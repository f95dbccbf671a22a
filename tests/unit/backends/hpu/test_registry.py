"""What a graph may hold: names, dtypes, ranks; every captured function of all families and sources."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support import every_function
from support.gaudi import Gaudi, on_cpu

from lantern_accel.testing import tiny
from lantern_accel.testing.trace import OpRecorder
from lantern_accel_hpu import operators
from lantern_accel_hpu.backend import DeviceBackend
from lantern_accel_hpu.bridge import Bridge

aten = torch.ops.aten


@torch.no_grad()
def refused(*functions: Callable[[], None]) -> tuple[set[str], int]:
    """Run functions; return what no graph can hold of them, with the reason, and how much was run."""
    with OpRecorder(torch.device("cpu"), operators.rules()) as seen:
        for function in functions:
            function()
    found = {str(one) for one in seen.violations if one.rule in operators.rules()}
    return found, len(seen.signature)


def test_names_are_exact() -> None:
    assert operators.has_lowering(aten.view.default) == ""
    assert "no lowering of this overload" in operators.has_lowering(aten.view.dtype)
    # In a graph a write in place is its function and a copy, and what torch composes is its parts.
    for held in (aten.celu_, aten.detach, aten.sort, aten.reshape, aten.add):
        overload = held.Tensor if held is aten.add else held.default
        assert operators.has_lowering(overload) == "", held
    complaint = operators.rules()["operators"](aten.view.dtype, (torch.zeros(1), torch.int32), {})
    assert "registry" in complaint
    # Whatever is padded with, a pad of bool may be False; and what takes int64 is cast each time.
    rules, some = operators.rules(), torch.zeros(2, dtype=torch.bool)
    assert "value of another kind" in rules["operators"](
        aten.constant_pad_nd.default, (some, [1, 0], 1), {}
    )
    assert "int32" in rules["indices"](aten.gather.default, (some.float(), 0, some.long()), {})
    assert "flags" in rules["operators"](aten.zeros.default, ([2],), {"dtype": torch.bool})
    whole, real = some.int(), some.float()
    assert "complex" in rules["dtypes"](aten.complex.default, (real, real), {})
    assert "in int32, kernels in" in rules["dtypes"](aten.mm.default, (whole, whole), {})
    # A float makes floats of integers.
    assert operators.has_dtype(aten.threshold_backward.default, (whole, whole, 0.5), {}) == ""


@pytest.mark.parametrize("kind", every_function.KINDS)
def test_every_captured_function_holds_what_a_graph_may_hold(kind: str) -> None:
    backend = on_cpu(DeviceBackend(Bridge(Gaudi())))
    engine = every_function.engine_of(backend, kind, 2, True)
    tiny.start(engine, 1)
    for name, function in engine.host_functions().items():
        found, seen = refused(function)
        assert found == set() and seen > 10, name


@pytest.mark.parametrize("family", tiny.family_names())
def test_every_source_of_every_family_holds_what_a_graph_may_hold(family: str) -> None:
    backend = on_cpu(DeviceBackend(Bridge(Gaudi())))
    model = tiny.tiny_model(backend, backend.device, torch.float32, family)
    seen = 0
    for name, strategy in tiny.cases(tiny.CHECKED):
        if name != family:
            continue
        engine = tiny.tiny_engine(backend, strategy, batch=2, family=family, model=model)
        tiny.load(engine, 0)
        found, ran = refused(engine.prefill, engine.step)
        assert found == set(), strategy
        seen += ran
    assert seen > 1000
