"""Checks a step's plan once, and owns what a description of ``native.h`` points to."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, addressof, c_int32

import torch
from torch import Tensor

from lantern_accel.device.plan import StepPlan, list_buffers
from lantern_accel_cpu.native.kernels import lies


class Unserved(Exception):
    """The kernels have no step for a plan; the text says why."""


class Owner:
    """Returns addresses, and keeps what lies there for as long as a description keeps its owner."""

    def __init__(self, *held: object) -> None:
        self.held: list[object] = list(held)

    def __call__(self, tensor: Tensor) -> int:
        """Keep a tensor; return its address."""
        self.held.append(tensor)
        return tensor.data_ptr()

    def optional(self, tensor: Tensor | None) -> int | None:
        """Keep a tensor; return its address, None where there is none."""
        return None if tensor is None else self(tensor)

    def number(self, value: Tensor | float) -> int:
        """Keep a number as one float32; return its address."""
        return self(value if isinstance(value, Tensor) else torch.tensor([float(value)]))

    def table(self, values: Sequence[int]) -> int:
        """Keep integers, int32; return their address."""
        made: Array[c_int32] = (c_int32 * max(1, len(values)))(*values)
        self.held.append(made)
        return addressof(made)

    def progress(self, plan: StepPlan) -> dict[str, int]:
        """Return the addresses of the buffers that every step writes, by name."""
        names = ("length", "step", "steps", "histogram", "last_length", "finite", "report", "holds")
        return {name: self(getattr(plan.buffers, name)) for name in names}


def require(met: bool, why: str) -> None:
    """Raise Unserved where a condition is not met."""
    if not met:
        raise Unserved(why)


def check_plan(plan: StepPlan, version: int) -> None:
    """Raise Unserved for a plan of another version, or with a buffer that the kernels cannot read."""
    require(plan.version == version, f"its plan is of version {plan.version}, not {version}")
    for part in (plan.buffers, plan.source, getattr(plan.source, "buffers", None)):
        for name, of in list_buffers(type(part)) if part is not None else ():
            tensor: Tensor | None = getattr(part, name)
            if tensor is not None:
                kinds = {"index": torch.int64, "weights": tensor.dtype}
                dtype = kinds.get(of.kind) or getattr(torch, of.kind)
                require(lies(dtype, tensor), f"{name} is not {dtype} in one piece on the CPU")


def check_model(plan: StepPlan, dtype: torch.dtype) -> None:
    """Raise Unserved where the target of a plan has what the kernels' pass has not."""
    at, target = plan.sizes, plan.target
    assert target is not None
    require(not at.own_prompts, "rows have prompts of their own")
    require(at.branches <= 2 and target.image_scale is None, "a third branch guides")
    require(target.penalties is None, "not every token may be any code")
    require((target.scale is None) == (at.branches == 1), "its branches are not those of guidance")
    require(target.stack.head.bias is None, "the head has a bias")
    floats = [one for one in (target.cos, target.sin, target.scale) if one is not None]
    whole = lies(dtype, target.stack.embedding, target.stack.norm.weight)
    require(whole and lies(torch.float32, *floats), f"the model is not all {dtype} on the CPU")
