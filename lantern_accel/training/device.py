"""Runs training on a device opened through its backend, or on several through accelerate."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lantern_accel.device.backend import Backend
from lantern_accel.device.operations import TensorOps
from lantern_accel.errors import BackendError, DeviceRequestError

Precision = Literal["auto", "bfloat16", "float32"]


class TrainDevice:
    """One opened device, and this process's place among those that ``accelerate launch`` started.

    ``rank`` and ``world`` are 0 and 1 without it. Every process draws its own examples; gradients
    are averaged; only ``main`` writes files.
    """

    def __init__(self, backend: Backend, precision: Precision = "auto") -> None:
        if backend.device.type == "meta":
            raise DeviceRequestError(
                f"the backend {backend.name!r} has shapes and no data, so nothing can be trained "
                "on it; choose another device (`lantern-accel devices` lists them)"
            )
        self.backend = backend
        self.device = backend.device
        self.dtype = _dtype(backend, precision)
        self._accelerator = _accelerator(host=self.device.type == "cpu")
        self.rank, self.world = 0, 1
        if self._accelerator is not None:
            self.device = self._accelerator.device
            self.rank = int(self._accelerator.process_index)
            self.world = int(self._accelerator.num_processes)

    @property
    def main(self) -> bool:
        """Whether this is the process that reports and writes files."""
        return self.rank == 0

    def autocast(self) -> AbstractContextManager[Any]:
        """Compute matrix products in this device's training dtype."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def to(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Bring tensors to the device."""
        return tuple(t.to(self.device, non_blocking=True) for t in tensors)

    def adamw(self, groups: Iterable[Any], **settings: Any) -> torch.optim.Optimizer:
        """Return AdamW, as the device's backend makes it."""
        return self.backend.optimiser(groups, **settings)

    def adopt(self, module: nn.Module) -> None:
        """Let the models within ``module`` compute with this device's operations for training."""
        ops = self.backend.training_ops()
        for part in module.modules():
            if isinstance(getattr(part, "ops", None), TensorOps):
                part.ops = ops  # type: ignore[assignment]

    def prepare(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, *, compile: bool
    ) -> tuple[Callable[..., Any], torch.optim.Optimizer]:
        """Return the module to call in training (averaging gradients, compiled) and the optimizer."""
        self.adopt(module)
        run: Any = module
        if self._accelerator is not None:
            run, optimizer = self._accelerator.prepare(module, optimizer)
        return (self.backend.compile(run) if compile else run), optimizer

    def descend(
        self,
        optimizer: torch.optim.Optimizer,
        loss: Tensor,
        weights: Iterable[Tensor],
        rate: float,
        clip_norm: float,
    ) -> None:
        """Take the optimizer's step at ``rate``: gradients averaged over all processes, and clipped."""
        for group in optimizer.param_groups:
            group["lr"] = rate
        if self._accelerator is not None:
            self._accelerator.backward(loss)
        else:
            loss.backward()  # type: ignore[no-untyped-call]
        self.backend.flush()
        nn.utils.clip_grad_norm_(list(weights), clip_norm)
        optimizer.step()
        self.backend.flush()
        optimizer.zero_grad(set_to_none=True)

    def wait(self) -> None:
        """Wait for the other processes."""
        if self._accelerator is not None:
            self._accelerator.wait_for_everyone()

    def agree(self, value: float) -> float:
        """Return the main process's ``value`` in every process, so that all stop at one step."""
        if self._accelerator is None:
            return value
        from accelerate.utils import broadcast

        # float32, which every device has; the main process gets what the others get.
        shared = torch.tensor([value], dtype=torch.float32).to(self.device)
        return float(broadcast(shared)[0])


def _dtype(backend: Backend, precision: Precision) -> torch.dtype:
    able = backend.compute_dtypes()
    if precision != "auto":
        return backend.dtypes(precision).compute
    if (own := backend.dtypes().operators) is not None:
        return own
    order = [d for d in able if d in (torch.bfloat16, torch.float32)]
    return order[0] if order else torch.float32


def _accelerator(*, host: bool) -> Any:
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return None
    try:
        from accelerate import Accelerator
    except ImportError:
        raise BackendError(
            "several processes were started, but the package accelerate is not installed; "
            "`pip install lantern-accel[multi]` brings it"
        ) from None
    # Autocast is this project's; accelerate is asked for the processes only.
    return Accelerator(mixed_precision="no", cpu=host)
