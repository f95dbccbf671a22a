"""What a graph may hold: names, dtypes, ranks; every captured function of all families and sources."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.gaudi import on_cpu
from torch.utils._python_dispatch import TorchDispatchMode

from lantern_accel.testing import tiny
from lantern_accel_hpu import functions, operators
from lantern_accel_hpu.backend import DeviceBackend

aten = torch.ops.aten


class Refused(TorchDispatchMode):
    """Notes the operators of a block that no graph can hold, each with the reason."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        rules = operators.rules()
        for rule in (rules["operators"], rules["dtypes"]):
            if why := rule(func, args, kwargs or {}):
                self.names.add(f"{operators.names_of(func)[1]}: {why}")
        return func(*args, **(kwargs or {}))


def test_names_are_exact() -> None:
    assert operators.has_lowering(aten.view.default) == ""
    assert "no lowering of this overload" in operators.has_lowering(aten.view.dtype)
    # In a graph a write in place is its function and a copy, and what torch composes is its parts.
    for held in (aten.add_.Tensor, aten.detach.default, aten.sort.default, aten.reshape.default):
        assert operators.has_lowering(held) == "", held
    complaint = operators.rules()["operators"](aten.view.dtype, (torch.zeros(1), torch.int32), {})
    assert "registry" in complaint


@torch.no_grad()
@pytest.mark.parametrize("kind", functions.KINDS)
def test_every_captured_function_holds_what_a_graph_may_hold(kind: str) -> None:
    backend = on_cpu(DeviceBackend.for_tracing())
    engine = functions.engine_of(backend, kind, 2, True)
    tiny.start(engine, 1)
    for name, function in functions.functions_of(engine).items():
        with Refused() as found:
            function()
        assert found.seen > 10
        assert found.names == set(), name


@torch.no_grad()
@pytest.mark.parametrize("family", tiny.family_names())
def test_every_source_of_every_family_holds_what_a_graph_may_hold(family: str) -> None:
    backend = on_cpu(DeviceBackend.for_tracing())
    model = tiny.tiny_model(backend, backend.device, torch.float32, family)
    seen = 0
    for name, strategy in tiny.cases(tiny.CHECKED):
        if name != family:
            continue
        engine = tiny.tiny_engine(backend, strategy, batch=2, family=family, model=model)
        tiny.load(engine, 0)
        with Refused() as found:
            engine.prefill()
            engine.step()
        assert found.names == set(), strategy
        seen += found.seen
    assert seen > 1000
