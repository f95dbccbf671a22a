"""Watching a step operator by operator: what it may not do, and whether it is the same every time."""

from __future__ import annotations

import functools
import gc
import linecache
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from lantern_accel.device.launches import computes

if TYPE_CHECKING:
    from lantern_accel.device.backend import OperatorRule


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


#: Operators that draw from a device's own generator.
RANDOM = _aten("multinomial bernoulli rand randn randint uniform_ normal_ exponential_")
#: Operators that decide by comparing; a Python float in them is a double.
COMPARES = _aten("eq ne lt le gt ge masked_fill masked_fill_ searchsorted bucketize isclose")
#: Operators whose index may be a mask.
INDEXES = _aten("index index_put_ index_put")
#: Numbers that are twice as wide as acceptance needs.
WIDE = frozenset({torch.float64, torch.complex128})
_HERE = Path(__file__).resolve()


@dataclass(frozen=True)
class Violation:
    """Something a step may not do: the rule, the operator, the source line that did it, and why not."""

    rule: str
    operator: str
    source: str
    reason: str = ""

    def __str__(self) -> str:
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.operator}{why} at {self.source}"


@functools.cache
def _apart(filename: str) -> bool:
    """Return whether a file is torch's, Python's or the kit's own, and no step's."""
    path = Path(filename)
    return "torch" in path.parts or path.parent == _HERE.parent or filename.startswith("<frozen")


def _calling() -> tuple[str, int]:
    """Return file and line of the innermost frame that is not torch's or the kit's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _apart(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _show(at: tuple[str, int]) -> str:
    """Return ``folder/file:line: code`` of a file and line."""
    path = Path(at[0])
    return f"{path.parent.name}/{path.name}:{at[1]}: {linecache.getline(*at).strip()}"


def source_line(error: BaseException, apart: Callable[[str], bool] = _apart) -> str:
    """Return the innermost line that an exception came through, except files ``apart``; "": none."""
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        if not apart(frame.f_code.co_filename):
            return _show((frame.f_code.co_filename, line))
    return ""


def _flat(value: Iterable[object], found: list[object]) -> list[object]:
    """Add what is in lists, tuples and dictionaries to ``found`` (operators have no other containers)."""
    for one in value.values() if isinstance(value, dict) else value:
        if isinstance(one, list | tuple | dict):
            _flat(one, found)
        else:
            found.append(one)
    return found


def _plain(value: object) -> object:
    """Return an argument as the graph would freeze it: shapes and dtypes of tensors, scalars as is."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype, value.stride())
    return str(value)


@functools.cache
def _name(func: OpOverload) -> str:
    """Return an operator's name, with its overload unless that is the default."""
    name: str = func._schema.name
    return name if func._overloadname == "default" else f"{name}.{func._overloadname}"


@functools.cache
def _implicit(func: OpOverload) -> bool:
    """Return whether torch makes the operator of others on every device."""
    made = torch._C._dispatch_has_kernel_for_dispatch_key
    return func.namespace == "aten" and bool(made(_name(func), "CompositeImplicitAutograd"))


@functools.cache
def _breaks(func: OpOverload) -> tuple[str, ...]:
    """Return the rules that an operator breaks whatever it is given."""
    name = func._schema.name
    rules = {
        "host_read": torch.Tag.data_dependent_output in func.tags,
        "dynamic_shape": torch.Tag.dynamic_output_shape in func.tags and name not in INDEXES,
        "device_generator": name in RANDOM,
    }
    return tuple(rule for rule, broken in rules.items() if broken)


class OpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base is untyped
    """Records every operator of a block and what is forbidden in it.

    ``signature`` has one entry an operator, with shapes, strides, dtypes and Python arguments: equal
    signatures replay as one graph. ``sources`` has the line of each. ``launched`` counts those that
    compute: neither views nor allocations. ``rules``: a backend's own (:class:`.Conformance`).
    """

    def __init__(
        self, device: torch.device, rules: Mapping[str, OperatorRule] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as is its __init__
        self.device = device
        self.rules = dict(rules or {})
        self.signature: list[tuple[object, ...]] = []
        self.sources: list[tuple[str, int]] = []
        self.violations: list[Violation] = []
        self.launched = 0

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if _implicit(func):
            # In inference mode torch would take it apart out of our sight.
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        given = _flat(kwargs, _flat(args, []))
        for rule in _breaks(func):
            self._refuse(rule, func)
        for rule, complains in self.rules.items():
            if reason := complains(func, args, kwargs):
                self._refuse(rule, func, reason)
        tensors = [one for one in given if isinstance(one, Tensor)]
        # With an index the shape depends on data only where that is a mask.
        if func._schema.name in INDEXES and any(one.dtype == torch.bool for one in tensors[1:]):
            self._refuse("dynamic_shape", func)
        if func._schema.name in COMPARES and any(isinstance(one, float) for one in given):
            why = "a Python float is compared in double by some compilers: use a float32 tensor"
            self._refuse("float64", func, why)
        if any(one.device.type != self.device.type for one in tensors):
            self._refuse("other_device", func)
        out = func(*args, **kwargs)
        made = [one for one in _flat((out,), []) if isinstance(one, Tensor)]
        if any(one.dtype in WIDE for one in made):
            self._refuse("float64", func)
        if any(one.device.type != self.device.type for one in made):
            self._refuse("other_device", func)
        self.launched += computes(func)
        self.signature.append((_name(func), *map(_plain, given), *map(_plain, made)))
        self.sources.append(_calling())
        return out

    def _refuse(self, rule: str, func: OpOverload, reason: str = "") -> None:
        self.violations.append(Violation(rule, _name(func), _show(_calling()), reason))


class Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base class again
    """Notes the tensors that were there before a block and that its operators write to, by ``id``.

    ``through_views``: those written through a view. Outside of the inference mode alone, in which torch
    does not note what a view is of.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as is its __init__
        alive = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
        self._before: dict[int, Tensor] = {id(one): one for one in alive}
        self.written: dict[int, Tensor] = {}
        self.through_views: set[int] = set()

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for tensor in _flat((value,), []):
                if isinstance(tensor, Tensor):
                    owner = tensor._base if tensor._base is not None else tensor
                    if id(owner) in self._before:
                        self.written[id(owner)] = owner
                        self.through_views |= {id(owner)} if owner is not tensor else set()
        return func(*args, **kwargs)


def first_difference(a: OpRecorder, b: OpRecorder) -> str:
    """Say where two recorded functions part, and at which source line; empty where they are equal."""
    for index, (one, other) in enumerate(zip(a.signature, b.signature, strict=False)):
        if one != other:
            here, there = _show(a.sources[index]), _show(b.sources[index])
            where = here if here == there else f"{here}, then at {there}"
            return f"operator {index}: {one} became {other} at {where}"
    if len(a.signature) == len(b.signature):
        return ""
    longer = max(a, b, key=lambda one: len(one.signature))
    extra = _show(longer.sources[min(len(a.signature), len(b.signature))])
    return f"{len(a.signature)} operators became {len(b.signature)}; the first further one is at {extra}"
