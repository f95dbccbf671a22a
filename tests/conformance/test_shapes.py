"""Tensors without data: what they refuse, and that a step on them is the step on torch's fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lantern_accel.device.plugins import open_backend
from lantern_accel.testing import tiny
from lantern_accel.testing.shapes import RefusedOperator, Shape, WithoutData
from lantern_accel.testing.trace import Signature

HPU = torch.device("hpu")


@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        ("host_read", lambda t: t.sum().item()),
        ("host_read", lambda t: bool(t.any())),
        ("host_read", lambda t: t.tolist()),
        ("host_read", lambda t: t.numpy()),
        ("host_read", lambda t: torch.equal(t, t)),
        ("dynamic_shape", torch.nonzero),
        ("dynamic_shape", lambda t: t[t > 0]),
        ("dynamic_shape", torch.unique),
    ],
)
def test_what_needs_data_is_refused_with_its_rule(
    rule: str, wrong: Callable[[Tensor], Any]
) -> None:
    with WithoutData(), pytest.raises(RefusedOperator) as refused:
        wrong(torch.zeros(3))
    assert refused.value.rule == rule


def test_results_have_the_device_of_what_they_are_made_of() -> None:
    with WithoutData(), torch.inference_mode():
        a = torch.empty(2, 3, device=HPU)
        made = [
            a + 1,
            a @ a.t(),
            torch.zeros_like(a),
            a.to(torch.bfloat16),
            torch.arange(3, device=HPU),
        ]
        assert {one.device for one in made} == {HPU}
        assert a.cpu().device == torch.device("cpu")
        assert torch.tensor([1, 2]).device == torch.device("cpu")
        # In place and views are the tensors that they are on a device.
        assert a.add_(1) is a and a.t().stride() == (1, 3)
    assert all(type(one) is Shape for one in made)
    assert not torch._C._only_lift_cpu_tensors()


def test_a_table_from_outside_keeps_its_numbers() -> None:
    table = torch.arange(4)
    with WithoutData(), torch.inference_mode():
        assert type(table + 1) is type(table.view(2, 2)) is Shape
        table.add_(1)
    assert table.tolist() == [0, 1, 2, 3]


def _traced(mode: Any, strategy: str) -> list[tuple[Any, ...]]:
    """Return a step's operators; strides of dimensions of one entry are anybody's."""
    with open_backend("cpu", {"native": "off"}) as backend, backend.inference(), mode:
        engine = tiny.tiny_engine(backend, strategy)
        tiny.load(engine, 0)
        with Signature() as seen:
            engine.prefill()
            engine.step()

    def plain(value: Any) -> Any:
        if not (isinstance(value, tuple) and len(value) == 3):
            return value
        shape, dtype, strides = value
        return shape, dtype, tuple(s for n, s in zip(shape, strides, strict=True) if n > 1)

    return [tuple(map(plain, one)) for one in seen.signature if not one[0].startswith("prim::")]


@pytest.mark.parametrize(
    "strategy",
    ["vanilla", *(pytest.param(s, marks=pytest.mark.long) for s in ("lantern++", "scd"))],
)
def test_a_step_is_the_step_on_fake_tensors(strategy: str) -> None:
    assert _traced(WithoutData(), strategy) == _traced(FakeTensorMode(), strategy)
