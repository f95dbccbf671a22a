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
from typing import TYPE_CHECKING, Any

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


def _shown(at: tuple[str, int]) -> str:
    """Return ``folder/file:line: code`` of a file and line."""
    path = Path(at[0])
    return f"{path.parent.name}/{path.name}:{at[1]}: {linecache.getline(*at).strip()}"


def source_line(error: BaseException, apart: Callable[[str], bool] = _apart) -> str:
    """Return the innermost line that an exception came through, except files ``apart``; "": none."""
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        if not apart(frame.f_code.co_filename):
            return _shown((frame.f_code.co_filename, line))
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


#: Positional and named arguments of an operator.
_Call = tuple[tuple[Any, ...], dict[str, Any]]


class _Operator:
    """What is known of an operator before it runs."""

    def __init__(self, func: OpOverload) -> None:
        self.func = func
        self.name: str = func._schema.name
        self.full = self.name
        if func._overloadname != "default":
            self.full += f".{func._overloadname}"
        # Torch makes it of others on every device.
        made = torch._C._dispatch_has_kernel_for_dispatch_key
        self.implicit = func.namespace == "aten" and made(self.full, "CompositeImplicitAutograd")
        self.reads = torch.Tag.data_dependent_output in func.tags
        # With an index the shape depends on data only where that is a mask.
        self.indexes = self.name in ("aten::index", "aten::index_put_", "aten::index_put")
        self.dynamic = torch.Tag.dynamic_output_shape in func.tags and not self.indexes
        self.draws = self.name in RANDOM
        self.compares = self.name in COMPARES
        self.computes = computes(func)


@functools.cache
def _known(func: OpOverload) -> _Operator:
    return _Operator(func)


class Signature(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base is untyped
    """Records every operator of a block.

    ``signature`` has one entry an operator, with shapes, strides, dtypes and Python arguments: equal
    signatures replay as one graph. ``sources`` has the line of each.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as is its __init__
        self.signature: list[tuple[Any, ...]] = []
        self.sources: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        known = _known(func)
        if known.implicit:
            # In inference mode torch would take it apart out of our sight.
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        given = _flat(kwargs, _flat(args, []))
        self._before(known, (args, kwargs), given)
        out = func(*args, **kwargs)
        made = [o for o in _flat((out,), []) if isinstance(o, Tensor)]
        self._after(known, made)
        self.signature.append((known.full, *map(_plain, given), *map(_plain, made)))
        self.sources.append(_calling())
        return out

    def _before(self, known: _Operator, call: _Call, given: list[object]) -> None:
        """Look at an operator before it runs; ``given`` is all that its arguments hold."""

    def _after(self, known: _Operator, made: list[Tensor]) -> None:
        """Look at the tensors that an operator made."""


class Recorder(Signature):  # type: ignore[no-untyped-call]  # torch's base class again
    """Records every operator of a block and what is forbidden in it.

    ``launched`` counts those that compute: neither views nor allocations. ``rules``: a backend's own
    (:class:`.Conformance`).
    """

    def __init__(
        self, device: torch.device, rules: Mapping[str, OperatorRule] | None = None
    ) -> None:
        super().__init__()
        self.device = device
        self.rules = dict(rules or {})
        self.violations: list[Violation] = []
        self.launched = 0

    def _refuse(self, rule: str, operator: str, reason: str = "") -> None:
        self.violations.append(Violation(rule, operator, _shown(_calling()), reason))

    def _before(self, known: _Operator, call: _Call, given: list[object]) -> None:
        full = known.full
        tensors = [a for a in given if isinstance(a, Tensor)]
        if known.reads:
            self._refuse("host_read", full)
        masks = known.indexes and any(t.dtype == torch.bool for t in tensors[1:])
        if known.dynamic or masks:
            self._refuse("dynamic_shape", full)
        if known.draws:
            self._refuse("device_generator", full)
        if known.compares and any(isinstance(a, float) for a in given):
            self._refuse(
                "float64",
                full,
                "a Python float is compared in double by some compilers: use a float32 tensor",
            )
        for rule, complains in self.rules.items():
            if reason := complains(known.func, *call):
                self._refuse(rule, full, reason)
        if any(t.device.type != self.device.type for t in tensors):
            self._refuse("other_device", full)

    def _after(self, known: _Operator, made: list[Tensor]) -> None:
        if any(t.dtype in WIDE for t in made):
            self._refuse("float64", known.full)
        if any(t.device.type != self.device.type for t in made):
            self._refuse("other_device", known.full)
        self.launched += known.computes


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
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
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


def first_difference(a: Signature, b: Signature) -> str:
    """Say where two recorded functions part, and at which source line; empty where they are equal."""
    for index, (one, other) in enumerate(zip(a.signature, b.signature, strict=False)):
        if one != other:
            here, there = _shown(a.sources[index]), _shown(b.sources[index])
            where = here if here == there else f"{here}, then at {there}"
            return f"operator {index}: {one} became {other} at {where}"
    if len(a.signature) == len(b.signature):
        return ""
    longer = max(a, b, key=lambda one: len(one.signature))
    extra = _shown(longer.sources[min(len(a.signature), len(b.signature))])
    return f"{len(a.signature)} operators became {len(b.signature)}; the first further one is at {extra}"
