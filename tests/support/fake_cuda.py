"""Fake tensors of the device ``cuda`` on a torch that was built without CUDA.

Fake tensors need no GPU, but torch's Python indexing asks for the device before it looks at the tensor,
and a CPU build has none to give. Under :class:`Indexing` the same views are made by operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten


#: Other methods that look for the device first.
GUARDED = {
    Tensor.copy_: aten.copy_,
    Tensor.__invert__: aten.bitwise_not,
    Tensor.item: aten._local_scalar_dense,
}


class Indexing(TorchFunctionMode):
    """Replaces ``x[...]`` and what else looks for the device by the operators behind them."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__ and args[0].device.type == "cuda":
            return _index(args[0], args[1])
        if func is Tensor.__setitem__ and args[0].device.type == "cuda":
            raise NotImplementedError("a step writes through operators with a name")
        if func in GUARDED and args[0].device.type == "cuda":
            return GUARDED[func](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _index(x: Tensor, key: Any) -> Tensor:
    keys = list(key) if isinstance(key, tuple) else [key]
    named = sum(one is not None and one is not Ellipsis for one in keys)
    spread = [slice(None)] * (x.dim() - named)
    if Ellipsis in [k for k in keys if not isinstance(k, Tensor)]:
        at = next(i for i, one in enumerate(keys) if one is Ellipsis)
        keys[at : at + 1] = spread
    dim = 0
    tensors: list[Tensor | None] = []
    for one in keys:
        if one is None:
            x = aten.unsqueeze(x, dim)
        elif isinstance(one, int):
            x = aten.select(x, dim, one)
            continue
        elif isinstance(one, slice):
            if one != slice(None):
                x = aten.slice(x, dim, one.start, one.stop, one.step or 1)
        else:
            tensors += [None] * (dim - len(tensors)) + [one]
        dim += 1
    return aten.index(x, tensors) if tensors else x


__all__ = ["Indexing"]
