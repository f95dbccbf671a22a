"""A double of the runtime on torch's CPU: it traces by running, and runs by running again.

What it keeps of torch_xla: nothing runs while a step is traced, a pending tensor has no memory to be
known by, a donated buffer is gone after the run, and a result is new memory until a buffer takes it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lantern_accel_xla.runtime import Runtime


class _Program(TorchDispatchMode):
    """Hashes operators with their Python arguments; a host read raises as torch_xla does."""

    def __init__(self) -> None:
        super().__init__()
        self.digest = hashlib.sha256()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::_local_scalar_dense", "aten::item"):
            raise RuntimeError("Unexpected execution happens inside the compiled function, exiting")
        plain = [one for one in args if isinstance(one, int | float | bool)]
        self.digest.update(repr((func.name(), plain)).encode())
        return func(*args, **(kwargs or {}))


class Double(Runtime):
    """Counts what it compiles in ``counts``."""

    version = "double"

    def __init__(self, client: str = "CPU") -> None:
        self.device, self.client = torch.device("cpu"), client
        self.counts = {"compilations": 0, "fallbacks": 0}
        self.synced = 0
        self.compiled: dict[bytes, tuple[Callable[[], None], list[Tensor]]] = {}
        self.step: Callable[[], None] | None = None
        self._changed: set[int] = set()
        self._before: dict[int, Tensor] = {}
        self._marked: set[int] = set()
        self._owner: dict[int, Tensor] = {}

    def sync(self, *, wait: bool = False) -> None:
        self.synced += 1
        self._changed.clear()

    def wait(self) -> None:
        pass

    @contextlib.contextmanager
    def tracing(self, name: str) -> Iterator[None]:
        self._program = _Program()
        self._before = {}
        with self._program:
            yield
        self._changed = {
            key for key, was in self._before.items() if not torch.equal(was, self._owner[key])
        }

    def strict(self, function: Callable[[], None], name: str) -> Callable[[], None]:
        seen: set[bytes] = set()

        def run() -> None:
            with _Program() as program:
                function()
            seen.add(program.digest.digest())
            if len(seen) > 1:
                raise RuntimeError("exceeded the number of different graphs: max_different_graphs")

        return run

    def pending(self, tensors: Sequence[Tensor]) -> list[bool]:
        return [id(one) in self._changed for one in tensors]

    def handles(self, tensors: Sequence[Tensor]) -> list[int]:
        for one in tensors:
            self._owner[id(one)] = one
            self._before.setdefault(id(one), one.clone())
        return [vars(one).get("_handle", id(one)) for one in tensors]

    def data(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if len(tensors) == 1 and not self._changed:
            value = tensors[0].clone()
            vars(value)["_handle"] = id(tensors[0])
            return [value]
        out = []
        for key, was in self._before.items():
            value = was.clone()
            vars(value)["_handle"] = key
            out.append(value)
        return out

    def donate(self, tensor: Tensor, yes: bool) -> None:
        if yes:
            self._marked.add(vars(tensor)["_handle"])

    def program(self, outputs: Sequence[Tensor]) -> bytes:
        return self._program.digest.digest() + bytes([len(outputs)])

    def compile(self, outputs: Sequence[Tensor], name: str) -> None:
        self.counts["compilations"] += 1
        assert self.step is not None
        self.compiled[self.program(outputs)] = (self.step, list(outputs))

    def forget(self) -> None:
        for key in self._changed:  # the trace ran: what it did is undone
            self._owner[key].copy_(self._before[key])
        self._changed.clear()

    def run(self, program: bytes, inputs: Sequence[Tensor]) -> list[Tensor]:
        step, outputs = self.compiled[program]
        before = [one.clone() for one in outputs]
        step()
        results = [one.clone() for one in outputs]
        for one, was in zip(outputs, before, strict=True):
            one.copy_(was if id(one) not in self._marked else torch.full_like(one, -77))
        return results

    def replace(self, tensor: Tensor, value: Tensor) -> None:
        tensor.copy_(value)

    def metrics(self) -> dict[str, int]:
        return dict(self.counts)

    def memory(self) -> dict[str, int]:
        return {}

    def kind(self) -> str:
        return "double"
