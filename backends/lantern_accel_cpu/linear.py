"""Matmuls on weights in oneDNN's own memory order.

A step multiplies a few rows by every weight, so its time is that of reading the weights. From torch's
row-major order a product of two rows takes 1.5 (bfloat16) to 5 times (float32) as long as from the
order that oneDNN chooses for itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: Rows that the order is chosen for; products of 2 to 24 rows were found to take the same time.
ROWS = 4

_SUPPORTED = {
    torch.float32: None,
    torch.bfloat16: "_is_mkldnn_bf16_supported",
    torch.float16: "_is_mkldnn_fp16_supported",
}

# torch.compile cannot look into oneDNN's operators, so it sees one of ours.
_LIBRARY: Any = torch.library.Library("lantern_accel_cpu", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


def packs(weight: Tensor) -> bool:
    """Return whether this build of torch and this processor multiply ``weight`` in oneDNN's order."""
    dtype = weight.dtype
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if dtype not in _SUPPORTED or not available:
        return False
    # Of other kinds some have no memory whose order could change.
    if type(weight) not in (Tensor, nn.Parameter):
        return False
    operators = torch.ops.mkldnn
    if not all(hasattr(operators, n) for n in ("_reorder_linear_weight", "_linear_pointwise")):
        return False
    question = _SUPPORTED[dtype]
    return question is None or bool(getattr(operators, question)())


def pack(weight: Tensor) -> Tensor:
    """Return ``weight [out, in]`` in oneDNN's order (an opaque tensor of the same shape)."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS)
    return packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply ``x [..., in]`` by a weight, packed or not; ``[..., out]`` in x's dtype."""
    if torch.compiler.is_compiling():
        out: Tensor = torch.ops.lantern_accel_cpu.linear.default(x, weight, bias)
        return out
    return _linear(x, weight, bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if weight.layout == torch.strided:
        return F.linear(x, weight, bias)
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return out


for key in ("CPU", "MkldnnCPU"):
    _LIBRARY.impl("linear", _linear, key)


def _fake_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


torch.library.register_fake("lantern_accel_cpu::linear", _fake_linear)
