"""Doubles of an accelerator that torch knows: the CPU under another name, lacking something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from lantern_accel_torch import accelerator

#: Of an operator's name and its tensors: why the device cannot, empty where it can.
Refuses = Callable[[str, list[Tensor]], str]
GATHERS = ("aten::gather", "aten::index_select")


class Lacking(TorchDispatchMode):
    """Refuses operators as a device does that has no kernel for them.

    ``narrow``: gathers by int32, which the device takes and the CPU may not, are made of int64 ones.
    """

    def __init__(self, refuses: Refuses, narrow: bool = False) -> None:
        super().__init__()
        self.refuses, self.narrow = refuses, narrow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
        name = func._schema.name
        if reason := self.refuses(name, tensors):
            raise NotImplementedError(
                f"The operator '{name}' is not implemented for beads: {reason}"
            )
        if self.narrow and name in GATHERS and args[2].dtype == torch.int32:
            args = (*args[:2], args[2].long(), *args[3:])
        return func(*args, **(kwargs or {}))


def no_bfloat16(name: str, tensors: list[Tensor]) -> str:
    return "BFloat16" if any(one.dtype == torch.bfloat16 for one in tensors) else ""


def no_wide_gather(name: str, tensors: list[Tensor]) -> str:
    wide = name in GATHERS and tensors[1].dtype == torch.int64
    return "indices of 64 bits" if wide else ""


def no_operator(name: str, tensors: list[Tensor]) -> str:
    return "it has no kernel" if name == "aten::index_copy_" else ""


class Beads(accelerator.Accelerator):
    """Two devices of a vendor's, whose memory is the host's."""

    def device(self, index: int) -> torch.device:
        return torch.device("cpu")

    def name(self, index: int) -> str:
        return "Beads 9"

    def driver(self, index: int) -> str:
        return "driver 1"

    def synchronize(self, device: torch.device) -> None:
        pass


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's accelerator be the beads."""
    monkeypatch.setattr(accelerator, "find", lambda: Beads("beads", 2))
