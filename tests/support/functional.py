"""A runtime of another kind, as a backend out of the tree: it runs functions of values, never in place.

OpenVINO, ONNX Runtime, TVM and IREE are such: a program has inputs and outputs, and nothing it reads can
be written to. :meth:`FunctionalBackend.capture` records a step once, operator by operator, turns every
write into a new value, and checks that only those buffers come back changed that the contract names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from lantern_accel.device import Backend, DeviceFacts, Replay, Support, buffers_of
from lantern_accel.errors import BackendError


@dataclasses.dataclass(frozen=True)
class Ref:
    """A tensor of the program: a part of a value, which is one-dimensional."""

    value: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def of(self, values: Mapping[int, Tensor]) -> Tensor:
        """Return the part, whose bits may be read as another dtype than the value's."""
        return values[self.value].view(self.dtype).as_strided(self.size, self.stride, self.offset)


@dataclasses.dataclass(frozen=True)
class Call:
    """One operator without side effects; ``made``: its outputs, ``into``: what it replaces a part of."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[int, ...]
    into: Ref | None = None


def flat(tensor: Tensor) -> Tensor:
    """Return the whole memory of a tensor as one dimension."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((count,), (1,), 0)


def without_writing(operator: Any) -> Any:
    """Return the operator that makes a new value where this one writes to its first argument."""
    packet = operator._schema.name.partition("::")[2].removesuffix("_")
    found = getattr(getattr(torch.ops.aten, packet), operator._overloadname)
    if found._schema.is_mutable:
        raise BackendError(f"{operator} has no form without side effects")
    return found


class Program(TorchDispatchMode):
    """What a step computes, as calls on values; values that it does not make are its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.inputs: dict[int, Tensor] = {}
        self.changed: set[int] = set()
        self._made: set[int] = set()
        self._alive: list[Tensor] = []  # so that no memory is given out twice

    def ref(self, tensor: Tensor) -> Ref:
        key = tensor.untyped_storage()._cdata
        if key not in self._made and key not in self.inputs:
            self.inputs[key] = tensor
        self._alive.append(tensor)
        return Ref(key, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given, named = tree_map(
            lambda x: self.ref(x) if isinstance(x, Tensor) else x, (args, kwargs)
        )
        out = func(*args, **kwargs)
        if func._schema.is_mutable:
            into = given[0]
            self.calls.append(Call(without_writing(func), given, named, (), into))
            if into.value in self.inputs:
                self.changed.add(into.value)
            return out
        read = {one.value for one in tree_flatten((given, named))[0] if isinstance(one, Ref)}
        outs = [one for one in tree_flatten(out)[0] if isinstance(one, Tensor)]
        fresh = [one for one in outs if one.untyped_storage()._cdata not in read]
        if fresh:
            self._alive += fresh
            keys = tuple(one.untyped_storage()._cdata for one in fresh)
            self._made.update(keys)
            self.calls.append(Call(func, given, named, keys))
        return out

    def run(self, values: dict[int, Tensor]) -> dict[int, Tensor]:
        """Return every value at the end; those given are not written to."""
        values = dict(values)
        for call in self.calls:
            args, kwargs = tree_map(
                lambda x: x.of(values) if isinstance(x, Ref) else x,
                (call.args, call.kwargs),
                is_leaf=lambda x: isinstance(x, Ref),
            )
            out = call.operator(*args, **kwargs)
            if call.into is not None:
                at = call.into
                whole = values[at.value]
                values[at.value] = torch.as_strided_scatter(
                    whole, out.to(whole.dtype), at.size, at.stride, at.offset
                )
            else:
                made = [one for one in tree_flatten(out)[0] if isinstance(one, Tensor)]
                values.update(zip(call.made, map(flat, made[-len(call.made) :]), strict=True))
        return values


class FunctionalReplay(Replay):
    """Runs a program on the current values of its inputs and puts what comes back into their place."""

    captured = True

    def __init__(self, step: Callable[[], None], named: Mapping[str, Tensor]) -> None:
        super().__init__(step)
        before = {name: tensor.clone() for name, tensor in named.items()}
        with Program() as self.program:
            step()
        for name, tensor in named.items():  # recording ran the step
            tensor.copy_(before[name])
        keys = {tensor.untyped_storage()._cdata: name for name, tensor in named.items()}
        unnamed = self.program.changed - set(keys)
        if unnamed:
            shapes = [list(self.program.inputs[key].shape) for key in unnamed]
            raise BackendError(
                f"the step changes buffers of {shapes}, which its contract does not name"
            )
        self.state = {key: named[keys[key]] for key in self.program.changed}
        #: Values that no call changes between requests: what such a runtime keeps on its device.
        self.constants = {
            key: tensor for key, tensor in self.program.inputs.items() if key not in keys
        }

    def __call__(self) -> None:
        given = {key: flat(tensor).clone() for key, tensor in self.program.inputs.items()}
        kept = {key: value.clone() for key, value in given.items()}
        values = self.program.run(given)
        assert all(torch.equal(given[key], kept[key]) for key in given), "an input was written to"
        for key, tensor in self.state.items():
            flat(tensor).copy_(values[key])


class FunctionalBackend(Backend):
    """torch's CPU, captured by the functional runtime."""

    name, version = "functional", "1.0"

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.replays: list[FunctionalReplay] = []

    def facts(self) -> DeviceFacts:
        return DeviceFacts(
            backend=self.name, device="cpu", name="Functional", torch=torch.__version__
        )

    def support(self, capability: str) -> Support:
        return Support(True) if capability == "capture" else super().support(capability)

    def capture(self, step: Callable[[], None], name: str = "step") -> Replay:
        self.replays.append(FunctionalReplay(step, buffers_of(step)))
        return self.replays[-1]

    def synchronize(self) -> None:
        pass
