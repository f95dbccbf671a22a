"""Runs training on a device that was opened through its backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lantern_accel.device.backend import Backend, dtype_policy
from lantern_accel.device.operations import TensorOps
from lantern_accel.errors import DeviceRequestError

Precision = Literal["auto", "bfloat16", "float32"]


class TrainDevice:
    """One opened device, and the dtype in which it trains."""

    def __init__(self, backend: Backend, precision: Precision = "auto") -> None:
        if backend.device.type == "meta":
            raise DeviceRequestError(
                f"the backend {backend.name!r} has shapes and no data, so nothing can be trained "
                "on it; choose another device (`lantern-accel devices` lists them)"
            )
        self.backend, self.device = backend, backend.device
        self.dtype = _dtype(backend, precision)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Compute matmuls in this device's training dtype."""
        if self.dtype == torch.float32:
            yield
            return
        with torch.autocast(self.device.type, dtype=self.dtype):
            yield
        # Within a caller's autocast, torch would use the weights of this step in the next.
        torch.clear_autocast_cache()

    def to(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Move tensors to the device."""
        return tuple(t.to(self.device, non_blocking=True) for t in tensors)

    def adamw(self, groups: Iterable[Any], **settings: Any) -> torch.optim.Optimizer:
        """Return AdamW, in one fused kernel where torch has one for the device.

        ``settings`` are torch's (``lr``, ``betas``, ``weight_decay``).
        """
        every = list(groups)
        try:
            return torch.optim.AdamW(every, fused=True, **settings)
        except RuntimeError:  # torch names the devices that it has a fused kernel for
            return torch.optim.AdamW(every, **settings)

    def adopt(self, module: nn.Module) -> None:
        """Let the models within ``module`` compute with this device's operations for training."""
        ops = self.backend.training_ops
        for part in module.modules():
            if isinstance(getattr(part, "ops", None), TensorOps):
                part.ops = ops  # type: ignore[assignment]

    def prepare(self, module: nn.Module, *, compile: bool) -> Callable[..., Any]:
        """Return the module to call in training, on the device's operations and compiled if asked."""
        self.adopt(module)
        return torch.compile(module, dynamic=False) if compile else module

    def descend(
        self,
        optimizer: torch.optim.Optimizer,
        loss: Tensor,
        weights: Iterable[Tensor],
        rate: float,
        clip_norm: float,
    ) -> None:
        """Take the optimizer's step at ``rate`` with clipped gradients."""
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss.backward()  # type: ignore[no-untyped-call]  # torch types none
        self.backend.flush()
        nn.utils.clip_grad_norm_(list(weights), clip_norm)
        optimizer.step()
        self.backend.flush()
        optimizer.zero_grad(set_to_none=True)


def _dtype(backend: Backend, precision: Precision) -> torch.dtype:
    able = backend.compute_dtypes()
    if precision != "auto":
        return dtype_policy(backend, precision).compute
    if (own := backend.preferences.operators) is not None:
        return own
    order = [d for d in able if d in (torch.bfloat16, torch.float32)]
    return order[0] if order else torch.float32
