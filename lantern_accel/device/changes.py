"""Finds the tensors that a step changes, for devices that replay a function of inputs and outputs."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import TensorWeakRef

from lantern_accel.device.capture import Step


def buffers_of(step: Step) -> dict[str, Tensor]:
    """Return the tensors that ``step`` may change in place, by name; a step changes nothing else.

    For devices that replay a function of inputs and outputs: these are inputs that come back as outputs,
    and what comes back becomes their new value. An engine's steps name them; of any other function the
    answer is empty, and :func:`changed_by` finds them out.
    """
    method = step.func if isinstance(step, functools.partial) else step
    named = getattr(getattr(method, "__self__", None), "changes", None)
    return dict(named) if isinstance(named, dict) else {}


class Arguments(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base is untyped
    """Notes the tensors from outside that a block's operators take, and those that they write to.

    ``given``: every tensor that was there before the block and is an argument of an operator, in the
    order of first use. ``written``: those of them that an operator writes to in place, by ``id``;
    ``through_views``: the ``id`` of those that it writes to through a view made in the block.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as is its __init__
        self.given: dict[int, Tensor] = {}
        self.written: dict[int, Tensor] = {}
        self.through_views: set[int] = set()
        #: What the block made, by id, and what it is a view of. Not kept: a lazy runtime may take a
        #: result that somebody holds for one that is still to be filled.
        self._made: dict[int, tuple[TensorWeakRef, Tensor | None]] = {}

    def _own(self, tensor: Tensor) -> bool:
        """Return whether the block made this tensor; an id may be one's that is gone."""
        entry = self._made.get(id(tensor))
        return entry is not None and entry[0]() is tensor

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        schema = func._schema.arguments
        named = [(one, value) for one, value in zip(schema, args, strict=False)]
        named += [(one, kwargs[one.name]) for one in schema if one.name in kwargs]
        seen = None  # what this operator's results are views of
        for argument, value in named:
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if not isinstance(tensor, Tensor):
                    continue
                if self._own(tensor):
                    owner = self._made[id(tensor)][1]
                else:
                    owner = self.given.setdefault(id(tensor), tensor)
                if argument.alias_info is not None:
                    seen = owner
                    if argument.alias_info.is_write and owner is not None:
                        self.written[id(owner)] = owner
                        if owner is not tensor:
                            self.through_views.add(id(owner))
        out = func(*args, **kwargs)
        for tensor in out if isinstance(out, list | tuple) else (out,):
            if not isinstance(tensor, Tensor) or self._own(tensor):
                continue
            if self.given.get(id(tensor)) is not tensor:
                self._made[id(tensor)] = (TensorWeakRef(tensor), seen)
        return out


def changed_by(step: Step) -> list[Tensor]:
    """Run ``step`` once; return the tensors from outside that torch's operators wrote to in it."""
    with Arguments() as seen:
        step()
    return list(seen.written.values())
